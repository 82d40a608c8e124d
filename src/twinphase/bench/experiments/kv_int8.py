"""Claim: an int8 KV cache makes a context's memory smaller and decode behind it faster, both against the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.experiments.experiment import (
    Estimate,
    Experiment,
    Judged,
    Rule,
    exactly,
    median_of,
    point,
    ratio_of,
    shown,
)
from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.plots import bars
from twinphase.bench.report import Column, Plot, Table
from twinphase.bench.statistics import percentile
from twinphase.phases.work import kv_bytes_per_token

__all__ = ["EXPERIMENT", "KVInt8"]

CONTEXT = (2048, 1024, 512, 256, 128)
STEPS = 16
AUTO, INT8 = "auto: int8 keys, 16-bit values", "int8: keys and values"
SMALLER, FASTER = "memory, int8 / default", "decode time, default / int8"


@dataclass(frozen=True)
class KVInt8:
    """Decode behind a long context with two formats of the KV cache.

    Attributes:
        context: tokens before the decoded ones.
        token_bytes: of a token in the cache, by format.
        formula: 2 L H_kv d b with b = 2, for comparison: no cache of this engine is like that.
        seconds: of a token, median of each repetition, by format.
    """

    context: int
    token_bytes: dict[str, int]
    formula: int
    seconds: dict[str, list[float]]


def _measure(bench: Workbench) -> KVInt8:
    speed, shape = bench.speed, bench.workshop.shape
    context = bench.size("context, tokens", CONTEXT, lambda n: speed.prefill(n) / 3 + 3 * speed.decode(STEPS))
    workshops = {AUTO: bench.workshop, INT8: bench.open(kv_cache_dtype="int8")}
    prompt = bench.workshop.prompt(context)
    engines = {name: workshop.engine(enable_prefix_caching=True) for name, workshop in workshops.items()}
    for engine in engines.values():
        engine.prefill(prompt)

    def decode(name: str) -> float:
        return percentile([record.seconds for record in engines[name].decode([prompt], STEPS)], 50)

    seconds = bench.interleave({name: partial(decode, name) for name in engines})
    sizes = {name: kv_bytes_per_token(workshop.shape) for name, workshop in workshops.items()}
    return KVInt8(context, sizes, 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim, seconds)


def _estimates(found: KVInt8) -> Mapping[str, Estimate]:
    return {
        SMALLER: exactly(found.token_bytes[INT8] / found.token_bytes[AUTO]),
        FASTER: ratio_of(found.seconds[AUTO], found.seconds[INT8]).at(found.context),
    }


def _why(found: KVInt8, judged: Sequence[Judged]) -> Sequence[str]:
    auto, int8 = found.token_bytes[AUTO], found.token_bytes[INT8]
    saved = (auto - int8) * found.context
    change = (median_of(found.seconds[AUTO]).value - median_of(found.seconds[INT8]).value) * 1e3
    return [
        f"A token takes {auto:,} bytes in this engine's default format, which has int8 keys already, and {int8:,} with "
        "int8 values too; the scales of each head come on top of one byte a value. Beside that: 16-bit keys and values "
        f"would take {found.formula:,} bytes by the formula 2 L H_kv d b, {found.formula / int8:.2f} times as many as "
        "int8; this engine has no such format to measure.",
        f"Behind {found.context:,} tokens, int8 spares reading {saved / 1e6:.3g} MB for each token; the measured "
        "change is "
        f"{change:+.3g} ms less a token. Values must be scaled back to be summed, which costs arithmetic: reading less "
        "helps only where reading was the limit.",
    ]


def _tables(found: KVInt8) -> Sequence[Table]:
    columns = (
        Column("KV cache"),
        Column("bytes a token", "as stored"),
        Column("ms a token", f"decode alone behind {found.context:,} tokens; median and interval"),
    )
    rows = tuple((name, f"{found.token_bytes[name]:,}", shown(found.seconds[name], 1e3)) for name in (AUTO, INT8))
    return (Table("Two formats of the KV cache", columns, (*rows, ("16-bit (formula)", f"{found.formula:,}", ""))),)


def _plots(found: KVInt8) -> Sequence[Plot]:
    sizes = [{"cache": name, "bytes": size} for name, size in found.token_bytes.items()]
    sizes.append({"cache": "16-bit (formula)", "bytes": found.formula})
    times = [{"cache": name, **point(values, "milliseconds", 1e3)} for name, values in found.seconds.items()]
    return (
        bars(
            "kv_int8_bytes",
            "Bytes of a token in the KV cache",
            sizes,
            ("cache", ""),
            ("bytes", "bytes a token, all layers"),
            order=["16-bit (formula)", AUTO, INT8],
        ),
        bars(
            "kv_int8_time",
            f"A decode token behind {found.context:,} tokens",
            times,
            ("cache", ""),
            ("milliseconds", "time of one token, ms"),
            order=[AUTO, INT8],
            caption="Medians with intervals; one request alone.",
        ),
    )


EXPERIMENT = Experiment(
    name="kv-int8",
    claim="An int8 KV cache makes a context's memory smaller by a quarter or more, and decode behind it faster.",
    method="The same decode behind the same long context, with this engine's default KV format and with int8.",
    rules=(
        Rule(SMALLER, "bytes of a token as stored, int8 / default format (int8 keys, 16-bit values)", at_most=0.75),
        Rule(FASTER, "time of a token with the default format / with int8", at_least=1.03, fails_from=CONTEXT[0]),
    ),
    meaning="Choose the KV format by the memory that long contexts need; measure before expecting speed.",
    share=1.0,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
)
