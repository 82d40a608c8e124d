"""The formulas of TTFT, TPOT, ITL and E2E, for the engine's and for a client's clock.

All times are seconds on one monotonic clock. The definitions are those of vLLM's benchmarks: TTFT
counts from the arrival or the intended send time, TPOT excludes the first token, and ITL is never
divided by the number of tokens in a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def ttft(arrival: float, first_token: float) -> float:
    """Time to first token: first token - arrival."""
    return first_token - arrival


def tpot(first_token: float, last_token: float, num_tokens: int) -> float | None:
    """Time per output token: (last token - first token) / (tokens - 1); None below two tokens."""
    return (last_token - first_token) / (num_tokens - 1) if num_tokens > 1 else None


def itl(token_times: Sequence[float]) -> list[float]:
    """Inter-token latencies: each gap between consecutive tokens, or pieces of output."""
    return [later - earlier for earlier, later in pairwise(token_times)]


def e2e(arrival: float, last_token: float) -> float:
    """End-to-end latency: last token - arrival."""
    return last_token - arrival
