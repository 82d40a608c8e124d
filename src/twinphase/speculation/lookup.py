"""Drafts from text that is there already: the request's own, a prediction of its answer, and earlier answers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from twinphase.request import Request
from twinphase.speculation.proposer import Draft
from twinphase.speculation.token_index import LONGEST_MATCH, TokenIndex

INDEXED_AT_ONCE = (
    2048  # tokens; a long prompt is indexed over several steps, so that none of them takes long
)
MOST_SHELVES = 64
SHELF_TOKENS = 1 << 16
LEAST_ANSWER = 8  # tokens worth keeping


class NgramProposer:
    """What followed the last time that the request's text had these tokens ("prompt lookup", Saxena, 2023).

    As vLLM's `ngram`: at least `least` tokens have to agree, and more than `most` count for
    nothing.
    """

    def __init__(self, least: int = 2, most: int = LONGEST_MATCH, source: str = "ngram") -> None:
        self._least = least
        self._most = most
        self._source = source
        self._texts: dict[str, TokenIndex] = {}

    def propose(self, request: Request, limit: int) -> list[Draft]:
        """See `Proposer`."""
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = TokenIndex()
        known = request.num_tokens
        if len(text) < known:
            text.extend(request.token_ids(len(text), min(known, len(text) + INDEXED_AT_ONCE)))
        if not limit:
            return []
        tail = (
            text.token_ids
            if len(text) == known
            else request.token_ids(max(0, known - LONGEST_MATCH), known)
        )
        at, match = text.find(tail[-LONGEST_MATCH:])
        if match < self._least:
            return []
        return [Draft(self._source, text.token_ids[at : at + limit], min(match, self._most))]

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)


class SuffixProposer:
    """The same, and what followed in answers to others: of the same tenant only, never across salts.

    After SuffixDecoding (Oliaro et al., 2024, arXiv:2411.04975), with the last answers in place of
    a tree of all.
    """

    def __init__(
        self, most_answers: int | None = None, most_per_match: float | None = None
    ) -> None:
        """Keep `most_answers` of a tenant, draft `most_per_match` tokens per token that agrees; None is no bound."""
        self._own = NgramProposer(source="suffix")
        self._most_answers = most_answers
        self._most_per_match = most_per_match
        self._shelves: OrderedDict[tuple[str | None, ...], TokenIndex] = OrderedDict()

    def propose(self, request: Request, limit: int) -> list[Draft]:
        """See `Proposer`; from the request's own text first."""
        drafts = self._own.propose(request, limit)
        shelf = self._shelves.get(_owner(request)) if limit else None
        if shelf is not None and not (drafts and drafts[0].match >= LONGEST_MATCH):
            known = request.num_tokens
            at, match = shelf.find(request.token_ids(max(0, known - LONGEST_MATCH), known))
            if match > (drafts[0].match if drafts else 0):
                drafts.append(Draft("suffix-answers", shelf.token_ids[at : at + limit], match))
        if self._most_per_match is None:
            return drafts
        bounds = [max(1, int(self._most_per_match * draft.match)) for draft in drafts]
        return [
            replace(draft, token_ids=draft.token_ids[:most])
            for draft, most in zip(drafts, bounds, strict=True)
        ]

    def forget(self, request: Request) -> None:
        """The answer goes on its owner's shelf."""
        self._own.forget(request)
        if len(request.output_token_ids) < LEAST_ANSWER or self._most_answers == 0:
            return
        shelf = self._shelves.setdefault(_owner(request), TokenIndex())
        self._shelves.move_to_end(_owner(request))
        if len(self._shelves) > MOST_SHELVES:
            self._shelves.popitem(last=False)
        if (since := self._kept_since(shelf.token_ids)) is not None:
            kept = shelf.token_ids[since:]
            shelf = self._shelves[_owner(request)] = TokenIndex()
            shelf.extend(kept)
        shelf.extend(
            [-1, *request.token_ids(max(0, len(request.prompt_token_ids) - 4), request.num_tokens)]
        )

    def _kept_since(self, token_ids: list[int]) -> int | None:
        """Where the newer half of a full shelf begins; None of one that has room for an answer."""
        if len(token_ids) > SHELF_TOKENS:
            return len(token_ids) // 2
        most = self._most_answers
        if most is None or token_ids.count(-1) < most:
            return None
        begins = [at for at, token_id in enumerate(token_ids) if token_id < 0]
        return begins[-(most // 2)] if most > 1 else len(token_ids)


def _owner(request: Request) -> tuple[str | None, ...]:
    """Whom a request's text may be shown to: guesses that are right show by their speed what others asked."""
    return (request.tenant, request.cache_salt)


class PredictionProposer:
    """What the caller expects the answer to be (OpenAI's `prediction`): from its beginning, then by matching."""

    def __init__(self) -> None:
        self._texts: dict[str, TokenIndex] = {}

    def propose(self, request: Request, limit: int) -> list[Draft]:
        """See `Proposer`."""
        if not request.prediction_token_ids or not limit:
            return []
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = TokenIndex()
            text.extend(request.prediction_token_ids)
        output = request.output_token_ids
        if output == text.token_ids[: len(output)]:
            at = len(output)
            match = len(output) + 1
        else:
            at, match = text.find(output[-LONGEST_MATCH:])
        draft = text.token_ids[at : at + limit] if match else []
        return [Draft("prediction", draft, min(match, LONGEST_MATCH))] if draft else []

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)
