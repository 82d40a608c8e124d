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
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
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
class _Outlet:
    """The engine's side of a stream; it does not keep alive what nobody reads any more."""

    loop: asyncio.AbstractEventLoop
    stream: weakref.ref[RequestStream]


@dataclass(frozen=True)
class _News:
    """What a step brought to one request; the engine's thread sends it, the stream's loop takes it."""

    outlet: _Outlet
    request: Request  # the engine's; of it, numbers are read
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_prefilled: int
    last: bool  # the engine has let go of the request


class RequestStream:
    """The answer of one request as it grows: an async iterator of `StreamUpdate`.

    Use it in `async for`, or `async with` to end it early. A stream that nobody refers to any more, because its reader
    left or was cancelled, aborts its request.

    Attributes:
        request_id: of the request.
        transcript: text, tokens and timeline so far.
    """

    def __init__(self, engine: AsyncEngine, transcript: Transcript) -> None:
        """Made by `AsyncEngine.submit`."""
        self.request_id = transcript.request.request_id
        self.transcript = transcript
        self.outlet = _Outlet(asyncio.get_running_loop(), weakref.ref(self))
        self._engine = engine
        self._news = asyncio.Event()
        self._let_go = False  # the engine has no part in it any more, or was told so
        self._ended = False  # the last update was given
        self._failure: Exception | None = None
        self._num_chars = self._num_tokens = self._num_prefilled = 0

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamUpdate:
        while not self._ended:
            await self._news.wait()
            self._news.clear()
            if self._failure is not None:
                self._ended = True
                raise self._failure
            if self.transcript.finished:
                self._ended = True
                timeline = self.transcript.timeline
                timeline.mark(IntervalKind.SEND, max(self._engine.clock(), timeline.end))
                return self._update()
            if self._has_news():
                return self._update()
        raise StopAsyncIteration

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort the request if it has not finished."""
        self.abandon()

    def __del__(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """As `aclose`, without waiting."""
        self._ended = True
        if not self._let_go:
            self._let_go = True
            self._engine.end_quietly(self.request_id, self.outlet, FinishReason.ABORT)

    def _has_news(self) -> bool:
        transcript = self.transcript
        return (
            len(transcript.text) > self._num_chars
            or len(transcript.request.output_token_ids) > self._num_tokens
            or transcript.num_prefilled > self._num_prefilled
        )

    def _update(self) -> StreamUpdate:
        transcript = self.transcript
        text, token_ids = transcript.text[self._num_chars :], transcript.request.output_token_ids[self._num_tokens :]
        self._num_chars, self._num_tokens = len(transcript.text), len(transcript.request.output_token_ids)
        self._num_prefilled = transcript.num_prefilled
        phase = Phase.DECODE if self._num_tokens else Phase.PREFILL
        return StreamUpdate(text, token_ids, phase, self._num_prefilled, transcript.finished, transcript)

    def take(self, news: _News) -> None:
        """On the stream's loop: make text of new tokens."""
        transcript, request, began = self.transcript, self.transcript.request, self._engine.clock()
        if self._let_go:  # a stop string was found while the engine went on
            return
        for name in ("num_cached_tokens", "prefix_miss", "num_preemptions", "num_recomputed_tokens", "error"):
            setattr(request, name, getattr(news.request, name))
        transcript.num_prefilled = news.num_prefilled
        request.output_token_ids += news.token_ids
        if news.last:
            request.finish_reason = news.request.finish_reason
        num_new = transcript.take_tokens(news.logprobs)
        now = self._engine.clock()
        if transcript.finished:
            self._let_go = True
            if not news.last:  # the engine learns of the stop string after its next step, which is not this answer's
                self._engine.end_quietly(self.request_id, self.outlet, FinishReason.STOP)
                transcript.timeline = transcript.timeline.copy()
            timeline = transcript.timeline
            timeline.mark(IntervalKind.SEND, max(began, timeline.end))
            timeline.mark(IntervalKind.DETOKENIZE, max(now, timeline.end))
            timeline.compact()
        transcript.timeline.hand_over_tokens(num_new, now)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """On the stream's loop: nothing more will come, and the reader is told so."""
        if not self._let_go:
            self._let_go = True
            self._engine.end_quietly(self.request_id, self.outlet, FinishReason.ABORT)
        self._failure = error
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
        self._outlets: dict[str, _Outlet] = {}  # of unfinished requests; the engine's thread's
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
        name = request_id if request_id is not None else uuid.uuid4().hex

        def make() -> Request:
            return Request(name, token_ids, params, timeline.arrival, priority, cache_salt)

        request, shown = make(), make()  # the engine's, and the one that text is made of
        transcript = Transcript(shown, text, self.loaded.tokenizer, timeline, continues_prompt=is_plain(prompt))
        stream = RequestStream(self, transcript)
        outlet = stream.outlet  # the call must not keep the stream alive

        def add(engine: Engine) -> None:
            engine.add_request(request, timeline=timeline)
            self._outlets[name] = outlet

        await self._call(add)  # cancelled or refused, the stream goes, and with it the request
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

    def end_quietly(self, request_id: str, outlet: _Outlet, reason: FinishReason) -> None:
        """End a stream's request without waiting, if it is still there; for the stream, from any thread."""

        def end(engine: Engine) -> None:
            if self._outlets.get(request_id) is outlet:  # the id may be another request's by now
                del self._outlets[request_id]
                engine.finish(request_id, reason)

        if self.is_running:
            self._inbox.put(end)

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
            if not answer.set_running_or_notify_cancel():
                return
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
                    engine.ledger.end_text(engine.clock(), len(result.batch.scheduled) == 1)
        except BaseException as error:
            self.error = error
        finally:
            self._closed = True
            for outlet in self._outlets.values():
                _post_to(outlet.loop, _fail, outlet, self._dead())
            self._outlets.clear()

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
            outlet = self._outlets.pop(name, None) if name in finished else self._outlets.get(name)
            request = finished.get(name) or engine.scheduler.get(name)
            if outlet is None or request is None:
                continue
            num_prefilled = min(share.num_computed_tokens + len(share.token_ids), len(share.prompt_token_ids))
            tokens = result.output.token_ids.get(name, [])
            logprobs = result.output.logprobs.get(name, [])
            news.append(_News(outlet, request, tokens, logprobs, num_prefilled, name in finished))
        return news

    def _end(self, engine: Engine, request_id: str, reason: FinishReason) -> None:
        request = engine.scheduler.get(request_id)
        if request is None:
            raise RequestNotFoundError(
                f"No unfinished request has the id {request_id!r}.", "It was never added, or has finished already."
            )
        engine.finish(request_id, reason)
        outlet = self._outlets.pop(request_id, None)
        if outlet is not None:
            num_prefilled = min(request.most_computed_tokens, len(request.prompt_token_ids))
            self._send([_News(outlet, request, [], [], num_prefilled, last=True)])

    def _send(self, news: list[_News]) -> None:
        """One wake-up of each event loop, however many requests it has."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        for item in news:
            by_loop.setdefault(item.outlet.loop, []).append(item)
        for loop, items in by_loop.items():
            _post_to(loop, _take_all, items)


def _take_all(news: list[_News]) -> None:
    for item in news:
        stream = item.outlet.stream()
        if stream is None:
            continue
        try:
            stream.take(item)
        except Exception as error:  # one answer's text must not cost the others theirs
            stream.fail(error)


def _fail(outlet: _Outlet, error: Exception) -> None:
    stream = outlet.stream()
    if stream is not None:
        stream.fail(error)


def _post_to(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop was closed: nobody reads any more
        loop.call_soon_threadsafe(function, *arguments)
