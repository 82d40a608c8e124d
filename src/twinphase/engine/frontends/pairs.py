"""Pairs of texts to compare: a reranker scores each pair, an embedding model compares vectors.

In both cases the callers of this file send texts to the engine: one text per pair for a reranker,
and two for an embedding model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import mul
from typing import Any, TypeVar

from twinphase.engine.frontends.text import ModelText
from twinphase.errors import ContextLengthError, InvalidRequestError
from twinphase.models.tasks import RerankPrompt, is_encoder, is_raw_score, rerank_prompt
from twinphase.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class ScoringOutput:
    """How well the two texts of a pair match; higher is better."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """A pair of texts and its score, in vLLM's shape."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True)
class Pairs:
    """The texts that the engine computes for pairs, and the conversion of its reply to scores.

    Attributes:
        texts: token ids of each pair; for an embedding model, of all first texts and then of all
            second texts.
        starts: position at which the second text of each pair begins, or 0 if the model does not
            mark it; empty for an embedding model.
        num_firsts: number of first texts; a single one is compared with every second text.
        is_raw: whether a reranker's score is the output of its head without a sigmoid.
    """

    texts: list[list[int]]
    starts: list[int]
    num_firsts: int
    is_raw: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the engine computes."""
        return sum(map(len, self.texts))

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each pair."""
        if self.starts:
            return self.texts
        return [[*first, *second] for first, second in self._both(self.texts)]

    def outputs(
        self, replies: Sequence[Sequence[float]], use_activation: bool, ids: Iterator[int]
    ) -> list[ScoringRequestOutput]:
        """The score of each pair, from the engine's reply for each text.

        A reranker's score is a probability, or any number if the model or `use_activation` says so.
        An embedding model's score is the cosine, from -1 to 1.
        """
        return [
            ScoringRequestOutput(str(next(ids)), ScoringOutput(score), token_ids)
            for score, token_ids in zip(
                self._scores(replies, use_activation), self.token_ids, strict=True
            )
        ]

    def _scores(self, replies: Sequence[Sequence[float]], use_activation: bool) -> list[float]:
        if self.starts:
            plain = self.is_raw or not use_activation
            return [value if plain else _sigmoid(value) for (value,) in replies]
        return [math.fsum(map(mul, first, second)) for first, second in self._both(replies)]

    def _both(self, items: Sequence[T]) -> Iterator[tuple[T, T]]:
        firsts = items[: self.num_firsts]
        seconds = items[self.num_firsts :]
        several = repeat(firsts[0], len(seconds)) if self.num_firsts == 1 else firsts
        return zip(several, seconds, strict=True)


def encode_pairs(
    text: ModelText,
    task: str,
    text_1: Any,
    text_2: Any,
    limit: int,
    truncate_prompt_tokens: int | None = None,
) -> Pairs:
    """Encode pairs of texts (1 to 1, 1 to N or N to N) for the model.

    Args:
        text: text side of the model.
        task: "score" or "embed".
        text_1: one text for all of `text_2`, or one for each.
        text_2: one text or several.
        limit: maximum tokens of a pair, or of a text for an embedding model.
        truncate_prompt_tokens: maximum tokens of a pair or text; the end of a pair's longer text is
            cut first (in a decoder's prompt, of the document). -1 is `limit`; None does not
            truncate.

    Raises:
        InvalidRequestError: a text is empty or not valid Unicode, or the numbers of texts do not
            match.
        ContextLengthError: a pair or text has too many tokens; the message names it.
    """
    first = text_list(text_1, "text_1")
    second = text_list(text_2, "text_2")
    if not second or len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"There are {len(first)} first and {len(second)} second texts.",
            "Give one first text for all, or one for each second text.",
        )
    cut = limit if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    if cut is not None and not 0 < cut <= limit:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {cut}.", f"Use 1 to {limit}, or -1 for {limit}."
        )
    longest = limit if cut is None else None
    if task == "embed":
        texts = [
            text.tokenizer.encode(each, max_tokens=longest, truncate_to=cut)
            for each in (*first, *second)
        ]
        _check_lengths(texts, limit, "Text")
        return Pairs(texts, [], len(first))
    firsts = repeat(first[0], len(second)) if len(first) == 1 else first
    prompt = None if is_encoder(text.checkpoint) else rerank_prompt(text.checkpoint)
    encoded = [
        (_prompted(text.tokenizer, prompt, (a, b), longest, cut), 0)
        if prompt
        else text.tokenizer.encode_pair(a, b, max_tokens=longest, truncate_to=cut)
        for a, b in zip(firsts, second, strict=True)
    ]
    texts = [token_ids for token_ids, _ in encoded]
    _check_lengths(texts, limit, "Pair")
    starts = [start for _, start in encoded]
    return Pairs(texts, starts, len(first), is_raw_score(text.checkpoint))


def _prompted(
    tokenizer: Tokenizer,
    prompt: RerankPrompt,
    pair: tuple[str, str],
    max_tokens: int | None,
    cut: int | None,
) -> list[int]:
    """The prompt for a pair in a decoder's template; texts cannot contain control tokens."""
    before, after = (
        tokenizer.encode(part, add_special_tokens=False) for part in (prompt.before, prompt.after)
    )
    query, document = pair
    ids = tokenizer.encode(
        prompt.pair.format(query=query, document=document),
        add_special_tokens=False,
        parse_special=False,
        max_tokens=max_tokens,
    )
    if cut is not None:
        ids = ids[: max(0, cut - len(before) - len(after))]
    return [*before, *ids, *after]


def text_list(texts: Any, name: str) -> list[str]:
    """Check one text or several, all not empty; `name` is the argument's name in messages.

    Raises:
        InvalidRequestError: anything else.
    """
    found = [texts] if isinstance(texts, str) else texts
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) for text in found):
        raise InvalidRequestError(
            f"{name} is of type {type(texts).__name__}.", "Give a text, or a list of texts."
        )
    if not all(found):
        raise InvalidRequestError(f"Text {found.index('')} of {name} is empty.", "Leave it out.")
    return list(found)


def _check_lengths(texts: Sequence[Sequence[int]], limit: int, kind: str) -> None:
    for number, token_ids in enumerate(texts):
        if len(token_ids) > limit:
            raise ContextLengthError(
                f"{kind} {number} has {len(token_ids)} tokens; the model takes {limit}.",
                f"Shorten it by {len(token_ids) - limit} tokens, or set truncate_prompt_tokens "
                "to -1.",
            )


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))
