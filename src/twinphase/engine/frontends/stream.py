"""`RequestStream`: the answer of one request as it grows, for a reader in asyncio code.

Text is made on the reader's side, while the engine's next step runs; what a slow reader has not
taken yet waits as one growing text, not as a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import perf_counter

from twinphase.engine.frontends.outputs import StreamUpdate, Transcript
from twinphase.engine.process.messages import News
from twinphase.outcome import FinishReason
from twinphase.phases.timeline import IntervalKind


class RequestStream:
    """The answer of one request: an async iterator of `StreamUpdate`.

    Use it in `async for`, or `async with` to end it early. A stream that nobody refers to any more,
    because its reader left or was cancelled, aborts its request.

    Attributes:
        transcript: text, tokens and timeline so far; the timeline is whole when the request has
            finished.
        last_step_end: when the step ended whose tokens came last, seconds; None between two steps.
        last_news: when news came last, seconds.
        prices: of the cost model, when the request has finished.
    """

    def __init__(
        self, transcript: Transcript, end: Callable[[RequestStream, FinishReason], None]
    ) -> None:
        """Made by `AsyncEngine.submit`; `end` tells the engine to let go of the request."""
        self.request_id = transcript.request_id
        self.transcript = transcript
        self.loop = asyncio.get_running_loop()
        self.last_step_end: float | None = None
        self.last_news = transcript.timeline.arrival
        self.prices: tuple[float, ...] = ()
        self._end = end
        self._news = asyncio.Event()
        self._let_go = False  # the engine has no part in it any more, or was told so
        self._ended = False  # the last update was given
        self._failure: Exception | None = None
        self._times: list[float] = (
            transcript.timeline.token_times
        )  # kept when the engine's timeline comes

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamUpdate:
        self._hand_over()
        while not self._ended:
            await self._news.wait()
            self._news.clear()
            if self._failure is not None:
                self._ended = True
                raise self._failure
            if self.transcript.finished:
                self._ended = True
                update = self.transcript.next_update()
                timeline = self.transcript.timeline
                self._hand_over()
                timeline.token_times = self._times
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
        """As `aclose`, without waiting."""
        self._ended = True
        self._release(FinishReason.ABORT)

    def take(self, news: News, step_end: float | None) -> None:
        """On the stream's loop: make text of new tokens."""
        if self._let_go:
            return
        transcript = self.transcript
        finished = news.finished
        self.last_news = began = perf_counter()
        transcript.num_prefilled = news.num_prefilled
        transcript.num_cached_tokens = news.num_cached
        transcript.take_prompt_logprobs(news.prompt_logprobs)
        stopped = transcript.stop_string is not None  # and the engine was told so
        if not stopped:
            self.last_step_end = step_end
            transcript.take_tokens(
                news.token_ids, news.logprobs, finished.reason if finished else None
            )
        if finished is not None:
            self._let_go = True
            transcript.end(finished.reason, finished.counts)
            transcript.timeline = finished.timeline
            self.prices = finished.prices
            timeline = transcript.timeline
            timeline.mark(IntervalKind.SEND, max(began, timeline.end))
            timeline.mark(IntervalKind.DETOKENIZE, max(perf_counter(), timeline.end))
            timeline.compact()
        elif (
            transcript.stop_string is not None and not stopped
        ):  # it has finished when the engine has let go of it
            self._end(self, FinishReason.STOP)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """On the stream's loop: nothing more will come, and the reader is told so."""
        self._release(FinishReason.ABORT)
        self._failure = error
        self._news.set()

    def _release(self, reason: FinishReason) -> None:
        if not self._let_go:
            self._let_go = True
            self._end(self, reason)

    def _hand_over(self) -> None:
        """The reader comes for more, so it has handed over what it got before."""
        num_new = self.transcript.num_tokens_given - len(self._times)
        if num_new > 0:
            self._times.extend([perf_counter()] * num_new)


def take_all(items: Iterable[tuple[RequestStream, News]], step_end: float | None) -> None:
    """On the streams' loop: what a step brought to each; one answer's text must not cost the others theirs."""
    for stream, news in items:
        try:
            stream.take(news, step_end)
        except Exception as error:
            stream.fail(error)
