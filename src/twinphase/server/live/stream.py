"""`GET /v1/engine/events` over HTTP (docs/feed.md)."""

from __future__ import annotations

import asyncio
from time import perf_counter

from fastapi import APIRouter, Request
from starlette.responses import Response

from twinphase.server.exchange import Receive, Scope, Send, until_gone
from twinphase.server.live.feed import Page
from twinphase.server.service import Service
from twinphase.server.text_routes import ERRORS, Documented

EVENTS: Documented = {200: {"content": {"text/event-stream": {}}}, **ERRORS}
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def add_feed(api: APIRouter, service: Service) -> None:
    @api.get("/v1/engine/events", responses=EVENTS, response_class=Response)
    async def engine_events(request: Request) -> Response:
        """What the engine does, step by step, as server-sent events: docs/feed.md."""
        last = request.headers.get("last-event-id")
        return EventStream(service.feed.open(request.state.tenant, last), service)


class EventStream(Response):
    """The response that sends a page's events until either side ends."""

    media_type = "text/event-stream"

    def __init__(self, page: Page, service: Service) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._page = page
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the reader; returns when it has left, or the server ends."""
        self._page.abort = scope["state"]["abort"]
        send = scope["state"].get("send", send)
        start = {"status": self.status_code, "headers": self.raw_headers}
        work = asyncio.create_task(self._send_all(start, send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._service.feed.leave(self._page)
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _send_all(self, start: dict[str, object], send: Send) -> None:
        page = self._page
        await send({"type": "http.response.start", **start})
        while data := await page.next():
            page.sending_since = perf_counter()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            page.sending_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
