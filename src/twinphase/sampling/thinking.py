"""Thinking before the answer: its end, its token budget, and a grammar for the answer only.

`make_constraint` is the entry point. Thoughts are split from the answer's text elsewhere.
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
    """Tokens that begin and end a model's thinking, such as those of <think> and </think>."""

    start: tuple[int, ...]
    end: tuple[int, ...]


def make_constraint(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    compiler: GrammarCompiler,
    tags: ThinkingTags | None = None,
) -> Constraint | None:
    """The constraint of a new request's output, for `Request.constraint`; None for no constraint.

    A grammar applies from the first token, without thinking, unless the prompt ends within
    thinking; then it applies after the end of thinking. Without a grammar, thinking begins with a
    start tag at the start of the output.

    `tags` is None for a model that does not think.

    Raises:
        InvalidRequestError: the grammar is refused, or a model that does not think has a budget.
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
    """A `Constraint` that ends thinking when its budget is spent, then constrains the answer.

    The end tag is searched in text, since other tokens can contain it, such as one that ends with a
    newline.
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

        `opened`: the output begins within thinking. After `budget` thinking tokens in the output,
        the end tag is forced. `answer`, if given, constrains the tokens after it, and the output
        cannot end before them.
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
        self._end: int | None = None  # Number of tokens up to and with the end tag.

    def restrict(self, logits: F32, output_token_ids: Sequence[int]) -> F32:
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
        """The rest of the end tag once the budget is spent, or tokens that the answer's forces."""
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
        """As `Constraint`; thoughts are free, and so are tokens after them in the same draft."""
        end = self._find_end(output_token_ids)
        if end is None or self._answer is None:
            return len(draft)
        return self._answer.admits(output_token_ids[end:], draft)

    def _text(self, token_ids: Sequence[int]) -> bytes:
        tokens = self._token_bytes
        return b"".join(tokens[i] for i in token_ids if i < len(tokens))

    def _find_start(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens up to and with a start tag at the start; None if there is none yet."""
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
            # A tag that ends here has at most one token per byte.
            if self._end_text in self._text(token_ids[max(0, count - len(self._end_text)) : count]):
                self._end = count
        self._seen[kept:] = token_ids[kept:]
        return self._end

    def _next_of_end(self, thoughts: Sequence[int]) -> int:
        """The next token of the end tag; the last tokens of the thoughts may begin it."""
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

    Only the text after the last control token, the current turn, counts: a question about
    "<think>" does not begin thinking.
    """
    tag_ids = {*tags.start, *tags.end}
    turn: list[bytes] = []
    for token_id in reversed(prompt_token_ids):
        if token_id in compiler.special_ids and token_id not in tag_ids:
            break
        turn.append(compiler.token_bytes[token_id] if token_id < len(compiler.token_bytes) else b"")
    text = b"".join(reversed(turn))
    start, end = (b"".join(compiler.token_bytes[i] for i in tag) for tag in (tags.start, tags.end))
    return text.rfind(start) > text.rfind(end)
