"""Errors as OpenAI's clients read them: one JSON shape, the right status, nothing of the server's inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from twinphase.errors import EngineDeadError, EngineUnavailableError, OverloadedError, TwinphaseError

__all__ = ["RequestTimeoutError", "TooLargeError", "TYPES", "body", "headers", "invalid_fields", "problem"]

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class TooLargeError(TwinphaseError):
    """A body that is too long."""

    http_status = 413


class RequestTimeoutError(TwinphaseError):
    """A request that took longer than the server allows."""

    http_status = 504


def problem(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The object under "error"."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def body(error: TwinphaseError | dict[str, Any]) -> bytes:
    """The whole body, in ASCII: a message may quote what no UTF-8 can carry."""
    if isinstance(error, TwinphaseError):
        error = problem(str(error), error.http_status, param=getattr(error, "param", None), code=_code(error))
    return json.dumps({"error": error}).encode("ascii")


def headers(error: TwinphaseError) -> dict[str, str]:
    """Headers that go with a refusal."""
    if isinstance(error, EngineUnavailableError):
        return {"Retry-After": str(getattr(error, "retry_after", 1))}
    return {"WWW-Authenticate": "Bearer"} if error.http_status == 401 else {}


def invalid_fields(errors: Sequence[Any]) -> dict[str, Any]:
    """What pydantic found, as one sentence for the first few fields."""
    sentences, first = [], None
    for error in errors[:3]:
        where = ".".join(str(part) for part in error["loc"] if part != "body")
        first = first or where or None
        if error["type"] == "extra_forbidden":
            sentences.append(f"The field `{where}` is not supported. Leave it out.")
        elif error["type"] == "json_invalid":
            sentences.append(f"The body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}.")
        elif error["type"] == "literal_error":
            sentences.append(f"`{where}`: {error['msg'].replace('Input should be', 'only this is supported:')}.")
        else:
            sentences.append(f"`{where}`: {error['msg']}." if where else f"{error['msg']}.")
    return problem(" ".join(sentences), 400, param=first)


def _code(error: TwinphaseError) -> str | None:
    if isinstance(error, OverloadedError):
        return "overloaded"
    if isinstance(error, EngineDeadError):
        return "engine_restarted"
    return {401: "invalid_api_key", 503: "unavailable", 504: "request_timeout"}.get(error.http_status)
