"""The status of an engine, for operators: of a lone one, or of one behind a router."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from twinphase.engine.loading.ceilings import measured_ceilings
from twinphase.engine.process.messages import EngineFacts, RankFacts, StepStats

SHARE_WINDOW_SECONDS = 10.0


class WorkerStatus(msgspec.Struct, frozen=True):
    """One engine; totals are since the server started, and None is unknown.

    Attributes:
        id, role: its name, and its role: both, prefill or decode.
        host, pid: its machine and process; None if they are not known.
        state: "ready", or its present activity.
        running, waiting: numbers of requests.
        kv_cache_usage: fraction of its blocks that requests hold.
        cached_blocks: blocks in its prefix cache, as far as a router knows.
        prefill_share, decode_share: fraction of the last seconds that it spent in each phase.
        prefill_seconds, decode_seconds: the same since the server started, in seconds.
        restarts: how often it was started again, or connected to again.
        transfers: requests whose KV blocks are on their way from it to another one.
        blocks_sent: KV blocks of prompts that it prefilled for others, and that have arrived;
            `bytes_sent` bytes of them were sent.
        blocks_received: blocks from other workers, by outcome (docs/cluster.md).
        role_reason: the pool that it last moved to (`--elastic-roles`), and why; "" if it never
            moved.
        itl_slo_seconds: the gap between tokens that it keeps for running answers.
        chunk_tokens: prompt tokens that a step beside one decode has room for.
        ceilings: measured limits of its machine: `read_bandwidth` (bytes per second, of this
            model's weights), `int8_ops`, `float32_flops`, `bfloat16_flops` (per second).
        ranks: its processes, if there are several (`--tensor-parallel-size`).
        first_token_mismatches: answers that it began, for which another worker computed a different
            first token.
    """

    id: str
    role: str
    host: str
    pid: int | None
    state: str
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    cached_blocks: int | None = None
    prefill_share: float = 0.0
    decode_share: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    restarts: int = 0
    first_token_mismatches: int = 0
    transfers: int = 0
    blocks_sent: int = 0
    bytes_sent: int = 0
    blocks_received: dict[str, int] = {}
    role_reason: str = ""
    itl_slo_seconds: float | None = None
    chunk_tokens: int | None = None
    ceilings: dict[str, float | None] | None = None
    ranks: list[RankFacts] = []

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


class PhaseTimes:
    """Time of an engine in each phase: in total, and as shares of the last seconds."""

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]  # Of prefill and of decode.
        self._recent: deque[tuple[float, float, float]] = deque()

    def add(self, stats: StepStats) -> None:
        self._recent.append((stats.end, stats.prefill_seconds, stats.decode_seconds))
        while self._recent[0][0] < stats.end - SHARE_WINDOW_SECONDS:
            self._recent.popleft()
        self._seconds[0] += stats.prefill_seconds
        self._seconds[1] += stats.decode_seconds

    def fields(self, now: float) -> dict[str, Any]:
        """The values as fields of `WorkerStatus`."""
        recent = [step for step in self._recent if step[0] >= now - SHARE_WINDOW_SECONDS]
        prefill, decode = (
            sum(step[part] for step in recent) / SHARE_WINDOW_SECONDS for part in (1, 2)
        )
        return {
            "prefill_share": round(min(1.0, prefill), 4),
            "decode_share": round(min(1.0, decode), 4),
            "prefill_seconds": self._seconds[0],
            "decode_seconds": self._seconds[1],
        }


def limits_of(facts: EngineFacts | None, stats: StepStats | None, where: str) -> dict[str, Any]:
    """Present limits as fields of `WorkerStatus`, from the last step or from the start."""
    if facts is None or facts.shape is None:
        return {}
    here = measured_ceilings(facts.config) if where == "localhost" else None
    ceilings = here or facts.ceilings
    started = facts.pace.slo_seconds if facts.pace is not None else None
    return {
        "itl_slo_seconds": stats.itl_slo_seconds if stats is not None else started,
        "chunk_tokens": stats.chunk_tokens if stats is not None else facts.chunk_tokens,
        "ceilings": None
        if ceilings is None
        else {
            "read_bandwidth": ceilings.read_bandwidth(facts.shape.weight_bytes),
            "int8_ops": ceilings.int8_ops,
            "float32_flops": ceilings.float32_flops,
            "bfloat16_flops": ceilings.bfloat16_flops,
        },
    }
