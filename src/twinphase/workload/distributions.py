"""When requests are sent: an open loop sends whatever becomes of the others, a closed loop when another has ended.

Independent users are an open loop, and only there a slow server cannot slow its own load down.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.errors import InvalidRequestError
from twinphase_bench.load.workload import LoadRequest

ALL_AT_ONCE = "open loop, all at once"


@dataclass(frozen=True)
class Poisson:
    """Independent users: exponential gaps of mean 1 / rate."""

    rate: float  # requests per second; infinite sends all at once
    seed: int = 0

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def offsets(self, requests: Sequence[LoadRequest]) -> tuple[float, ...]:
        """Seconds after the start; the first request comes at 0."""
        draw = random.Random(f"poisson/{self.seed}")
        found = []
        now = 0.0
        for _ in requests:
            found.append(now)
            now += draw.expovariate(self.rate)
        return tuple(found)

    def __str__(self) -> str:
        return (
            ALL_AT_ONCE if math.isinf(self.rate) else f"open loop, Poisson at {self.rate:g} req/s"
        )


@dataclass(frozen=True)
class Constant:
    """Even gaps of 1 / rate; an infinite rate sends all at once."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def offsets(self, requests: Sequence[LoadRequest]) -> tuple[float, ...]:
        return tuple(number / self.rate for number in range(len(requests)))

    def __str__(self) -> str:
        return (
            ALL_AT_ONCE
            if math.isinf(self.rate)
            else f"open loop, every {1 / self.rate:g} s ({self.rate:g} req/s)"
        )


@dataclass(frozen=True)
class Traced:
    """An open loop at the workload's own timestamps."""

    def offsets(self, requests: Sequence[LoadRequest]) -> tuple[float, ...]:
        """Seconds after the start.

        Raises:
            InvalidRequestError: the workload has no timestamps.
        """
        times = [request.timestamp for request in requests if request.timestamp is not None]
        if len(times) < len(requests):
            raise InvalidRequestError(
                "The workload has no timestamps.",
                "Give --request-rate or --max-concurrency, or a trace with times.",
            )
        return tuple(times)

    def __str__(self) -> str:
        return "open loop, at the times of the trace"


@dataclass(frozen=True)
class Closed:
    """A fixed number of users, each of whom sends again as soon as it is answered.

    The number of requests in flight never grows, so the latencies are those of a load that waits
    for the server. Each user opens a new connection between two requests; the report says how long
    that takes.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InvalidRequestError(
                f"--max-concurrency is {self.concurrency}.", "Give at least 1."
            )

    def offsets(self, requests: Sequence[LoadRequest]) -> None:
        """None: each request is sent when another has ended."""
        return None

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} at once"


Arrivals = Poisson | Constant | Traced | Closed


def _check_rate(rate: float) -> None:
    if not rate > 0:
        raise InvalidRequestError(
            f"--request-rate is {rate}.",
            "Give requests per second above 0, or inf to send all of them at once.",
        )
