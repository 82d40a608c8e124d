"""One request as a client saw it: times on one monotonic clock, and latencies.

All times are seconds of `time.perf_counter`. Tokens are counted by the target, never by stream
events. Not for sending (`client.py`, `targets/`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinphase.phases import latency


@dataclass
class Observation:
    """One request and its outcome.

    `token_times` has fewer entries than there are tokens where a target sends several tokens in one
    piece, or nothing for a token without text. Counts are the target's own, None if it gave none.
    """

    request_id: str  # the target's own where it gave one
    # when it was to be sent: latencies count from here, so that a late client hides nothing
    intended: float
    sent: float  # when its bytes were handed over
    token_times: list[float] = field(
        default_factory=list
    )  # of each piece with a token, also of a token without text
    ended: float = 0.0  # when the reply was complete, or broke
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None  # reasoning tokens included
    status: int = 0  # of HTTP; 0 if nothing came; 200 for targets in this process
    error: str = ""  # what went wrong; failures are counted apart and have no latencies
    finish_reason: str = ""  # as the target named it
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    claims: dict[str, Any] = field(default_factory=dict)  # The target's own latencies, as received.
    finished: float | None = (
        None  # When the target reported the end: with the last token or after it.
    )
    first_answer: float | None = (
        None  # when the first piece of the answer came, of an output that reasons first
    )
    num_reasoning_tokens: int | None = None
    connected_late: bool = (
        False  # it waited for a connection asked for in time: not the client's lag
    )

    @property
    def succeeded(self) -> bool:
        return not self.error and bool(self.token_times)

    @property
    def lag(self) -> float:
        return self.sent - self.intended

    @property
    def ttft(self) -> float | None:
        """Client TTFT: the first piece of output here - intended send.

        The server's own has no network in it.
        """
        return latency.ttft(self.intended, self.token_times[0]) if self.token_times else None

    @property
    def ttfo(self) -> float | None:
        """Time to the first piece of the answer after reasoning; None without reasoning."""
        return None if self.first_answer is None else self.first_answer - self.intended

    @property
    def last_token(self) -> float | None:
        """When the last token came.

        With fewer pieces than tokens, the last tokens may have had no text: the target sent nothing
        for them until it reported the end, and that time counts.
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
        """Seconds per token after the first.

        It is not known where there are fewer pieces than tokens and the target reported no end.
        """
        number = self.num_output_tokens
        if self.last_token is None or number is None:
            return None
        if self.finished is None and number > len(self.token_times):
            return None
        return latency.tpot(self.token_times[0], self.last_token, number)

    @property
    def itl(self) -> list[float]:
        """Gaps between consecutive pieces of output, never divided by the tokens in them."""
        return latency.itl(self.token_times)
