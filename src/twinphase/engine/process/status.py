"""The status of an engine behind a router, for operators; the router fills it in."""

from __future__ import annotations

import msgspec

from twinphase.engine.process.messages import RankFacts


class WorkerStatus(msgspec.Struct, frozen=True):
    """One engine behind a router; totals are since the server started.

    Attributes:
        id, role: its name, and what it is there for: both, prefill or decode.
        host, pid: where it runs; None where that is not known.
        state: "ready", or what it is doing instead.
        running, waiting: requests.
        kv_cache_usage: fraction of its blocks that requests hold.
        cached_blocks: blocks in its prefix cache, as far as the router knows.
        prefill_share, decode_share: of the last seconds, the fraction that it computed in each
            phase.
        prefill_seconds, decode_seconds: the same since the server started, in seconds.
        restarts: how often it was started again, or connected to again.
        transfers: requests whose KV blocks are on their way from it to another one.
        blocks_sent: of prompts that it read for others, and that are there now; bytes_sent of them
            went over the wire.
        blocks_received: from others, by what became of each (docs/cluster.md).
        role_reason: to which pool it went over last (`--elastic-roles`), and why; "" if it never
            did.
        ranks: its processes, where it is several (`--tensor-parallel-size`).
        first_token_mismatches: answers that it began, and whose first token another worker computed
            otherwise.
    """

    id: str
    role: str
    host: str
    pid: int | None
    state: str
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    cached_blocks: int = 0
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
    ranks: list[RankFacts] = []

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"
