"""Every error twinphase raises on purpose, each with the HTTP status and the exit code it maps to.

An error says what was wrong and what to do about it, in one line each. Programming errors stay
ordinary Python exceptions, so that a bug never looks like bad input.
"""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """The kind and text of an error that no user can act on."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class TwinphaseError(Exception):
    """Base of all expected errors.

    Args:
        cause: one line, what was wrong, with the offending name or number.
        fix: one line, what the user can do; may be empty.
    """

    http_status = 500
    exit_code = 1
    code: str | None = None  # OpenAI's word for it, where the status does not tell

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__(f"{cause} {fix}".strip())
        self.cause = cause
        self.fix = fix


class InvalidRequestError(TwinphaseError):
    """A request value that cannot be honoured (sampling values, empty prompt, broken text)."""

    http_status = 400
    exit_code = 2


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested tokens exceed the model's context; the message has the numbers."""

    code = "context_length_exceeded"


class CacheCapacityError(InvalidRequestError):
    """A request that the whole KV cache could not hold; the message carries the numbers."""


class ResultError(TwinphaseError):
    """A file is not a result of this version, or is damaged."""

    exit_code = 2


class RequestNotFoundError(TwinphaseError):
    """No unfinished request of that id."""

    http_status = 404
    exit_code = 2


class EngineUnavailableError(TwinphaseError):
    """The engine cannot take the request now: it is loading, draining or full.

    The request can be sent again.
    """

    http_status = 503


class EngineDeadError(EngineUnavailableError):
    """The engine's loop has ended, and with it what it was computing."""

    code = "engine_restarted"


class OverloadedError(EngineUnavailableError):
    """More waits than the limits allow; nothing was queued. `retry_after` is in seconds."""

    http_status = 429
    code = "rate_limit_exceeded"
    retry_after = 1


class ModelNotFoundError(TwinphaseError):
    """No model under that name or path."""

    http_status = 404
    code = "model_not_found"
    exit_code = 3


class CheckpointError(TwinphaseError):
    """A model file that is damaged, truncated or not what it claims to be."""

    exit_code = 4


class UnsupportedModelError(TwinphaseError):
    """A valid model file with an unsupported architecture or tensor type, which is named."""

    exit_code = 5


class DownloadError(TwinphaseError):
    """A model could not be fetched; what arrived was discarded or is kept for resuming."""

    http_status = 502
    exit_code = 6


class StorageError(TwinphaseError):
    """No disk space, or no right to write, where something has to be written."""

    http_status = 507
    exit_code = 7


class OutOfMemoryError(TwinphaseError):
    """The memory for weights or KV cache cannot be had."""

    http_status = 507
    exit_code = 9


class KVFrameError(TwinphaseError):
    """A foreign KV block: another model, version or instruction-set path, or incomplete."""


class CacheFullError(TwinphaseError):
    """The KV cache has no block left for a request that must make progress."""

    http_status = 503
    exit_code = 8
