"""A request that a router has sent to a worker, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import replace as replace_params
from time import perf_counter
from typing import NamedTuple

from msgspec.structs import replace

from twinphase.batch import TokenLogprobs
from twinphase.cache.prefix_cache import PrefixCache
from twinphase.cluster.timelines import joined
from twinphase.engine.process.messages import Add, EngineFacts, Finished, News, PushTo
from twinphase.errors import TwinphaseError
from twinphase.outcome import FinishReason
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import Request, RequestCounts, SamplingParams

MOST_VAIN = 3  # workers that may die in a row before they give a request a token


class Said(NamedTuple):
    """The first token of an answer, as the worker said it that read the prompt."""

    worker: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclass
class Sent:
    """A request at a worker.

    Attributes:
        add: as the front end sent it.
        timeline: of its life until it was sent to this worker.
        reason: why to this one.
        token_ids: of its answer so far.
        num_prefilled, num_cached: of its prompt, as far as its reader was told.
        accepted: its reader knows that it is queued.
        ending: why the front end wants it to end, if it does.
        num_when_sent: tokens of its answer when it was sent to this worker.
        then: worker that goes on with it behind the first token, which has the KV blocks by then;
            "" if none does.
        waits: its first token is there, and its blocks are on their way.
        said: that token, until the worker that goes on has computed it too.
        differs: that worker computed another one, or other digits; it gives the request up.
        fresh: it computes the prompt anew, without the blocks that came.
        num_vain: workers in a row that died before they gave it a token: it may be what kills them.
    """

    add: Add
    timeline: RequestTimeline
    worker: str = ""
    reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    num_cached: int = 0
    accepted: bool = False
    ending: FinishReason | None = None
    num_when_sent: int = 0
    num_vain: int = 0
    then: str = ""
    waits: bool = False
    said: Said | None = None
    differs: bool = False
    fresh: bool = False

    @classmethod
    def of(cls, add: Add) -> Sent:
        timeline = RequestTimeline(add.arrival)
        timeline.mark(IntervalKind.TOKENIZE, max(add.arrival, add.tokenized))
        return cls(add, timeline, token_ids=list(add.output_token_ids))

    def goes_on(self, here: EngineFacts, there: EngineFacts) -> bool:
        """Whether blocks computed here are of use there, or no second token is to come.

        What is too long for that worker goes to it at once, to be refused before a token is told.
        """
        same = here.kv_fingerprint == there.kv_fingerprint and bool(there.kv_addresses)
        return not self.token_ids and (self._only_one(there) or (same and self._fits(there)))

    def _fits(self, there: EngineFacts) -> bool:
        config = there.config
        length = len(self.add.prompt_token_ids) + (self.add.sampling_params.max_tokens or 1)
        room = (
            config.num_kv_blocks or length
        ) * config.block_size  # the last token is never computed
        return length <= (config.max_model_len or length) and length - 1 <= room

    def _only_one(self, there: EngineFacts) -> bool:
        """Whether the answer has one token at most: who reads the prompt says all of it."""
        room = (there.config.max_model_len or 0) - len(self.add.prompt_token_ids)
        return room <= 1 or self.add.sampling_params.max_tokens == 1

    def message(self, now: float) -> Add:
        """For a worker: go on behind the tokens there are; with the first one, where only a reader has said it."""
        done = list(self.token_ids)
        params = self.add.sampling_params
        if (
            self.said is not None
        ):  # and the prompt's log probabilities, which no block has: they would be computed again
            done = []
            params = replace_params(params, prompt_logprobs=None)
        return replace(
            self.add,
            arrival=now,
            tokenized=now,
            sampling_params=params,
            output_token_ids=done,
            fresh=self.fresh,
        )

    def first_token(self, message: Add, then: str, there: EngineFacts) -> Add:
        """What its reader is to do: one token; if more are to come, the KV blocks go to the worker `then`."""
        if self._only_one(there):
            return message
        self.then = then
        params = message.sampling_params
        only = replace_params(
            params, max_tokens=len(self.token_ids) + 1, min_tokens=min(params.min_tokens, 1)
        )
        return replace(message, sampling_params=only, push_to=PushTo(there.kv_addresses))

    def route_until_now(self, reason: str, kind: IntervalKind = IntervalKind.ROUTE) -> float:
        """All since the last interval was the way to a worker, or what a worker did that died; now, seconds."""
        now = max(perf_counter(), self.timeline.end)
        self.timeline.mark(kind, now, reason=reason)
        return now

    def moved(self, how: str) -> float:
        """Its blocks are where it goes on, or no more will come; now, seconds."""
        now = self.route_until_now(f"{self.then}: {how}", IntervalKind.TRANSFER)
        self.waits = False
        self.then = ""
        return now

    def lost(self, worker: str) -> None:
        """Its worker has died."""
        self.then = ""
        self.waits = False
        self.differs = False
        self.fresh = False
        self.route_until_now(f"{worker}, which died with {len(self.token_ids)} tokens")
        self.num_vain = 0 if len(self.token_ids) > self.num_when_sent else self.num_vain + 1

    def check_hope(self) -> None:
        """Refuse to go on with a request that may be what kills workers."""
        if self.num_vain >= MOST_VAIN:
            cause = f"{self.num_vain} workers died one after the other when they had the request."
            raise TwinphaseError(cause, "Change it: it may be what kills them.")

    def whole(self, timeline: RequestTimeline) -> RequestTimeline:
        """The request's life, of which the worker tells its part."""
        return joined(self.timeline, timeline, perf_counter(), self.reason)

    def is_doubted_by(self, news: News, *, digits: bool) -> Said | None:
        """Compare the first token that a reader said, where a second worker now has; what was said, if it differs.

        Without `digits` its log probabilities may.
        """
        if self.said is None or self.waits:
            return None
        if news.token_ids and not self.differs:
            logprobs = news.logprobs[:1] if digits else self.said.logprobs
            self.differs = (news.token_ids[:1], logprobs) != (
                self.said.token_ids,
                self.said.logprobs,
            )
        elif (
            news.finished is not None and news.finished.reason is FinishReason.ERROR
        ):  # by what came, or by itself
            self.differs = self.differs or not self.fresh
        return self.said if self.differs and self.ending is None else None

    def anew(self, what: str) -> Add:
        """For the worker that differs, which has given the request up: to compute it without the blocks that came."""
        self.fresh = True
        self.differs = False
        return self.message(self.route_until_now(what))

    def take(self, news: News) -> News:
        """News of its worker, as if one engine had had the request from the first on."""
        if (
            self.said is not None and not self.waits and news.token_ids
        ):  # the first one its reader was told
            self.said = None
            news = replace(news, token_ids=news.token_ids[1:], logprobs=news.logprobs[1:])
        if self.then and self.ending is None and news.finished is not None:
            news = self._read(news)
        self.token_ids += news.token_ids
        self.num_prefilled = max(self.num_prefilled, news.num_prefilled)
        self.num_cached = max(self.num_cached, news.num_cached)
        finished = news.finished
        if finished is not None:
            finished = replace(finished, timeline=self.whole(finished.timeline))
        return replace(
            news, num_prefilled=self.num_prefilled, num_cached=self.num_cached, finished=finished
        )

    def _read(self, news: News) -> News:
        """Its reader has finished: what it said is told, but for an end, which another worker is to find as well."""
        finished = news.finished
        if finished is None or finished.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            return news
        self.timeline = self.whole(finished.timeline)
        self.waits = True
        if finished.reason is FinishReason.STOP or not news.token_ids:
            return replace(news, token_ids=[], logprobs=[], finished=None)
        self.said = Said(self.worker, news.token_ids[:1], news.logprobs[:1])
        return replace(
            news, token_ids=self.said.token_ids, logprobs=self.said.logprobs, finished=None
        )

    def ended(self, reason: FinishReason, error: str | None = None) -> News:
        """The end of a request that no worker has."""
        self.route_until_now(self.reason)
        name = self.add.request_id
        prompt = len(self.add.prompt_token_ids)
        counts = RequestCounts(name, prompt, len(self.token_ids), self.num_cached, error=error)
        return News(
            name,
            [],
            self.num_prefilled,
            self.num_cached,
            [],
            Finished(reason, counts, self.timeline),
        )


def chain_of(hashes: PrefixCache | None, token_ids: list[int], salt: str | None) -> list[bytes]:
    """Hashes of the full blocks, as every worker's prefix cache has them."""
    if hashes is None:
        return []
    request = Request("", token_ids, SamplingParams(temperature=0.0), 0.0, cache_salt=salt)
    blocks = range(len(token_ids) // hashes.block_size)
    try:
        return [hashes.block_hash(request, index) for index in blocks]
    except OverflowError:  # a token id that none can be: the engine says so
        return []
