"""Made-up prompts as token ids, no two alike from their first block on: nothing can come from a prefix cache."""

from __future__ import annotations

import random

__all__ = ["FreshIds"]


class FreshIds:
    """Random ordinary token ids.

    The ends of a vocabulary are left out: control tokens and bytes lie there, and added tokens.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._low, self._high = vocab_size // 20, max(vocab_size // 20 + 1, vocab_size * 4 // 5)

    def take(self, count: int) -> list[int]:
        """That many token ids."""
        return [self._random.randrange(self._low, self._high) for _ in range(count)]
