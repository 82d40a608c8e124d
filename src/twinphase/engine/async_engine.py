"""`AsyncEngine`: many users at once, who submit, read streams and abort from asyncio code.

One thread runs the engine and owns all its state. Both sides exchange messages only. Into the loop: calls, which it
makes between two steps. Out of it: one message a step with every request's new tokens. Text is made on the reader's
side, while the next step runs; what a slow reader has not taken yet waits as one growing text, not as a queue.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from twinphase.batch import Phase, TokenLogprobs
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.load import LoadedEngine, Prompt, is_plain
from twinphase.engine.outputs import StreamUpdate, Transcript
from twinphase.errors import EngineDeadError, RequestNotFoundError
from twinphase.phases.explain import Explanation
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import FinishReason, Request, SamplingParams

__all__ = ["AsyncEngine", "RequestStream"]


@dataclass(frozen=True)
class _News:
    """What a step brought to one request; the engine's thread sends it, the stream's loop takes it."""

    stream: RequestStream
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_prefilled: int
    request: Request | None = None  # given with the last news, when the engine has let go of it


class RequestStream:
    """The answer of one request as it grows: an async iterator of `StreamUpdate`.

    Attributes:
        request_id: of the request.
        transcript: text, tokens and timeline so far.
    """

    def __init__(self, engine: AsyncEngine, transcript: Transcript) -> None:
        """Made by `AsyncEngine.submit`."""
        self.request_id = transcript.request.request_id
        self.transcript = transcript
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._ended = False  # the engine has let go of the request
        self._failure: Exception | None = None
        self._num_chars = self._num_tokens = self._num_prefilled = 0

    def __aiter__(self) -> AsyncIterator[StreamUpdate]:
        return self._updates()

    async def _updates(self) -> AsyncIterator[StreamUpdate]:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._failure is not None:
                    raise self._failure
                last = self._ended
                if last or self._has_news():
                    yield self._update(last)
                if last:
                    self.transcript.timeline.mark(IntervalKind.SEND, max(self._engine.clock(), self._end))
                    return
        finally:
            if not self._ended:
                self._engine.abandon(self)

    @property
    def _end(self) -> float:
        return self.transcript.timeline.end

    def _has_news(self) -> bool:
        transcript = self.transcript
        return (
            len(transcript.text) > self._num_chars
            or len(transcript.request.output_token_ids) > self._num_tokens
            or transcript.num_prefilled > self._num_prefilled
        )

    def _update(self, last: bool) -> StreamUpdate:
        transcript = self.transcript
        text, token_ids = transcript.text[self._num_chars :], transcript.request.output_token_ids[self._num_tokens :]
        self._num_chars, self._num_tokens = len(transcript.text), len(transcript.request.output_token_ids)
        self._num_prefilled = transcript.num_prefilled
        phase = Phase.DECODE if self._num_tokens else Phase.PREFILL
        return StreamUpdate(text, token_ids, phase, self._num_prefilled, last, transcript)

    def take(self, news: _News) -> None:
        """On the stream's loop: make text of new tokens."""
        transcript, clock = self.transcript, self._engine.clock
        request, ended = transcript.request, news.request is not None
        transcript.num_prefilled = news.num_prefilled
        if news.request is not None:
            request.num_cached_tokens, request.prefix_miss = news.request.num_cached_tokens, news.request.prefix_miss
            request.num_preemptions = news.request.num_preemptions
            request.num_recomputed_tokens = news.request.num_recomputed_tokens
            request.error = news.request.error
        if not transcript.finished:  # it has, where a stop string was found while the engine went on
            request.output_token_ids += news.token_ids
            if news.request is not None:
                request.finish_reason = news.request.finish_reason
            num_new = transcript.take_tokens(news.logprobs)
            now = clock()
            transcript.timeline.hand_over_tokens(num_new, now)
            if ended:
                transcript.timeline.mark(IntervalKind.DETOKENIZE, max(now, self._end))
            elif transcript.finished:
                self._engine.stop(self)
        self._ended = ended
        self._news.set()

    def fail(self, error: Exception) -> None:
        """On the stream's loop: nothing more will come."""
        self._ended, self._failure = True, error
        self._news.set()


class AsyncEngine:
    """An engine for asyncio code.

    Attributes:
        loaded: the model, its tokenizer and its engine, whose state belongs to the engine's thread.
        error: what ended the engine's thread, if anything did.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        """Start the engine's thread."""
        self.loaded = loaded
        self.clock = loaded.engine.clock
        self.error: BaseException | None = None
        self.last_step_time: float | None = None  # when the last step ended, for health checks
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}  # of unfinished requests; the engine's thread's
        self._ids = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="twinphase-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_model(cls, model: str | Path, **config: Any) -> AsyncEngine:
        """Load a model; arguments and errors are those of `LLM`."""
        return cls(LoadedEngine(model, **config))

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._closed

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Queue a request.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            sampling_params: vLLM's defaults if None.
            request_id: unique among the unfinished; one is made if None.
            priority: lower goes first; needs the policy "priority".
            cache_salt: share cached prefixes only with requests of the same salt.

        Returns:
            The stream of its answer. Leaving its loop, or cancelling the reader, aborts the request.

        Raises:
            InvalidRequestError: as `Engine.add_request`; nothing else is disturbed.
            EngineDeadError: the engine has ended.
        """
        timeline = RequestTimeline(self.clock())
        text, token_ids = await asyncio.to_thread(self.loaded.encode, prompt)
        timeline.mark(IntervalKind.TOKENIZE, self.clock())
        params = sampling_params or SamplingParams()
        name = request_id if request_id is not None else f"request-{next(self._ids)}"

        def make() -> Request:
            return Request(name, token_ids, params, timeline.arrival, priority, cache_salt)

        request, shown = make(), make()  # the engine's, and the one that text is made of
        transcript = Transcript(shown, text, self.loaded.tokenizer, timeline, continues_prompt=is_plain(prompt))
        stream = RequestStream(self, transcript)

        def add(engine: Engine) -> None:
            engine.add_request(request, timeline=timeline)
            self._streams[name] = stream

        try:
            await self._call(add)
        except asyncio.CancelledError:
            self.abandon(stream)
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with `finish_reason` "abort".

        Raises:
            RequestNotFoundError: no unfinished request has that id.
        """
        await self._call(lambda engine: self._end(engine, request_id, FinishReason.ABORT))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Result of a function of the engine, run by its thread between two steps; for looking, not for changing."""
        return await self._call(function)

    async def explain(self, stream: RequestStream) -> Explanation:
        """Why a request took as long as it did; see `LLM.explain`."""
        transcript = stream.transcript
        result: Explanation = await self._call(
            lambda engine: self.loaded.explain(transcript.request, transcript.timeline)
        )
        return result

    def abandon(self, stream: RequestStream) -> None:
        """Abort without waiting, whether or not the request is still there; from any thread."""
        self._end_quietly(stream, FinishReason.ABORT)

    def stop(self, stream: RequestStream) -> None:
        """End a request at a stop string without waiting; from any thread."""
        self._end_quietly(stream, FinishReason.STOP)

    def close(self) -> None:
        """End the engine's thread after the step it is in; unfinished streams fail. From any thread."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # From here on: between the two sides.
    async def _call(self, function: Callable[[Engine], Any]) -> Any:
        answer: Future[Any] = Future()

        def run(engine: Engine) -> None:
            try:
                answer.set_result(function(engine))
            except Exception as error:
                answer.set_exception(error)

        self._post(run)
        waiter = asyncio.wrap_future(answer)
        while True:  # the thread may end without having looked
            done, _ = await asyncio.wait([waiter], timeout=1.0)
            if done:
                return waiter.result()
            if not self._thread.is_alive():
                waiter.cancel()
                raise self._dead()

    def _post(self, call: Callable[[Engine], None]) -> None:
        if not self.is_running:
            raise self._dead()
        self._inbox.put(call)

    def _dead(self) -> EngineDeadError:
        reason = f" after {type(self.error).__name__}: {self.error}" if self.error else ""
        return EngineDeadError(f"The engine has ended{reason}.", "Start it again; requests can be sent once more.")

    def _end_quietly(self, stream: RequestStream, reason: FinishReason) -> None:
        def end(engine: Engine) -> None:
            if self._streams.get(stream.request_id) is stream:  # the id may be another request's by now
                self._end(engine, stream.request_id, reason)

        if self.is_running:
            self._inbox.put(end)

    # From here on: the engine's thread.
    def _run(self) -> None:
        engine = self.loaded.engine
        gc.collect()
        gc.freeze()  # or the collector goes through the whole model's objects in the middle of a step
        try:
            while not self._closed:
                self._drain(engine)
                if engine.has_work and not self._closed:
                    result = engine.step()
                    self.last_step_time = result.record.end
                    self._send(self._news(engine, result))
                    engine.ledger.text_until(engine.clock())
        except BaseException as error:
            self.error = error
        finally:
            self._closed = True
            for stream in self._streams.values():
                _post_to(stream._loop, stream.fail, self._dead())
            self._streams.clear()

    def _drain(self, engine: Engine) -> None:
        """Make all waiting calls; without work, wait for one."""
        while True:
            try:
                call = self._inbox.get(block=not engine.has_work)
            except queue.Empty:
                return
            if call is None:
                return
            call(engine)

    def _news(self, engine: Engine, result: StepResult) -> list[_News]:
        finished = {request.request_id: request for request in result.finished}
        news = []
        for share in result.batch.scheduled:
            name = share.request_id
            stream = self._streams.pop(name, None) if name in finished else self._streams.get(name)
            if stream is None:
                continue
            end = share.num_computed_tokens + len(share.token_ids)
            num_prefilled = min(end, len(share.prompt_token_ids))
            tokens = result.output.token_ids.get(name, [])
            logprobs = result.output.logprobs.get(name, [])
            news.append(_News(stream, tokens, logprobs, num_prefilled, finished.get(name)))
        return news

    def _end(self, engine: Engine, request_id: str, reason: FinishReason) -> None:
        request = engine.scheduler.get(request_id)
        if request is None:
            raise RequestNotFoundError(
                f"No unfinished request has the id {request_id!r}.", "It was never added, or has finished already."
            )
        engine.finish(request_id, reason)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            num_prefilled = stream.transcript.num_prefilled
            self._send([_News(stream, [], [], num_prefilled, request)])

    def _send(self, news: list[_News]) -> None:
        """One wake-up of each event loop, however many requests it has."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        for item in news:
            by_loop.setdefault(item.stream._loop, []).append(item)
        for loop, items in by_loop.items():
            _post_to(loop, _take_all, items)


def _take_all(news: list[_News]) -> None:
    for item in news:
        item.stream.take(item)


def _post_to(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # the loop was closed: nobody reads any more
        time.sleep(0)
