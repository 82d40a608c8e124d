"""The HTTP routes, and the checks of each request: key, size, time, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from twinphase import __version__
from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.server import problems
from twinphase.server.access import AuthenticationError
from twinphase.server.dialects import shape_of
from twinphase.server.dialects.anthropic import add_messages
from twinphase.server.dialects.ollama import add_ollama
from twinphase.server.dialects.responses import add_responses
from twinphase.server.doors import Doors
from twinphase.server.embeddings import Embeddings
from twinphase.server.exchange import Receive, Scope, Send
from twinphase.server.generation import Generation
from twinphase.server.live.stream import add_feed
from twinphase.server.observe import timeline_json
from twinphase.server.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
)
from twinphase.server.pages import add_pages
from twinphase.server.problems import FAILED, Problem, SlowBodyError, TooLargeError
from twinphase.server.replies import ChatReplies, CompletionReplies
from twinphase.server.scores import add_scores
from twinphase.server.service import Service
from twinphase.server.text_routes import ANSWER, ERRORS, OBJECT, Documented, add_text

LOG = logging.getLogger("twinphase.server")
OPEN_PATHS = re.compile(
    r"/(health(/live|/ready)?|metrics|version|(docs|page)(/[\w.-]*)?|openapi\.json)?"
)  # The server has no API keys.
POLLED_PATHS = re.compile(r"/|/health(/live|/ready)?|/metrics|/(docs|page)/.*|/v1/cluster|/api/ps")
MAX_LOGGED_CHARACTERS = 256
# All bodies in transfer together may have this many times the size limit of one body.
TOTAL_BODY_LIMITS = 32
# Azure's and Anthropic's clients send these parameters with every request.
IGNORED_PARAMETERS = {"api-version", "beta"}
NOSNIFF = (b"x-content-type-options", b"nosniff")
METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
FORM = b"application/x-www-form-urlencoded"
UNREADABLE = "The body is not readable JSON. Send UTF-8, with less nesting and shorter numbers."
EMBEDDINGS: Documented = {200: {"content": OBJECT}, **ERRORS}
HEALTH: Documented = {503: {"content": OBJECT, "description": "Not now"}, **ERRORS}
EXPOSED = [
    "x-request-id",
    "x-ignored-fields",
    "server-timing",
    "retry-after",
]  # Response headers that a browser page may read.
METRICS: Documented = {
    200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}},
    **ERRORS,
}


def make_app(service: Service, *, when_ready: bool = False) -> Gate:
    """The ASGI application, which also starts the service; `when_ready` waits for the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        if when_ready:
            await service.ready()
        yield
        await service.stop()

    app = FastAPI(
        title="twinphase",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(_check_query)],
        redirect_slashes=False,  # A redirect would go to the host that the request names.
        generate_unique_id_function=lambda route: route.name,
    )
    # This is only for the API document: the gate checks the key before it reads a body.
    bearer = Depends(HTTPBearer(auto_error=False, description="One of the server's API keys."))
    api = APIRouter(dependencies=[bearer] if service.config.keys else None)
    _add_generation(api, service)
    add_responses(api, service)
    add_messages(api, service)
    add_ollama(api, service)
    _add_embeddings(api, service)
    add_scores(api, service)
    add_text(api, service)
    _add_requests(api, service)
    if service.config.page:
        add_feed(api, service)
    app.include_router(api)
    _add_health(app, service)
    add_pages(app, service)
    _add_problems(app, service)
    return Gate(app, service)


def _add_generation(api: APIRouter, service: Service) -> None:
    @api.post("/v1/chat/completions", responses=ANSWER, response_class=Response)
    async def create_chat_completion(body: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        return Generation(service, body, ChatReplies)

    @api.post("/v1/completions", responses=ANSWER, response_class=Response)
    async def create_completion(body: CompletionRequest) -> Response:
        """Complete one prompt or several."""
        return Generation(service, body, CompletionReplies)


def _add_embeddings(api: APIRouter, service: Service) -> None:
    @api.post("/v1/embeddings", responses=EMBEDDINGS, response_class=Response)
    async def create_embeddings(body: EmbeddingRequest) -> Response:
        """Turn one text, or several, into vectors."""
        return Embeddings(service, body)


def _add_requests(api: APIRouter, service: Service) -> None:
    @api.get("/v1/cluster", responses=ERRORS)
    async def get_cluster() -> Response:
        """The engines of this server: addresses, load, and where their time goes."""
        workers = service.workers()
        requests = service.timelines.phases(sum(worker.waiting for worker in workers))
        found = {"object": "cluster", "workers": workers, "requests": requests}
        return Response(msgspec.json.encode(found), media_type="application/json")

    @api.get("/v1/requests", responses=ERRORS)
    async def list_requests(request: Request) -> dict[str, Any]:
        """The key's running and recently finished requests, newest first, and its share."""
        tenant = request.state.tenant
        share = {"tenant": tenant, "share": service.admission.share(tenant)} if tenant else {}
        return {"object": "list", "data": service.timelines.newest(tenant), **share}

    @api.get("/v1/requests/{request_id}/timeline", responses=ERRORS)
    async def get_timeline(request_id: str, request: Request) -> dict[str, Any]:
        """Where a request's time went, interval by interval."""
        record = service.timelines.find(request.state.tenant, request_id)
        if not record.has_ended:
            record, _ = await service.require_engine().inspect(record)
        return timeline_json(record)

    @api.get("/v1/requests/{request_id}/explain", responses=ERRORS)
    async def explain(request_id: str, request: Request) -> dict[str, Any]:
        """Why a request took as long as it did, and what to change."""
        record = service.timelines.find(request.state.tenant, request_id)
        _, explanation = await service.require_engine().inspect(record)
        return {"id": request_id, **explanation.as_dict()}


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health/live", responses=HEALTH)
    async def live() -> Response:
        """Whether the server works: 503 when its engine is stalled, or cannot load."""
        return JSONResponse(service.state(), 503 if service.stage in ("stalled", "failed") else 200)

    @app.get("/health/ready", responses=HEALTH)
    @app.get("/health", responses=HEALTH, operation_id="health")
    async def ready() -> Response:
        """Whether requests are taken; if not, what the server is doing."""
        return JSONResponse(service.state(), 200 if service.stage == "ready" else 503)

    @app.get("/metrics", responses=METRICS, response_class=Response)
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        for worker in service.workers():
            service.metrics.limits(worker)
        service.metrics.workers(service.host.workers())
        body, content_type = service.metrics.expose(
            request.headers.get("accept"), tenants=bool(request.state.tenant)
        )
        return Response(body, media_type=content_type)

    @app.get("/version", responses=ERRORS)
    async def version() -> dict[str, str]:
        """The version of twinphase."""
        return {"version": __version__}


def _add_problems(app: FastAPI, service: Service) -> None:
    def refuse(request: Request, error: TwinphaseError | Problem, reason: str) -> Response:
        reply = problems.reply(error, request.state.shape)
        service.metrics.refused(reply.status_code, reason)
        return reply

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        known: set[str] = set()
        if request.state.shape is problems.openai_shape:
            field = request.scope["route"].body_field
            known = set(getattr(field and field.field_info.annotation, "model_fields", ()))
        problem = problems.invalid_fields(error.errors(), error.body, known)
        return refuse(request, problem, "InvalidRequestError")

    @app.exception_handler(HTTPException)
    async def http_problem(request: Request, error: HTTPException) -> Response:
        status = error.status_code
        message = (
            UNREADABLE
            if error.detail == "There was an error parsing the body"
            else str(error.detail)
        )
        if status == 404:
            scope = request.scope
            shorter = {**scope, "path": scope["path"].removesuffix("/")}
            if shorter != scope and any(
                route.matches(shorter)[0] is not Match.NONE for route in app.routes
            ):
                # A relative link cannot lead to another host.
                name = scope["raw_path"].decode("latin-1").rstrip("/").rpartition("/")[2]
                return Response(status_code=307, headers={"Location": f"../{name}"})
            message = problems.not_found(request.method, request.url.path)
        reply = refuse(request, Problem(message, status), "HTTPException")
        reply.headers.update(error.headers or {})
        if status == 405:
            allowed = (
                method
                for method in METHODS
                if any(
                    route.matches({**request.scope, "method": method})[0] is Match.FULL
                    for route in app.routes
                )
            )
            reply.headers["Allow"] = ", ".join(allowed)
        return reply

    @app.exception_handler(TwinphaseError)
    async def refused(request: Request, error: TwinphaseError) -> Response:
        return refuse(request, error, type(error).__name__)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # The gate logs the exception.
        return refuse(request, FAILED, "Exception")


class Gate:
    """The entrance for every request: records its arrival, checks its key, and limits its body."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self.app = app
        self._service = service
        self._doors = Doors(service.config)
        self._num_bytes = 0  # Total bytes of bodies in transfer.
        self._serve: Any = self._check
        origins = service.config.allowed_origins
        if origins:  # It wraps everything, so that a page can read refusals too.
            self._serve = CORSMiddleware(self._check, origins, ["*"], ["*"], expose_headers=EXPOSED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {}).update(
            tenant="", abort=_abort(send), shape=shape_of(scope["path"])
        )
        await self._serve(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        status = 499  # nginx logs a client that left before its reply with this status.
        began = perf_counter()

        async def watched(message: Any) -> None:
            nonlocal started, status
            started = True
            status = message.get("status", status)
            if message["type"] == "http.response.start":
                message["headers"] = [*_with_ignored(message.get("headers", ()), state), NOSNIFF]
            await send(message)

        headers = dict(scope["headers"])
        state = scope["state"]
        path = scope["path"]
        get = (
            {"method": "GET"} if scope["method"] == "HEAD" else {}
        )  # uvicorn does not send the body to the client.
        state["send"] = watched
        try:
            _check_heads(scope)
            host, origin = (headers.get(name) for name in (b"host", b"origin"))
            self._doors.check(host and host.decode("latin-1"), origin and origin.decode("latin-1"))
            authorization = headers.get(b"authorization") or b"Bearer " + headers.get(
                b"x-api-key", b""
            )
            is_open = OPEN_PATHS.fullmatch(path) is not None or scope["method"] == "OPTIONS"
            # Metrics of tenants need a key, and a wrong key must be reported.
            names_key = path == "/metrics" and authorization != b"Bearer "
            if not is_open or names_key:
                state["tenant"] = self._service.access.tenant(authorization.decode("latin-1"))
            # Some clients omit the content type, and curl defaults to a form. Browsers let a page
            # send forms without a preflight request.
            left_out = headers.get(b"content-type", FORM) == FORM or path.startswith("/api/")
            if left_out and b"origin" not in headers:
                kept = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
                scope["headers"] = [*kept, (b"content-type", b"application/json")]
            body = await self._read(headers, receive)
            if body is not None:
                # The time that the client takes to send its request is not the server's.
                state["arrival"] = perf_counter()
                await self.app({**scope, **get}, _replayed(body, receive), watched)
        except TwinphaseError as error:
            status = error.http_status
            if isinstance(error, AuthenticationError):
                _log_refused_key(scope, error)
            self._service.metrics.refused(status, type(error).__name__)
            await problems.reply(error, state["shape"])(scope, receive, watched)
        except Exception:
            LOG.exception("A request failed")
            if not started:
                status = 500
                await problems.reply(FAILED, state["shape"])(scope, receive, watched)
        finally:
            _log_request(scope, status, perf_counter() - began)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The body; None if the client left.

        A body that is too long or arrives too slowly is refused.
        """
        limit = self._service.config.max_body_bytes
        error = TooLargeError(
            f"The body is longer than {limit} bytes.", "Send less in one request."
        )
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > limit:
            raise error
        body = bytearray()

        async def read() -> bytes | None:
            size = 0
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                piece = message.get("body", b"")
                size += len(piece)
                if self._num_bytes > TOTAL_BODY_LIMITS * limit:
                    raise self._service.admission.overloaded(
                        None, "too many requests are being sent at once"
                    )
                if size > limit:
                    raise error
                body.extend(piece)
                self._num_bytes += len(piece)
                if not message.get("more_body", False):
                    return bytes(body)

        try:
            return await asyncio.wait_for(read(), self._service.config.body_timeout)
        except TimeoutError:
            raise SlowBodyError(
                "The body came too slowly.", "Send it again, or raise --body-timeout."
            ) from None
        finally:
            self._num_bytes -= len(body)


async def _check_query(request: Request) -> None:
    """Refuse query parameters that a route does not use, except those that clients always send.

    Routes that are only polled accept any parameter.
    """
    dependant = request.scope["route"].dependant
    known = {field.alias for field in dependant.query_params}
    unknown = [name for name in request.query_params if name not in known]
    is_open = OPEN_PATHS.fullmatch(request.url.path) is not None
    request.state.ignored = [name for name in unknown if is_open or name in IGNORED_PARAMETERS]
    for name in unknown:
        if name not in request.state.ignored:
            raise InvalidRequestError(
                f"The query parameter {ascii(name[:MAX_LOGGED_CHARACTERS])} is not supported here.",
                "Leave it out, or send it in the body if it is a field of the request.",
            )


def _with_ignored(
    headers: Iterable[tuple[bytes, bytes]], state: dict[str, Any]
) -> Iterator[tuple[bytes, bytes]]:
    """The response headers, with one that names ignored query parameters."""
    names = [quote(name[:MAX_LOGGED_CHARACTERS]).encode() for name in state.get("ignored", ())]
    for name, value in headers:
        if name == b"x-ignored-fields" and names:
            value = b", ".join([value, *names])
            names = []
        yield name, value
    if names:
        yield b"x-ignored-fields", b", ".join(names)


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    """Log a request; polled routes are logged at the level debug."""
    polled = POLLED_PATHS.fullmatch(scope["path"]) is not None and status < 400
    facts = _facts(scope)
    fields = {"event": "request", **facts, "tenant": scope["state"]["tenant"], "status": status}
    LOG.log(
        logging.DEBUG if polled else logging.INFO,
        "%s %s %d in %s ms",
        facts["method"],
        facts["path"],
        status,
        f"{1e3 * seconds:,.0f}",
        extra={"fields": {**fields, "duration_ms": round(1e3 * seconds, 3)}},
    )


def _log_refused_key(scope: Scope, error: AuthenticationError) -> None:
    """Log a refused key for audits, without the key itself."""
    facts = _facts(scope)
    LOG.warning(
        "Refused %s %s from %s: %s",
        facts["method"],
        facts["path"],
        facts["client"],
        error.cause,
        extra={"fields": {"event": "refused_key", **facts}},
    )


def _facts(scope: Scope) -> dict[str, str]:
    """The fields that identify a request in the log; a path may contain line breaks."""
    address = scope.get("client")
    return {
        "method": scope["method"],
        "path": ascii(scope["path"][:MAX_LOGGED_CHARACTERS])[1:-1],
        "client": address[0] if address else "unknown",
    }


def _check_heads(scope: Scope) -> None:
    """Refuse headers that a proxy in front of this server might interpret differently."""
    names = [name for name, _ in scope["headers"]]
    if scope["http_version"] == "1.1" and names.count(b"host") != 1:
        raise InvalidRequestError(
            f"The request has {names.count(b'host')} `Host` headers.", "Send one."
        )
    if names.count(b"authorization") > 1:
        raise InvalidRequestError("The request has several `Authorization` headers.", "Send one.")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return the body once, then the connection's own messages."""
    given = False

    async def replay() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _abort(send: Send) -> Callable[[], None]:
    """A function that cuts the connection without a flush; ASGI has none, so it uses uvicorn's."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    abort: Callable[[], None] = getattr(transport, "abort", lambda: None)
    return abort
