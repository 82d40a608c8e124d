"""One request as a client saw it: moments on one monotonic clock, and the latencies computed from them.

All times are seconds of `time.perf_counter`. Tokens are counted by the target, never by stream events. Not for
sending (`client.py`, `targets/`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinphase.phases import latency

__all__ = ["Observation"]


@dataclass
class Observation:
    """What became of one request.

    Attributes:
        request_id: the target's own id where it gave one.
        intended: when it was to be sent: latencies count from here, so that a late client hides nothing.
        sent: when its bytes were handed over; `sent - intended` is the client's lag.
        token_times: when each piece of output with at least one token came, also one whose token has no text. A target
            that sends several tokens in one piece, or nothing for a token without text, has fewer entries than tokens.
        finished: when the target said that the output was complete; None if it did not say so. The last token came no
            later, and with servers that say it with the last token or right behind it, no earlier.
        first_answer: when the first piece of the answer itself came, of an output that reasons first; else None.
        ended: when the reply was complete, or broke.
        num_prompt_tokens, num_cached_tokens, num_output_tokens, num_reasoning_tokens: by the target's own count; None
            if it gave none. Reasoning tokens are output tokens too.
        connected_late: the connection was there only after `intended` though the client asked for it in time: the
            request then waited for the server or the network, not for the client.
        status: of HTTP; 0 if nothing came; 200 for targets in this process.
        error: what went wrong; "" for a request that succeeded. Failures are counted apart and have no latencies.
        finish_reason: as the target named it.
        text, token_ids: the output, where the target gives it.
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
    finished: float | None = None
    first_answer: float | None = None
    num_reasoning_tokens: int | None = None
    connected_late: bool = False

    @property
    def succeeded(self) -> bool:
        return not self.error and bool(self.token_times)

    @property
    def lag(self) -> float:
        """How late the client sent it."""
        return self.sent - self.intended

    @property
    def ttft(self) -> float | None:
        """Client TTFT: the first piece of output here - intended send. The server's own has no network in it."""
        return latency.ttft(self.intended, self.token_times)

    @property
    def ttfo(self) -> float | None:
        """Time to the first piece of the answer itself, of an output that reasons first; None of others."""
        return None if self.first_answer is None else self.first_answer - self.intended

    @property
    def last_token(self) -> float | None:
        """When the last token came.

        With fewer pieces than tokens, the last tokens may have had no text: the target sent nothing for them until it
        said that it was done, and that moment counts.
        """
        if not self.token_times:
            return None
        if self.finished is None or (self.num_output_tokens or 0) <= len(self.token_times):
            return self.token_times[-1]
        return max(self.token_times[-1], self.finished)

    @property
    def e2e(self) -> float | None:
        return None if self.last_token is None else latency.e2e(self.intended, self.last_token)

    @property
    def tpot(self) -> float | None:
        """None below two tokens, without the target's count, and where the last token's moment is not known.

        It is not known where there are fewer pieces than tokens and nothing said when the output was complete.
        """
        number = self.num_output_tokens
        if self.last_token is None or number is None:
            return None
        if self.finished is None and number > len(self.token_times):
            return None
        return latency.tpot(self.token_times[0], self.last_token, number)

    @property
    def itl(self) -> list[float]:
        """Each gap between consecutive pieces of output, never divided by the tokens in them."""
        return latency.itl(self.token_times)
