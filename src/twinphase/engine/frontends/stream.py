"""`RequestStream`: the answer of one request as it grows, for asyncio code.

Tokens become text on the reader's side, while the engine's next step runs. If the reader is slow,
updates are merged instead of queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import perf_counter

from twinphase.engine.frontends.outputs import StreamUpdate, Transcript
from twinphase.engine.process.messages import RequestUpdate, StepStats
from twinphase.outcome import FinishReason
from twinphase.phases.timeline import IntervalKind


class RequestStream:
    """The answer of one request: an async iterator of `StreamUpdate`.

    Use it in `async for`, or in `async with` to end it early. A stream aborts its request when no
    references to it are left, such as after a cancellation of its reader.

    Attributes:
        transcript: text, tokens and record so far.
        last_step_end: end of the step that computed the last tokens, seconds; None if the request
            ended between two steps.
        last_update: time of the last update, seconds.
        prefill_began: start of the first step that prefilled a part of the prompt, seconds.
    """

    def __init__(
        self, transcript: Transcript, end: Callable[[RequestStream, FinishReason], None]
    ) -> None:
        """`AsyncEngine.submit` makes streams; `end` makes the engine end the request."""
        self.request_id = transcript.request_id
        self.transcript = transcript
        self.loop = asyncio.get_running_loop()
        self.last_step_end: float | None = None
        self.prefill_began: float | None = None
        self.last_update = transcript.record.arrival
        self._end = end
        self._updated = asyncio.Event()
        self._released = False  # Whether the engine has ended the request, or was asked to.
        self._exhausted = False  # Whether the last update was returned.
        self._failure: Exception | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamUpdate:
        self._hand_over()
        while not self._exhausted:
            await self._updated.wait()
            self._updated.clear()
            if self._failure is not None:
                self._exhausted = True
                raise self._failure
            if self.transcript.finished:
                self._exhausted = True
                update = self.transcript.next_update()
                self._hand_over()
                timeline = self.transcript.timeline
                timeline.mark(IntervalKind.SEND, max(perf_counter(), timeline.end))
                return update
            if self.transcript.has_news:
                return self.transcript.next_update()
        raise StopAsyncIteration

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.abandon()

    def __del__(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Close the stream without waiting for the engine."""
        self._exhausted = True
        self._release(FinishReason.ABORT)

    def take(self, update: RequestUpdate, step: StepStats | None) -> None:
        """Decode new tokens to text, on the stream's loop; `step` is None between two steps."""
        if self._released:
            return
        transcript = self.transcript
        self.last_update = began = perf_counter()
        if transcript.stop_string is None:
            self.last_step_end = step.end if step is not None else None
        if self.prefill_began is None and step is not None:
            self.prefill_began = step.start
        if transcript.take(update):
            self._end(self, FinishReason.STOP)
        if transcript.finished:
            self._released = True
            timeline = transcript.timeline
            timeline.mark(IntervalKind.SEND, max(began, timeline.end))
            timeline.mark(IntervalKind.DETOKENIZE, max(perf_counter(), timeline.end))
            timeline.compact()
        self._updated.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, on the stream's loop."""
        self._release(FinishReason.ABORT)
        self._failure = error
        self._updated.set()

    def _release(self, reason: FinishReason) -> None:
        if not self._released:
            self._released = True
            self._end(self, reason)

    def _hand_over(self) -> None:
        """The reader requests the next update, so it has processed the previous one."""
        timeline = self.transcript.timeline
        num_new = self.transcript.num_tokens_given - len(timeline.token_times)
        timeline.hand_over_tokens(num_new, perf_counter())


def take_all(items: Iterable[tuple[RequestStream, RequestUpdate]], step: StepStats | None) -> None:
    """Give each stream its update, on the streams' loop; an error affects one stream only."""
    for stream, update in items:
        try:
            stream.take(update, step)
        except Exception as error:
            stream.fail(error)
