"""`RequestRecord`: the state and the times of one request, from its arrival to its end."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from twinphase.outcome import FinishReason
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import RequestCounts


class RequestState(enum.StrEnum):
    """The state of a request between its arrival and its end."""

    TOKENIZING = "tokenizing"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    # The request's KV blocks are being sent to its decode worker.
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    ENDED = "ended"


_NEXT_STATES = {
    RequestState.TOKENIZING: {RequestState.QUEUED},
    # One step may prefill a whole prompt and sample its first token.
    RequestState.QUEUED: {RequestState.PREFILLING, RequestState.DECODING},
    # A request queues again after a preemption or the death of its worker.
    RequestState.PREFILLING: {
        RequestState.QUEUED,
        RequestState.TRANSFERRING,
        RequestState.DECODING,
    },
    RequestState.TRANSFERRING: {RequestState.QUEUED},
    RequestState.DECODING: {RequestState.QUEUED},
}


@dataclass
class RequestRecord:
    """The counts and times of one request, without its tokens.

    The front end creates it and sends a copy to the engine with the request; the engine returns
    that copy when the request has ended.

    Attributes:
        timeline: intervals since the arrival.
        priority: lower values go first; only the policy "priority" uses it.
        cache_salt: only requests with the same salt share cached prefixes.
        tenant: owner of the request; tenants share the engine by `weight`.
        finish_reason: None until the request has ended.
        prices: prices of the engine's cost model when the request ended.
    """

    counts: RequestCounts
    timeline: RequestTimeline
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    weight: float = 1.0
    state: RequestState = RequestState.TOKENIZING
    finish_reason: FinishReason | None = None
    prices: tuple[float, ...] = field(default=(), repr=False)

    @classmethod
    def arrived(cls, request_id: str, arrival: float) -> RequestRecord:
        """The record of a request that arrived at `arrival`, seconds, and is being tokenized."""
        return cls(RequestCounts(request_id), RequestTimeline(arrival))

    @property
    def request_id(self) -> str:
        return self.counts.request_id

    @property
    def arrival(self) -> float:
        return self.timeline.arrival

    @property
    def has_ended(self) -> bool:
        return self.state is RequestState.ENDED

    def tokenized(self, num_prompt_tokens: int, until: float) -> None:
        """The prompt was tokenized by `until`, seconds; from then on the request queues."""
        self.counts.num_prompt_tokens = num_prompt_tokens
        self.timeline.mark(IntervalKind.TOKENIZE, max(self.arrival, until))
        self.move_to(RequestState.QUEUED)

    def move_to(self, state: RequestState) -> None:
        """Enter a state; staying in one is allowed, except for `ENDED`.

        Raises:
            ValueError: the state cannot follow the present one.
        """
        if state is self.state and not self.has_ended:
            return
        ends = state is RequestState.ENDED and not self.has_ended
        if not ends and state not in _NEXT_STATES.get(self.state, ()):
            raise ValueError(f"request {self.request_id} cannot go from {self.state} to {state}")
        self.state = state

    def advance(self) -> None:
        """Update the state after a step: the request decodes from its first output token on."""
        decodes = self.counts.num_output_tokens > 0
        self.move_to(RequestState.DECODING if decodes else RequestState.PREFILLING)

    def end(self, reason: FinishReason) -> None:
        self.move_to(RequestState.ENDED)
        self.finish_reason = reason

    def copy(self) -> RequestRecord:
        """An independent copy, for another thread."""
        return replace(self, counts=self.counts.copy(), timeline=self.timeline.copy())

    def __str__(self) -> str:
        counts = self.counts
        state = f"{self.state} ({self.finish_reason})" if self.finish_reason else f"{self.state}"
        words = [
            f"{self.request_id} {state}",
            *([f"tenant {self.tenant}"] if self.tenant else []),
            f"{counts.num_prompt_tokens:,} prompt tokens ({counts.num_cached_tokens:,} cached)",
            f"{counts.num_output_tokens:,} output tokens",
            *([f"{counts.num_preemptions} preemptions"] if counts.num_preemptions else []),
            *([f"error: {counts.error}"] if counts.error else []),
        ]
        spent = [
            f"{kind} {1e3 * seconds:.1f} ms"
            for kind, seconds in self.timeline.totals().items()
            if seconds >= 5e-5
        ]
        return ", ".join(words) + (f": {', '.join(spent)}" if spent else "")
