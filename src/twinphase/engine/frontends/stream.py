"""`RequestStream`: the answer of one request as it grows, for asyncio code.

Text is made on the reader's side, while the engine's next step runs. For a slow reader, one text
grows instead of a queue.
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

    Use it in `async for`, or `async with` to end it early. A stream without references left,
    because its reader left or was cancelled, aborts its request.

    Attributes:
        transcript: text, tokens and record so far.
        last_step_end: when the step ended that brought the last tokens, seconds; None if the
            request ended between two steps.
        last_update: when the last update came, seconds.
        prefill_began: when the first step with a part of its prompt began, seconds.
    """

    def __init__(
        self, transcript: Transcript, end: Callable[[RequestStream, FinishReason], None]
    ) -> None:
        """Made by `AsyncEngine.submit`; `end` has the engine end the request."""
        self.request_id = transcript.request_id
        self.transcript = transcript
        self.loop = asyncio.get_running_loop()
        self.last_step_end: float | None = None
        self.prefill_began: float | None = None
        self.last_update = transcript.record.arrival
        self._end = end
        self._updated = asyncio.Event()
        self._released = False  # the engine has ended the request, or was asked to
        self._exhausted = False  # the last update was given
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
        """The reader asks for more, so it has handed over what it got before."""
        timeline = self.transcript.timeline
        num_new = self.transcript.num_tokens_given - len(timeline.token_times)
        timeline.hand_over_tokens(num_new, perf_counter())


def take_all(items: Iterable[tuple[RequestStream, RequestUpdate]], step: StepStats | None) -> None:
    """Give each stream its update, on the streams' loop; an error in one spares the others."""
    for stream, update in items:
        try:
            stream.take(update, step)
        except Exception as error:
            stream.fail(error)
