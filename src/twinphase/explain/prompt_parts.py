"""What each part of a prompt cost: tokens, cached or computed, its share of the prefill, and its bytes in the KV cache.

Parts are whatever the caller names them by. Not for finding them (`tokenizer/prompt_parts.py`), nor
for reading clocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinphase.batch import StepWork
from twinphase.phases.cost import FEATURES, CostModel
from twinphase.phases.work import ModelShape, kv_bytes_per_token

PREFILL_CONTEXTS = FEATURES.index("prefill_contexts")
P = TypeVar("P", bound=Hashable)


@dataclass(frozen=True)
class PartReport(Generic[P]):
    """What one part of a prompt cost."""

    part: P
    tokens: int  # of it, wherever in the prompt they stand
    cached_tokens: int  # those of them that the prefix cache held
    prefill_share: float  # of the prefill's time, 0 to 1; a cached token has none
    prefill_seconds: float  # that share of it
    kv_bytes: int  # of its keys and values, cached ones included

    @property
    def computed_tokens(self) -> int:
        return self.tokens - self.cached_tokens


def divide(
    runs: Sequence[tuple[P, int, int]],
    num_cached_tokens: int,
    prefill_seconds: float,
    cost_model: CostModel,
    shape: ModelShape,
) -> list[PartReport[P]]:
    """Divides a prompt's prefill among its parts, as the cost model would price each token.

    The token at position p attends to p + 1 tokens, or to a window of them, at the model's price
    for that. All else that the model expects of the prefill is the same for each computed token.
    The shares add up to 1, or to 0 if nothing was computed.

    Args:
        runs: (part, first token, the one behind its last), in order and without gaps from 0.
        num_cached_tokens: tokens at the prompt's beginning that were in the prefix cache. What
            others computed while the prompt was being read is counted as if it stood there.
        prefill_seconds: what is to be divided.
        cost_model: has the prices.
        shape: of the model.
    """
    num_tokens = runs[-1][2] if runs else 0

    def attention(work: StepWork) -> float:
        return cost_model.prices[PREFILL_CONTEXTS] * cost_model.features(work)[PREFILL_CONTEXTS]

    whole = StepWork.of_chunk(
        num_cached_tokens, max(0, num_tokens - num_cached_tokens), True, shape.window
    )
    row = max(0.0, cost_model.seconds(whole) - attention(whole)) / max(1, whole.rows)
    tokens: dict[P, int] = {}
    computed: dict[P, int] = {}
    seconds: dict[P, float] = {}
    for part, first, stop in runs:
        begin = min(max(first, num_cached_tokens), stop)
        work = StepWork.of_chunk(begin, stop - begin, False, shape.window)
        tokens[part] = tokens.get(part, 0) + stop - first
        computed[part] = computed.get(part, 0) + work.rows
        seconds[part] = seconds.get(part, 0.0) + row * work.rows + attention(work)
    total = sum(seconds.values())
    token_bytes = kv_bytes_per_token(shape)
    shares = {part: own / total if total else 0.0 for part, own in seconds.items()}
    return [
        PartReport(
            part,
            n,
            n - computed[part],
            shares[part],
            shares[part] * prefill_seconds,
            n * token_bytes,
        )
        for part, n in tokens.items()
    ]


def part_at(runs: Sequence[tuple[P, int, int]], token_index: int) -> P | None:
    """The part of one token, such as that where the prefix cache missed; None behind the prompt."""
    found = bisect_right(runs, token_index, key=lambda run: run[1]) - 1
    return runs[found][0] if found >= 0 and token_index < runs[found][2] else None
