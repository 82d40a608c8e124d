"""One request as a client saw it: times on one monotonic clock, and latencies.

All times are seconds of `time.perf_counter`. The target counts the tokens; events of a stream are
never counted instead. `client.py` and `targets/` send requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinphase.phases import latency


@dataclass
class Observation:
    """One request and its outcome.

    `token_times` has fewer entries than tokens if the target sends several tokens in one piece, or
    none for a token without text. Counts are reported by the target; None if it reports none.
    """

    request_id: str  # Id chosen by the target, if there is one.
    # Scheduled send time; latencies count from here, so that a late client hides no delay.
    intended: float
    sent: float  # Time when the request's bytes were written.
    token_times: list[float] = field(
        default_factory=list
    )  # Arrival times of each piece with a token, even of a token without text.
    ended: float = 0.0  # Time when the reply was complete, or broke off.
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None  # Includes reasoning tokens.
    status: int = 0  # HTTP status; 0 without a reply, 200 for targets in this process.
    error: str = ""  # Error message; failures are counted separately and have no latencies.
    finish_reason: str = ""  # Finish reason as the target named it.
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # Latencies reported by the target, as received.
    claims: dict[str, Any] = field(default_factory=dict)
    finished: float | None = (
        None  # Time when the target reported the end: with the last token or after it.
    )
    first_answer: float | None = (
        None  # Arrival of the first piece of the answer, if reasoning comes first.
    )
    num_reasoning_tokens: int | None = None
    connected_late: bool = (
        False  # Whether a timely requested connection came late, which is not the client's fault.
    )

    @property
    def succeeded(self) -> bool:
        return not self.error and bool(self.token_times)

    @property
    def lag(self) -> float:
        return self.sent - self.intended

    @property
    def ttft(self) -> float | None:
        """Client TTFT: arrival of the first piece of output - scheduled send time.

        The server's own TTFT excludes the network.
        """
        return latency.ttft(self.intended, self.token_times[0]) if self.token_times else None

    @property
    def ttfo(self) -> float | None:
        """Time to the first piece of the answer after reasoning; None without reasoning."""
        return None if self.first_answer is None else self.first_answer - self.intended

    @property
    def last_token(self) -> float | None:
        """Time of the last token.

        With fewer pieces than tokens, the last tokens may have had no text, so that the target sent
        nothing until it reported the end; then that time counts.
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

        It is unknown if there are fewer pieces than tokens and the target reported no end.
        """
        number = self.num_output_tokens
        if self.last_token is None or number is None:
            return None
        if self.finished is None and number > len(self.token_times):
            return None
        return latency.tpot(self.token_times[0], self.last_token, number)

    @property
    def itl(self) -> list[float]:
        """Gaps between consecutive pieces of output, never divided by their numbers of tokens."""
        return latency.itl(self.token_times)
