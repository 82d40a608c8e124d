"""Builds `hello` and `totals`: the server's facts and counters under the feed's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from twinphase import __version__
from twinphase.engine.process.messages import EngineFacts
from twinphase.engine.process.status import WorkerStatus
from twinphase.phases.hardware import Ceilings, processor_name
from twinphase.phases.work import ModelShape, kv_bytes_per_token
from twinphase.server.live.events import FORMAT, VERSION, duration_ms
from twinphase.server.live.lanes import Fields, Lanes


def hello(facts: EngineFacts, *, model: str, quantization: str, boot: str, origin: float) -> Fields:
    """All fields except the workers' and the reader's; `origin` is a Unix time in ms."""
    config = facts.config
    ceilings = facts.ceilings
    pace = facts.pace
    slo = pace.slo_seconds if pace is not None else config.slo_seconds
    return {
        "format": FORMAT,
        "version": VERSION,
        "boot": boot,
        "origin": round(origin, 3),
        "twinphase": __version__,
        "model": model,
        "quantization": quantization,
        "processor": ceilings.processor if ceilings else processor_name(),
        "threads": facts.threads,
        "isa": facts.isa or None,
        "backend": config.backend,
        "context": config.max_model_len,
        "seats": config.max_num_seqs,
        "block_size": config.block_size,
        "itl_slo_ms": duration_ms(slo) if slo else None,
        "slo_chosen": pace is not None and pace.chosen,
        "ceilings": _ceilings(ceilings) if ceilings else None,
        "shape": _shape(facts.shape) if facts.shape else None,
    }


def workers(found: Sequence[WorkerStatus], lanes: Lanes, num_blocks: int | None) -> list[Fields]:
    """The workers in the order of their numbers; a lone engine has `num_blocks` blocks."""
    by_name = {worker.id: worker for worker in found}
    names = list(lanes.workers) or list(by_name)
    rows = []
    for number, name in enumerate(names):
        worker = by_name.get(name)
        state = worker.state if worker else "gone"
        row: Fields = {"id": name, "role": worker.role if worker else "", "state": state}
        row["host"] = worker.host if worker else ""
        blocks = lanes.blocks.get(number)
        total = blocks.size if blocks is not None else num_blocks if len(names) == 1 else None
        rows.append(row | ({"num_blocks": total} if total else {}))
    return rows


def totals(lanes: Lanes, found: Sequence[WorkerStatus]) -> Fields:
    stats = lanes.stats
    counts: Fields = {
        "misses": dict(lanes.misses),
        **{name: lanes.drafts[name] for name in ("drafts", "draft_tokens", "accepted_tokens")},
    }
    if stats is not None:
        counts |= {
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
            "preemptions": stats.num_preemptions,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_cache_usage": round(stats.kv_cache_usage, 6),
        }
    by_name = {worker.id: worker for worker in found}
    order = [name for name in lanes.workers if name in by_name] or list(by_name)
    listed: list[Any] = [msgspec.to_builtins(by_name[name]) for name in order]
    return counts | {"workers": listed}


def _ceilings(ceilings: Ceilings) -> Fields:
    names = ("int8_ops", "float32_flops", "bfloat16_flops", "float16_flops")
    return {
        **{name: getattr(ceilings, name) for name in names},
        "bandwidth": ceilings.bandwidth,
        "provisional": ceilings.provisional,
    }


def _shape(shape: ModelShape) -> Fields:
    """FLOP and bytes per token, from the formulas of `step_cost`."""
    return {
        "flops_per_token": 2 * shape.linear_parameters,
        "flops_per_logit": 2 * shape.head_parameters,
        "flops_per_context": 4 * shape.num_heads * shape.head_dim * shape.num_layers,
        "weight_bytes": shape.weight_bytes,
        "kv_token_bytes": kv_bytes_per_token(shape),
    }
