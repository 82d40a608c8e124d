"""The server's configuration: where it listens, who may ask, and every limit that keeps it up.

Not for the engine's settings (`twinphase.config`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from twinphase.errors import InvalidRequestError
from twinphase.request import SamplingParams

__all__ = ["ServerConfig"]

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


@dataclass(frozen=True)
class ServerConfig:
    """How a server serves; the field names are vLLM's where it has them.

    Attributes:
        host: address to listen on; only this machine unless told otherwise.
        port: 0 lets the system choose.
        served_model_name: names the model answers to; the name it was loaded by if empty.
        api_keys: who may ask; everybody if empty. Each key is a tenant: cached prefixes are not shared between them.
        allowed_origins: of browser pages, for CORS; none if empty.
        max_body_bytes: of a request.
        max_n: answers to one prompt.
        max_prompts: prompts of one request.
        max_queued_requests: requests beyond those that run; more are answered with 429.
        max_queued_tokens: prompt tokens that wait to be read, over all requests; more are answered with 429. A single
            request on an empty queue is always let in.
        request_timeout: seconds from a request's arrival to its last byte.
        slow_reader_timeout: seconds that a client may leave its answer unread once the buffers are full.
        body_timeout: seconds for a client to send its request.
        stall_timeout: seconds without a step, with work to do, after which the engine is unhealthy and started again.
        drain_timeout: seconds that running requests have to finish after SIGTERM.
        kept_timelines: finished requests whose timelines can be asked for.
        tool_prompt: describe tools in a system message where the model's template has no place for them.
        override_generation_config: sampling values for requests that do not give them, by vLLM's names; OpenAI's
            otherwise: temperature 1, top_p 1.
        log_stats: write a line every ten seconds in which there was work.
        vllm_metrics: give metrics under vLLM's names too.
        otlp_endpoint: where to send OpenTelemetry traces, if anywhere.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_n: int = 16
    max_prompts: int = 256
    max_queued_requests: int = 256
    max_queued_tokens: int = 262_144
    request_timeout: float = 600.0
    slow_reader_timeout: float = 30.0
    body_timeout: float = 30.0
    stall_timeout: float = 60.0
    drain_timeout: float = 60.0
    kept_timelines: int = 1024
    tool_prompt: bool = True
    override_generation_config: dict[str, Any] | None = None
    log_stats: bool = True
    vllm_metrics: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError(f"port is {self.port}.", "Use 0 to 65535.")
        for field in fields(self):
            value = getattr(self, field.name)
            limit = field.name.startswith(("max_", "kept_")) or field.name.endswith("_timeout")
            if limit and not value > 0:
                raise InvalidRequestError(f"{field.name} is {value!r}.", "Use a value above 0.")
        for name, value in (self.override_generation_config or {}).items():
            if name not in SAMPLING_DEFAULTS or isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidRequestError(
                    f"override_generation_config has {name}: {value!r}.",
                    f"Use numbers for {', '.join(SAMPLING_DEFAULTS)}.",
                )
        SamplingParams(**(self.override_generation_config or {}))  # refuses what is out of range
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise InvalidRequestError("An API key is empty or not plain ASCII.", "Use letters, digits and - _ .")
