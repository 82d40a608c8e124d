"""Excludes `bad_words` and restricts output to `allowed_token_ids`, as in vLLM.

Both apply together with a grammar or thinking budget. `logit_edits.py` applies biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.constraint import CONSTRAINT_FAILURE, Constraint
from twinphase.request import SamplingParams
from twinphase.sampling.sampler import ConstraintError

F32 = NDArray[np.float32]


def filtered(
    form: Constraint | None, params: SamplingParams, encode: Callable[[str], Sequence[int]]
) -> Constraint | None:
    """A request's constraint `form`, if any, with its token filter; `encode` adds no BOS."""
    if not params.bad_words and not params.allowed_token_ids:
        return form
    return TokenFilter(form, params.allowed_token_ids, _spellings(params.bad_words or (), encode))


def _spellings(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Token ids of each word at the start of a text, and after a space if they differ there.

    As vLLM's `SamplingParams.update_from_tokenizer`.
    """
    found: list[list[int]] = []
    for word in words:
        plain = list(encode(word.lstrip()))
        spaced = list(encode(" " + word.lstrip()))
        found.append(plain)
        if plain and spaced[:1] != plain[:1] and len(spaced) == len(plain):
            found.append(spaced)
    return [spelling for spelling in found if spelling]


class TokenFilter:
    """A `Constraint`: tokens that `form` allows and that are listed, without bad words."""

    def __init__(
        self, form: Constraint | None, allowed: Sequence[int] | None, bad: Sequence[Sequence[int]]
    ) -> None:
        """`bad`: non-empty sequences of tokens; each excludes its last token after the others."""
        self._form = form
        self._bad = [list(word) for word in bad]
        self._allowed = np.unique(np.array(allowed, np.intp)) if allowed else None
        self._listed = frozenset(allowed or ())

    def restrict(self, logits: F32, output_token_ids: Sequence[int]) -> F32:
        """As `Constraint`; `ConstraintError` if no token is left."""
        before = logits if self._form is None else self._form.restrict(logits, output_token_ids)
        forbidden = self._forbidden(output_token_ids)
        if self._allowed is None:
            if not forbidden:
                return before
            after = before.copy()
        else:
            after = np.full_like(before, -np.inf)
            after[self._allowed] = before[self._allowed]
        after[forbidden] = -np.inf
        if after.max() == -np.inf:
            after_tokens = f"after {len(output_token_ids)} tokens"
            raise ConstraintError(
                f"{CONSTRAINT_FAILURE} {after_tokens}: bad_words and allowed_token_ids leave none."
            )
        return after

    def forced(self, output_token_ids: Sequence[int], limit: int) -> list[int]:
        forced = [] if self._form is None else self._form.forced(output_token_ids, limit)
        return forced[: self._passes(output_token_ids, forced)]

    def admits(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> int:
        count = len(draft) if self._form is None else self._form.admits(output_token_ids, draft)
        return self._passes(output_token_ids, draft[:count])

    def _passes(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> int:
        output = list(output_token_ids)
        for count, token_id in enumerate(draft):
            if (self._listed and token_id not in self._listed) or token_id in self._forbidden(
                output
            ):
                return count
            output.append(token_id)
        return len(draft)

    def _forbidden(self, output: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word."""
        return [
            word[-1]
            for word in self._bad
            if len(word) == 1 or list(output[len(output) - len(word) + 1 :]) == word[:-1]
        ]
