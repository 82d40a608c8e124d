"""A request that a router has sent to a worker, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from msgspec.structs import replace

from twinphase.cluster.timelines import joined
from twinphase.engine.messages import Add, Finished, News
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import FinishReason, RequestCounts

__all__ = ["Sent"]


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

    @classmethod
    def of(cls, add: Add) -> Sent:
        timeline = RequestTimeline(add.arrival)
        timeline.mark(IntervalKind.TOKENIZE, max(add.arrival, add.tokenized))
        return cls(add, timeline, token_ids=list(add.output_token_ids))

    def route_until_now(self, reason: str) -> float:
        """All since the last interval was the way to a worker, or what a worker did that died; now, seconds."""
        now = max(perf_counter(), self.timeline.end)
        self.timeline.mark(IntervalKind.ROUTE, now, reason=reason)
        return now

    def lost(self, worker: str) -> None:
        """Its worker has died."""
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
        if finished is not None:
            finished = replace(finished, timeline=self.whole(finished.timeline))
        return replace(news, num_prefilled=self.num_prefilled, num_cached=self.num_cached, finished=finished)

    def ended(self, reason: FinishReason, error: str | None = None) -> News:
        """The end of a request that no worker has."""
        self.route_until_now(self.reason)
        name, prompt = self.add.request_id, len(self.add.prompt_token_ids)
        counts = RequestCounts(name, prompt, len(self.token_ids), self.num_cached, error=error)
        return News(name, [], self.num_prefilled, self.num_cached, [], Finished(reason, counts, self.timeline))
