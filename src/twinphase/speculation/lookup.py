"""Drafts from existing text: the request, a prediction of its answer, or earlier answers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import replace

from twinphase.request import Request
from twinphase.speculation.proposer import Draft
from twinphase.speculation.token_index import LONGEST_MATCH, TokenIndex

# A long prompt is indexed over several steps, so that no step becomes long.
MAX_INDEXED_TOKENS_PER_STEP = 2048
MAX_SHELVES = 64
MAX_SHELF_TOKENS = 1 << 16
MIN_ANSWER_TOKENS = 8


class NgramProposer:
    """Drafts the text after the last match in the request ("prompt lookup", Saxena, 2023).

    As in vLLM's `ngram`, a match has at least `least` tokens, and counts at most `most`.
    """

    def __init__(self, least: int = 2, most: int = LONGEST_MATCH, source: str = "ngram") -> None:
        self._least = least
        self._most = most
        self._source = source
        self._texts: defaultdict[str, TokenIndex] = defaultdict(TokenIndex)

    def propose(self, request: Request, limit: int) -> list[Draft]:
        text = self._texts[request.request_id]
        known = request.num_tokens
        indexed = len(text)
        if indexed < known:
            end = min(known, indexed + MAX_INDEXED_TOKENS_PER_STEP)
            text.extend(request.token_ids(indexed, end))
        if not limit:
            return []
        at, match = text.find(_tail(request))
        if match < self._least:
            return []
        return [Draft(self._source, text.token_ids[at : at + limit], min(match, self._most))]

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)


class SuffixProposer:
    """Drafts from the request's own text and earlier answers to the same tenant and cache salt.

    It follows SuffixDecoding (Oliaro et al., 2024, arXiv:2411.04975), but keeps a list of the last
    answers instead of a tree of all answers.
    """

    def __init__(
        self, most_answers: int | None = None, most_per_match: float | None = None
    ) -> None:
        """Keep `most_answers` per tenant, draft `most_per_match` tokens per matching token.

        None means no limit.
        """
        self._own = NgramProposer(source="suffix")
        self._most_answers = most_answers
        self._most_per_match = most_per_match
        self._shelves: OrderedDict[tuple[str | None, ...], TokenIndex] = OrderedDict()

    def propose(self, request: Request, limit: int) -> list[Draft]:
        drafts = self._own.propose(request, limit)
        shelf = self._shelves.get(_owner(request)) if limit else None
        own_match = drafts[0].match if drafts else 0
        if shelf is not None and own_match < LONGEST_MATCH:
            at, match = shelf.find(_tail(request))
            if match > own_match:
                drafts.append(Draft("suffix-answers", shelf.token_ids[at : at + limit], match))
        if (ratio := self._most_per_match) is None:
            return drafts
        return [
            replace(draft, token_ids=draft.token_ids[: max(1, int(ratio * draft.match))])
            for draft in drafts
        ]

    def forget(self, request: Request) -> None:
        """Store the answer for later requests of the same owner."""
        self._own.forget(request)
        if len(request.output_token_ids) < MIN_ANSWER_TOKENS or self._most_answers == 0:
            return
        owner = _owner(request)
        shelf = self._shelves.setdefault(owner, TokenIndex())
        self._shelves.move_to_end(owner)
        if len(self._shelves) > MAX_SHELVES:
            self._shelves.popitem(last=False)
        if (start := self._kept_from(shelf.token_ids)) is not None:
            kept = shelf.token_ids[start:]
            shelf = self._shelves[owner] = TokenIndex()
            shelf.extend(kept)
        start = max(0, len(request.prompt_token_ids) - 4)
        shelf.extend([-1, *request.token_ids(start, request.num_tokens)])

    def _kept_from(self, token_ids: list[int]) -> int | None:
        """Start of the newer half of a full store; None if there is room for another answer."""
        if len(token_ids) > MAX_SHELF_TOKENS:
            return len(token_ids) // 2
        most = self._most_answers
        if most is None or token_ids.count(-1) < most:
            return None
        starts = [at for at, token_id in enumerate(token_ids) if token_id < 0]
        return starts[-(most // 2)] if most > 1 else len(token_ids)


class PredictionProposer:
    """Drafts the answer that the caller expects (OpenAI's `prediction`).

    The draft follows the prediction from its start, and after a difference from the last match.
    """

    def __init__(self) -> None:
        self._texts: dict[str, TokenIndex] = {}

    def propose(self, request: Request, limit: int) -> list[Draft]:
        if not request.prediction_token_ids or not limit:
            return []
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = TokenIndex()
            text.extend(request.prediction_token_ids)
        output = request.output_token_ids
        at = len(output)
        match = at + 1
        if output != text.token_ids[:at]:
            at, match = text.find(output[-LONGEST_MATCH:])
        draft = text.token_ids[at : at + limit] if match else []
        return [Draft("prediction", draft, min(match, LONGEST_MATCH))] if draft else []

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)


def _owner(request: Request) -> tuple[str | None, ...]:
    """The owner, whose requests may share drafts: fast drafts would reveal other users' text."""
    return (request.tenant, request.cache_salt)


def _tail(request: Request) -> list[int]:
    known = request.num_tokens
    return request.token_ids(max(0, known - LONGEST_MATCH), known)
