"""One generating request over HTTP, from its validated body to the last byte: the answer as events or as one body.

It ends early when the client leaves, reads too slowly, or takes more time than is allowed; the engine then lets go of
the request within a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from time import perf_counter
from typing import Any

import msgspec
from starlette.responses import Response

from twinphase.engine.async_engine import AsyncEngine
from twinphase.engine.outputs import StreamUpdate
from twinphase.errors import EngineUnavailableError, TwinphaseError
from twinphase.phases import latency
from twinphase.server import problems
from twinphase.server.access import Ticket, salted
from twinphase.server.answers import Choice, Delta, run_job, submit_all
from twinphase.server.jobs import Job
from twinphase.server.observe import server_timing
from twinphase.server.problems import FAILED, RequestTimeoutError
from twinphase.server.replies import DONE, Replies
from twinphase.server.service import Service

__all__ = ["Generation"]

LOG = logging.getLogger("twinphase.server")
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
          (b"x-accel-buffering", b"no")]  # fmt: skip
PIECE_BYTES = 64 << 10  # of an answer: the next piece waits until the client has taken of the ones before

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Generation(Response):
    """The response that does the work when it is sent.

    Attributes:
        sending_since: when the write began that the client has not taken yet, seconds.
    """

    def __init__(
        self,
        service: Service,
        make_job: Callable[[AsyncEngine, float], Awaitable[Job]],
        make_replies: type[Replies],
        *,
        num_requests: int,
        stream: bool,
    ) -> None:
        """`make_job` encodes the prompts, given engine and time of arrival; `num_requests`: answers to ask for."""
        self.status_code, self.background = 200, None
        self.sending_since: float | None = None
        self._service, self._make_job, self._make_replies = service, make_job, make_replies
        self._num_requests, self._stream = num_requests, stream
        self._started = False
        self._failure: TwinphaseError | None = None  # why the work was cancelled, if the client may know
        self._work: asyncio.Task[None] | None = None
        self._last_token: dict[int, float] = {}  # by choice, when its last token was handed over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; returns when the last byte is handed over or nobody wants it."""
        state = scope["state"]
        self._arrival: float = state["arrival"]
        self._tenant: str = state["tenant"]
        self._abort_connection: Callable[[], None] = state["abort"]
        self._request_headers = dict(scope["headers"])
        self._asgi_send = state.get("send", send)
        self._service.in_flight.add(self)
        self._work = asyncio.create_task(self._serve())
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({self._work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            self._work.cancel()
            await asyncio.gather(self._work, gone, return_exceptions=True)
            self._service.in_flight.discard(self)

    def check(self, now: float) -> None:
        """End the request if its client reads too slowly or its time is up; called a few times per second."""
        config = self._service.config
        if self.sending_since is not None and now - self.sending_since > config.slow_reader_timeout:
            self._service.metrics.refused(0, "slow_reader")
            self.expire(RequestTimeoutError("The client did not read."))
        elif now - self._arrival > config.request_timeout:
            cause = f"The request took longer than {config.request_timeout:g} s."
            self.expire(RequestTimeoutError(cause, "Lower max_tokens, or serve with a longer --request-timeout."))

    def expire(self, error: TwinphaseError) -> None:
        """End it now; the client gets the error, or loses the connection if it has not taken what came before."""
        if self.sending_since is not None:
            self._abort_connection()
        if self._work is not None and not self._work.done() and self._failure is None:
            self._failure = error
            self._work.cancel()

    async def _serve(self) -> None:
        ticket: Ticket | None = None
        try:
            ticket = self._service.admit(self._num_requests)
            await self._answer(ticket)
            ticket.leave(perf_counter() - self._arrival)
        except TwinphaseError as error:
            await self._refuse(error)
        except asyncio.CancelledError:
            if self._failure is None:
                raise  # the client is gone
            if self.sending_since is None:
                await self._refuse(self._failure)
        except Exception:
            LOG.exception("A request failed")
            await self._refuse(FAILED)
        finally:
            if ticket is not None:
                ticket.leave()

    async def _answer(self, ticket: Ticket) -> None:
        service = self._service
        engine = service.require_engine()
        job = await self._make_job(engine, self._arrival)
        ticket.queue(sum(len(prompt.token_ids) for prompt in job.prompts))
        choices = await submit_all(engine, job, salted(self._tenant, job.cache_salt))
        waiting = set(range(len(job.prompts)))

        def on_update(choice: Choice, update: StreamUpdate) -> None:
            prompt = choice.index // job.n
            if prompt in waiting and (update.num_prefilled or update.finished):
                waiting.discard(prompt)
                ticket.begun(len(job.prompts[prompt].token_ids))

        for choice in choices:
            service.timelines.begin(self._tenant, choice)
        shape = service.facts.shape if service.facts else None
        replies = self._make_replies(job, choices, engine.text.tokenizer, shape)
        try:
            if self._stream:
                await self._send_events(job, choices, replies, on_update)
            else:
                async with aclosing(run_job(choices, on_update)) as deltas:
                    async for delta in deltas:
                        self._handed_over(delta)
                spent = server_timing(choices[0].stream.transcript.timeline)
                headers = [(b"content-type", b"application/json"), (b"server-timing", spent.encode())]
                headers.append((b"x-request-id", job.id.encode()))
                # Long lists of log probabilities take a while: others' answers go on.
                body = await asyncio.to_thread(lambda: msgspec.json.encode(replies.body()))
                await self._send_body(200, body, headers)
        finally:
            for choice in choices:
                service.observe_end(job, choice, self._request_headers)

    async def _send_events(
        self,
        job: Job,
        choices: list[Choice],
        replies: Replies,
        on_update: Callable[[Choice, StreamUpdate], None],
    ) -> None:
        await self._start(200, [*EVENTS, (b"x-request-id", job.id.encode())])
        async with aclosing(run_job(choices, on_update)) as deltas:
            async for delta in deltas:
                data = replies.chunk(delta)
                if data:
                    await self._send(data)
                self._handed_over(delta)
        await self._send(replies.end(), more=False)

    def _handed_over(self, delta: Delta) -> None:
        if not delta.token_ids:
            return
        now, metrics, choice = perf_counter(), self._service.metrics, delta.choice
        last = self._last_token.get(choice.index)
        if last is None:
            metrics.first_token(latency.ttft(self._arrival, now))
            if len(delta.token_ids) > 1:
                metrics.token_gap(0.0, len(delta.token_ids) - 1)
        else:
            metrics.token_gap(now - last, len(delta.token_ids))
        if choice.stream.last_step_end is not None:
            metrics.delivered(now - choice.stream.last_step_end)
        self._last_token[choice.index] = now

    async def _refuse(self, error: TwinphaseError) -> None:
        status = error.http_status
        self._service.metrics.refused(status, type(error).__name__)
        if self._started:
            if self._stream:
                await self._send(b"data: " + problems.body(error) + b"\n\n" + DONE, more=False)
            return
        if isinstance(error, EngineUnavailableError):
            LOG.info("%d: %s", status, error)
        await self._send_body(status, problems.body(error), problems.raw_headers(error))

    async def _send_body(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._send(body, more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await self._asgi_send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send(self, data: bytes, more: bool = True) -> None:
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            end = start + PIECE_BYTES
            self.sending_since = perf_counter()
            message = {"type": "http.response.body", "body": data[start:end], "more_body": more or end < len(data)}
            await self._asgi_send(message)
        self.sending_since = None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
