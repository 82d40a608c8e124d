"""One HTTP request that the engine works on, from the validated body to the last byte.

It ends early if the client leaves, reads too slowly, or exceeds the time limit; the engine then
drops the request within a step. The subclasses are in `generation.py` and `embeddings.py`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from time import perf_counter
from typing import Any

import msgspec
from starlette.responses import Response

from twinphase.errors import EngineUnavailableError, OverloadedError, TwinphaseError
from twinphase.server import problems
from twinphase.server.access import Ticket
from twinphase.server.problems import FAILED, RequestTimeoutError
from twinphase.server.service import Service

LOG = logging.getLogger("twinphase.server")
# An answer is sent in pieces; each piece waits until the client has read the previous ones.
PIECE_BYTES = 64 << 10

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Exchange(Response):
    """A response that does its work when it is sent.

    Attributes:
        sending_since: start of the pending write, seconds; None between writes.
    """

    def __init__(self, service: Service, num_requests: int) -> None:
        """`num_requests`: number of requests to the engine."""
        self.status_code = 200
        self.background = None
        self.sending_since: float | None = None
        self._service = service
        self._num_requests = num_requests
        self._started = False
        self._failure: TwinphaseError | None = None  # The reason why `expire` cancelled the work.
        self._work: asyncio.Task[None] | None = None

    @abstractmethod
    async def _answer(self, ticket: Ticket) -> None:
        """Do the work and send the answer; a raised error is sent as the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; returns when the last byte is sent, or the client has left."""
        state = scope["state"]
        self._arrival: float = state["arrival"]
        self._tenant: str = state["tenant"]
        self._abort_connection: Callable[[], None] = state["abort"]
        self._shape: problems.Shape = state["shape"]
        self._request_headers = dict(scope["headers"])
        self._asgi_send = state.get("send", send)
        self._service.in_flight.add(self)
        self._work = asyncio.create_task(self._serve())
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({self._work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            self._work.cancel()
            await asyncio.gather(self._work, gone, return_exceptions=True)
            self._service.in_flight.discard(self)

    def check(self, now: float) -> None:
        """End the request if its client is too slow or its time is up; called periodically."""
        config = self._service.config
        if self.sending_since is not None and now - self.sending_since > config.slow_reader_timeout:
            self._service.metrics.refused(0, "slow_reader")
            self.expire(RequestTimeoutError("The client did not read."))
        elif now - self._arrival > config.request_timeout:
            cause = f"The request took longer than {config.request_timeout:g} s."
            self.expire(
                RequestTimeoutError(
                    cause, "Lower max_tokens, or serve with a longer --request-timeout."
                )
            )

    def expire(self, error: TwinphaseError) -> None:
        """End the request with an error, or cut the connection of a client that does not read."""
        if self.sending_since is not None:
            self._abort_connection()
        if self._work is not None and not self._work.done() and self._failure is None:
            self._failure = error
            self._work.cancel()

    async def _serve(self) -> None:
        ticket: Ticket | None = None
        try:
            ticket = self._service.admit(self._tenant, self._num_requests)
            await self._answer(ticket)
            ticket.leave(perf_counter() - self._arrival)
        except TwinphaseError as error:
            await self._refuse(error)
        except asyncio.CancelledError:
            if self._failure is None:
                raise  # The client is gone.
            if self.sending_since is None:
                await self._refuse(self._failure)
        except Exception:
            LOG.exception("A request failed")
            await self._refuse(FAILED)
        finally:
            if ticket is not None:
                ticket.leave()

    async def _refuse(self, error: TwinphaseError) -> None:
        status = error.http_status
        tenant = self._tenant if isinstance(error, OverloadedError) else ""
        self._service.metrics.refused(status, type(error).__name__, tenant)
        if self._started:
            await self._end_with(error)
            return
        if isinstance(error, EngineUnavailableError):
            LOG.info("%d: %s", status, error)
        await self._send_whole(problems.reply(error, self._shape))

    async def _end_with(self, error: TwinphaseError) -> None:
        """End a started answer with an error; only streams can carry it."""

    async def _send_json(self, make_json: Callable[[], Any], headers: Mapping[str, str]) -> None:
        """Send an object, encoded on a thread, because a large one would delay other answers."""
        body = await asyncio.to_thread(lambda: msgspec.json.encode(make_json()))
        await self._send_whole(Response(body, 200, headers, "application/json"))

    async def _send_whole(self, reply: Response) -> None:
        await self._start(reply)
        await self._send(bytes(reply.body), more=False)

    async def _start(self, reply: Response) -> None:
        """Send the status and headers of a reply."""
        self._started = True
        start = {"status": reply.status_code, "headers": reply.raw_headers}
        await self._asgi_send({"type": "http.response.start", **start})

    async def _send(self, data: bytes, more: bool = True) -> None:
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            end = start + PIECE_BYTES
            self.sending_since = perf_counter()
            message = {
                "type": "http.response.body",
                "body": data[start:end],
                "more_body": more or end < len(data),
            }
            await self._asgi_send(message)
        self.sending_since = None


async def until_gone(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
