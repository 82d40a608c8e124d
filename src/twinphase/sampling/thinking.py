"""Thinking before the answer: where it ends, how long it may take, and a grammar that holds for the answer only.

`make_constraint` is the entry point for whoever makes requests. Not for splitting thoughts from the
answer's text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.constraint import Constraint, common_prefix_length
from twinphase.errors import InvalidRequestError
from twinphase.request import SamplingParams
from twinphase.sampling.structured import GrammarCompiler

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class ThinkingTags:
    """The tokens that a model begins and ends its thinking with, such as those of "<think>" and "</think>"."""

    start: tuple[int, ...]
    end: tuple[int, ...]


def make_constraint(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    compiler: GrammarCompiler,
    tags: ThinkingTags | None = None,
) -> Constraint | None:
    """What the output of a new request must obey, for `Request.constraint`; None when it is free.

    A grammar holds from the first token, thinking excluded then, unless the prompt left thinking
    open: in that case it holds after the end of thinking. Without a grammar, thinking is what
    follows a start tag at the output's beginning.

    `tags` is None for a model that does not think.

    Raises:
        InvalidRequestError: a grammar that is refused, or a budget for a model that does not think.
    """
    if params.thinking_token_budget is not None and tags is None:
        raise InvalidRequestError(
            "thinking_token_budget is given, but the model does not think.", "Leave it out."
        )
    grammar = (
        compiler.compile(params.structured_outputs)
        if params.structured_outputs is not None
        else None
    )
    if tags is None or (grammar is None and params.thinking_token_budget is None):
        return grammar
    opened = _leaves_open(prompt_token_ids, tags, compiler)
    if grammar is not None and not opened:
        return grammar
    return ThinkingConstraint(
        tags,
        compiler.token_bytes,
        opened,
        params.thinking_token_budget,
        grammar,
        compiler.eos_token_ids,
    )


class ThinkingConstraint:
    """A `Constraint` that leaves thinking free, ends it when its budget is spent, and hands over to the answer's.

    The end is found in the text, since a tag may come in other tokens than its own, such as with a
    newline at its end.
    """

    def __init__(
        self,
        tags: ThinkingTags,
        token_bytes: Sequence[bytes],
        opened: bool,
        budget: int | None,
        answer: Constraint | None,
        eos_token_ids: Collection[int],
    ) -> None:
        """Begin before the first token of an output.

        `opened` says whether the output begins within thinking. After `budget` tokens of thinking
        in the output, the end tag is forced. The tokens after it obey `answer`, if given; the
        output then cannot end before them.
        """
        self._tags = tags
        self._token_bytes = token_bytes
        self._opened = opened
        self._budget = budget
        self._answer = answer
        self._eos = list(eos_token_ids)
        self._start_text = self._text(tags.start)
        self._end_text = self._text(tags.end)
        self._seen: list[int] = []
        self._end: int | None = None  # tokens seen up to the end of the end tag

    def restrict(self, logits: F32, output_token_ids: Sequence[int]) -> F32:
        """See `Constraint`; raises what the answer's constraint raises."""
        start = 0 if self._opened else self._find_start(output_token_ids)
        if start is None:
            return logits
        end = self._find_end(output_token_ids)
        if end is not None:
            return (
                logits
                if self._answer is None
                else self._answer.restrict(logits, output_token_ids[end:])
            )
        if self._budget is not None and len(output_token_ids) - start >= self._budget:
            forced = np.full_like(logits, -np.inf)
            forced[self._next_of_end(output_token_ids[start:])] = 0.0
            return forced
        if self._answer is None:
            return logits
        logits = logits.copy()
        logits[self._eos] = -np.inf
        return logits

    def forced(self, output_token_ids: Sequence[int], limit: int) -> list[int]:
        """See `Constraint`: the rest of the end tag once the budget is spent, and what the answer's constraint says."""
        start = 0 if self._opened else self._find_start(output_token_ids)
        if start is None:
            return []
        output = list(output_token_ids)
        forced = list[int]()
        while (end := self._find_end(output)) is None and len(forced) < limit:
            if self._budget is None or len(output) - start < self._budget:
                return forced
            output.append(self._next_of_end(output[start:]))
            forced.append(output[-1])
        if end is None or self._answer is None or forced:
            return forced
        return self._answer.forced(output[end:], limit)

    def admits(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> int:
        """See `Constraint`: thoughts are free, and so is what a draft has behind them."""
        end = self._find_end(output_token_ids)
        if end is None or self._answer is None:
            return len(draft)
        return self._answer.admits(output_token_ids[end:], draft)

    def _text(self, token_ids: Sequence[int]) -> bytes:
        tokens = self._token_bytes
        return b"".join(tokens[i] for i in token_ids if i < len(tokens))

    def _find_start(self, token_ids: Sequence[int]) -> int | None:
        """Tokens up to the end of a start tag that begins the output, whitespace aside; None if there is none (yet)."""
        text = b""
        for count, token_id in enumerate(token_ids, start=1):
            text = (text + self._text([token_id])).lstrip()
            if text.startswith(self._start_text):
                return count
            if not self._start_text.startswith(text):
                break
        return None

    def _find_end(self, token_ids: Sequence[int]) -> int | None:
        kept = common_prefix_length(self._seen, token_ids)
        if self._end is not None and self._end > kept:
            self._end = None
        for count in range(kept + 1, len(token_ids) + 1):
            if self._end is not None:
                break
            # A tag that ends here has at most one token a byte.
            if self._end_text in self._text(token_ids[max(0, count - len(self._end_text)) : count]):
                self._end = count
        self._seen[kept:] = token_ids[kept:]
        return self._end

    def _next_of_end(self, thoughts: Sequence[int]) -> int:
        """The token of the end tag that is next, where the thoughts' last tokens may be its first ones."""
        tag = list(self._tags.end)
        begun = (
            n
            for n in range(min(len(tag) - 1, len(thoughts)), 0, -1)
            if list(thoughts[-n:]) == tag[:n]
        )
        return tag[next(begun, 0)]


def _leaves_open(
    prompt_token_ids: Sequence[int], tags: ThinkingTags, compiler: GrammarCompiler
) -> bool:
    """Whether a prompt ends within thinking.

    Only the text after its last control token counts, as that is the turn.

    So a question about "<think>" opens nothing.
    """
    of_tags = {*tags.start, *tags.end}
    turn: list[bytes] = []
    for token_id in reversed(prompt_token_ids):
        if token_id in compiler.special_ids and token_id not in of_tags:
            break
        turn.append(compiler.token_bytes[token_id] if token_id < len(compiler.token_bytes) else b"")
    text = b"".join(reversed(turn))
    start, end = (b"".join(compiler.token_bytes[i] for i in tag) for tag in (tags.start, tags.end))
    return text.rfind(start) > text.rfind(end)
