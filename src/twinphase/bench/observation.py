"""One request as a client saw it: moments on one monotonic clock, and everything computed from them.

All times are seconds of `time.perf_counter`. Tokens are counted by the target, never by stream events. Not for
sending (`client.py`, `targets/`) nor for statistics (`statistics.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Observation"]


@dataclass
class Observation:
    """What became of one request.

    Attributes:
        request_id: the target's own id where it gave one.
        intended: when it was to be sent: latencies count from here, so that a late client hides nothing.
        sent: when its bytes were handed over; `sent - intended` is the client's lag.
        token_times: when each piece of output with at least one token came. A target that sends several tokens in
            one piece has fewer entries than tokens.
        ended: when the reply was complete, or broke.
        num_prompt_tokens, num_cached_tokens, num_output_tokens: by the target's own count; None if it gave none.
        status: of HTTP; 0 if nothing came; 200 for targets in this process.
        error: what went wrong; "" for a request that succeeded. Failures are counted apart and have no latencies.
        finish_reason: as the target named it.
        text: the output, where the target gives text.
        token_ids: the output, where the target gives ids.
        claims: what the target itself said of its time, as it came (llama.cpp `timings`, Ollama durations, ...).
    """

    request_id: str
    intended: float
    sent: float
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    status: int = 0
    error: str = ""
    finish_reason: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    claims: dict[str, Any] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Whether it has latencies."""
        return not self.error and bool(self.token_times)

    @property
    def lag(self) -> float:
        """How late the client sent it: sent - intended."""
        return self.sent - self.intended

    @property
    def ttft(self) -> float | None:
        """Client TTFT: first piece of output here - intended send. The server's own has no network in it."""
        return self.token_times[0] - self.intended if self.token_times else None

    @property
    def e2e(self) -> float | None:
        """Last piece of output here - intended send."""
        return self.token_times[-1] - self.intended if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """(last token - first token) / (output tokens - 1); None below two tokens or without the target's count."""
        if not self.token_times or self.num_output_tokens is None or self.num_output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Each gap between consecutive pieces of output, never divided by the tokens in them."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]
