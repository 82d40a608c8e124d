"""Errors as clients receive them: a status and a dialect's shape, without internals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from twinphase.errors import EngineUnavailableError, TwinphaseError

RequestT = TypeVar("RequestT", bound=BaseModel)

# Names of types in pydantic's error paths; no field has such a name.
TRIED = re.compile(
    r"(str|int|float|bool|none|constrained-.*|[A-Z][A-Za-z]*|[\w-]*\[.*)$", re.DOTALL
)
MAX_PATH_CHARACTERS = 100  # The client chooses the field's name, so it may be long.
# Fields of other engines and routes, and their names in this API.
ANSWER_LIMITS = ("max_tokens", "max_output_tokens")
ALIASES = {
    "repeat_penalty": ("repetition_penalty",),
    "num_predict": ANSWER_LIMITS,
    "n_predict": ANSWER_LIMITS,
    "max_tokens": ANSWER_LIMITS,
    "max_completion_tokens": ANSWER_LIMITS,
    "max_output_tokens": ANSWER_LIMITS,
    "messages": ("input",),
    "input": ("messages", "prompt"),
    "reasoning_effort": ("reasoning.effort",),
    "regex": ("structured_outputs.regex",),
    "grammar": ("structured_outputs.grammar",),
    "json_schema": ("response_format", "text.format"),
    "response_format": ("text.format",),
    "guided_decoding": ("structured_outputs",),
}
# OpenAI's error type for each status; other 4xx are "invalid_request_error", other 5xx
# "internal_server_error".
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CODES = {401: "invalid_api_key", 408: "request_timeout", 503: "unavailable", 504: "request_timeout"}
# The client gets this error for a failure that the log describes.
FAILED = TwinphaseError("The server failed on this request.", "Other requests are not affected.")


class TooLargeError(TwinphaseError):
    """The request body is too long."""

    http_status = 413


class SlowBodyError(TwinphaseError):
    """The request body did not arrive in time."""

    http_status = 408


class RequestTimeoutError(TwinphaseError):
    """The request exceeded the server's time limit."""

    http_status = 504


@dataclass(frozen=True)
class Problem:
    """An error's message; `param` is the field and `code` OpenAI's code, if there is one."""

    message: str
    status: int
    param: str | None = None
    code: str | None = None


Shape = Callable[[Problem], dict[str, Any]]  # Makes the body of an error in a dialect.


def openai_shape(problem: Problem) -> dict[str, Any]:
    kind = TYPES.get(
        problem.status, "invalid_request_error" if problem.status < 500 else "internal_server_error"
    )
    return {
        "error": {
            "message": problem.message,
            "type": kind,
            "param": problem.param,
            "code": problem.code,
        }
    }


def body(error: TwinphaseError | Problem, shape: Shape) -> bytes:
    """The error body in ASCII, because a message may quote text that is not valid UTF-8."""
    if isinstance(error, TwinphaseError):
        status = error.http_status
        error = Problem(
            str(error), status, getattr(error, "param", None), error.code or CODES.get(status)
        )
    return json.dumps(shape(error)).encode("ascii")


def validated(kind: type[RequestT], fields: Mapping[str, Any]) -> RequestT:
    """Validate a dialect's request, given as OpenAI's fields; errors name OpenAI's fields."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(
            [{**found, "loc": ("body", *found["loc"])} for found in error.errors()]
        ) from None


def reply(error: TwinphaseError | Problem, shape: Shape) -> Response:
    """The reply to a request that failed."""
    if isinstance(error, TwinphaseError):
        return Response(body(error, shape), error.http_status, headers(error), "application/json")
    return Response(body(error, shape), error.status, media_type="application/json")


def headers(error: TwinphaseError) -> dict[str, str]:
    if isinstance(error, EngineUnavailableError):
        return {"Retry-After": str(getattr(error, "retry_after", 1))}
    if (
        isinstance(error, RequestTimeoutError) or error.http_status == 409
    ):  # OpenAI's clients would retry it.
        return {"X-Should-Retry": "false"}
    if isinstance(error, (SlowBodyError, TooLargeError)):  # The rest of the body may still arrive.
        return {"Connection": "close"}
    return {"WWW-Authenticate": "Bearer"} if error.http_status == 401 else {}


def invalid_fields(errors: Sequence[Any], given: Any, known: Set[str]) -> Problem:
    """Convert pydantic's errors in `given` to sentences; hints name `known` fields."""
    sentences = []
    first = None
    for error in errors[:3]:
        kind = error["type"]
        message = error["msg"].removeprefix("Value error, ")
        path = _path(error, given)
        where = ".".join(path)[:MAX_PATH_CHARACTERS]
        if kind == "json_invalid":  # The path of this error is a position in the text.
            sentences.append(
                f"The body is not valid JSON: {error.get('ctx', {}).get('error', message)}."
            )
            continue
        first = first or (path[0][:MAX_PATH_CHARACTERS] if path else None)
        if kind in ("extra_forbidden", "none_required"):
            sentences.append(
                f"The field `{where}` is not supported. {_instead(path[-1] if path else '', known)}"
            )
        elif kind == "literal_error":
            sentences.append(
                f"`{where}`: {message.replace('Input should be', 'only this is supported:')}."
            )
        elif not path and kind != "value_error":
            sentences.append(
                "The body is not a JSON object. Send one, with `Content-Type: application/json`."
            )
        else:
            sentences.append(f"`{where}`: {message}." if where else f"{message}.")
    return Problem(" ".join(sentences), 400, first)


def _path(error: Any, given: Any) -> list[str]:
    """The position of an error in the body, without the types and union tags of pydantic's path."""
    path: list[str] = []
    *parts, last = error["loc"][1:] or [""]  # The first element only refers to the body.
    for part in parts:
        if not TRIED.match(str(part)) and (not isinstance(given, dict) or part in given):
            path.append(str(part))
            inside = isinstance(given, dict) or (
                isinstance(given, list) and isinstance(part, int) and part < len(given)
            )
            given = given[part] if inside else None
    unknown = error["type"] == "extra_forbidden"
    sent = not isinstance(given, dict) or last in given
    known = not TRIED.match(str(last)) and (sent or error["type"] == "missing")
    return path + [str(last)] * bool(last != "" and (unknown or known))


def not_found(method: str, path: str) -> str:
    """The message for an unknown route."""
    if path.startswith("/api/"):
        return (
            f"There is no {method} {path[:MAX_PATH_CHARACTERS]} here: the model is chosen when the "
            "server is started."
        )
    if path in ("/chat/completions", "/completions", "/embeddings", "/models"):
        return f"There is no {path} here. Give clients a base_url that ends in /v1."
    return (
        f"There is no {method} {path[:MAX_PATH_CHARACTERS]} here. "
        "GET /openapi.json lists the routes."
    )


def _instead(name: str, known: Set[str]) -> str:
    meant = [other for other in ALIASES.get(name, ()) if other.partition(".")[0] in known]
    meant = meant or get_close_matches(
        name, known - {name}, 1, 0.8
    )  # A nested field may have this name.
    return f"Did you mean `{meant[0]}`?" if meant else "Leave it out."
