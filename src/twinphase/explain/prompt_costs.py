"""Computes the cost of each part of a prompt: tokens, prefill time, and KV cache bytes.

`tokenizer/prompt_parts.py` finds the parts.
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
    """Costs of one part of a prompt, which may have several runs of tokens.

    Attributes:
        prefill_share: fraction of the prefill time; 0 for cached tokens.
        prefill_seconds: that fraction of the measured time.
        kv_bytes: bytes of keys and values, cached ones included.
    """

    part: P
    tokens: int
    cached_tokens: int
    prefill_share: float
    prefill_seconds: float
    kv_bytes: int

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
    """Divide a prompt's prefill time among its parts by the cost model's price of each token.

    The token at position p attends to p + 1 tokens, or to a window, and is charged the model's
    price for that. The rest of the predicted prefill time is divided equally among the computed
    tokens. The shares add up to 1, or to 0 if nothing was computed.

    Args:
        runs: (part, first token, token after the last), in order and without gaps from 0.
        num_cached_tokens: number of leading tokens from the prefix cache, including blocks that
            others computed during this prefill.
        prefill_seconds: time to divide.
        cost_model: source of the prices.
        shape: shape of the model.
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
    """The part of a token, such as the first uncached one; None after the prompt."""
    found = bisect_right(runs, token_index, key=lambda run: run[1]) - 1
    return runs[found][0] if found >= 0 and token_index < runs[found][2] else None
