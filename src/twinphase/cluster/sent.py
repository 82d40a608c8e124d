"""A request that a router has sent to a worker, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import replace as replace_params
from time import perf_counter

from msgspec.structs import replace

from twinphase.cache.prefix_cache import PrefixCache
from twinphase.cluster.timelines import joined
from twinphase.engine.messages import Add, EngineFacts, Finished, News, PushTo
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import FinishReason, Request, RequestCounts, SamplingParams

__all__ = ["Sent", "chain_of"]


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
        then: worker that goes on with it behind the first token, which has the KV blocks by then; "" if none does.
        waits: its first token is there, and its blocks are on their way.
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

    @classmethod
    def of(cls, add: Add) -> Sent:
        timeline = RequestTimeline(add.arrival)
        timeline.mark(IntervalKind.TOKENIZE, max(add.arrival, add.tokenized))
        return cls(add, timeline, token_ids=list(add.output_token_ids))

    def goes_on(self, there: EngineFacts) -> bool:
        """Whether the worker that is to have its blocks can send them on, and more than one token is to come."""
        room = (there.config.max_model_len or 0) - len(self.add.prompt_token_ids)
        most = self.add.sampling_params.max_tokens
        return bool(there.kv_addresses) and not self.token_ids and room > 1 and (most is None or most > 1)

    def first_token(self, message: Add, addresses: list[str]) -> Add:
        """What its reader is to do: the next token alone; the KV blocks go to the worker at these addresses."""
        params = message.sampling_params
        only = replace_params(params, max_tokens=len(self.token_ids) + 1, min_tokens=min(params.min_tokens, 1))
        return replace(message, sampling_params=only, push_to=PushTo(addresses))

    def route_until_now(self, reason: str) -> float:
        """All since the last interval was the way to a worker, or what a worker did that died; now, seconds."""
        now = max(perf_counter(), self.timeline.end)
        self.timeline.mark(IntervalKind.ROUTE, now, reason=reason)
        return now

    def lost(self, worker: str) -> None:
        """Its worker has died."""
        self.then, self.waits = "", False
        self.route_until_now(f"{worker}, which died with {len(self.token_ids)} tokens")
        self.num_vain = 0 if len(self.token_ids) > self.num_when_sent else self.num_vain + 1

    def whole(self, timeline: RequestTimeline) -> RequestTimeline:
        """The request's life, of which the worker tells its part."""
        return joined(self.timeline, timeline, perf_counter(), self.reason)

    def take(self, news: News) -> News:
        """News of its worker, as if one engine had had the request from the first on."""
        self.token_ids += news.token_ids
        self.num_prefilled = max(self.num_prefilled, news.num_prefilled)
        self.num_cached = max(self.num_cached, news.num_cached)
        finished = news.finished
        if finished is not None and self.then and finished.reason is FinishReason.LENGTH:
            self.timeline, self.waits, finished = self.whole(finished.timeline), True, None
        if finished is not None:
            finished = replace(finished, timeline=self.whole(finished.timeline))
        return replace(news, num_prefilled=self.num_prefilled, num_cached=self.num_cached, finished=finished)

    def ended(self, reason: FinishReason, error: str | None = None) -> News:
        """The end of a request that no worker has."""
        self.route_until_now(self.reason)
        name, prompt = self.add.request_id, len(self.add.prompt_token_ids)
        counts = RequestCounts(name, prompt, len(self.token_ids), self.num_cached, error=error)
        return News(name, [], self.num_prefilled, self.num_cached, [], Finished(reason, counts, self.timeline))


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
