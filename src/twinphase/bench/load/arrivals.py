"""When requests are sent: open loop (whatever becomes of the others) or closed (when another has ended).

An open loop is what independent users are, and the only one in which a slow server cannot slow its own load down. Not
for what is sent (`workload.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.bench.load.workload import LoadRequest
from twinphase.errors import InvalidRequestError

__all__ = ["ALL_AT_ONCE", "Arrivals", "Closed", "Constant", "Poisson", "Traced"]

ALL_AT_ONCE = "open loop, all at once"


@dataclass(frozen=True)
class Poisson:
    """Independent users: exponential gaps of mean 1 / rate.

    Attributes:
        rate: requests a second; infinite: all at once.
        seed: of the gaps.
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def offsets(self, requests: Sequence[LoadRequest]) -> tuple[float, ...]:
        """Seconds after the beginning; the first request comes at 0."""
        draw, found, now = random.Random(f"poisson/{self.seed}"), [], 0.0
        for _ in requests:
            found.append(now)
            now += draw.expovariate(self.rate)
        return tuple(found)

    def __str__(self) -> str:
        return ALL_AT_ONCE if math.isinf(self.rate) else f"open loop, Poisson at {self.rate:g} req/s"


@dataclass(frozen=True)
class Constant:
    """Even gaps of 1 / rate; none at all where it is infinite."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def offsets(self, requests: Sequence[LoadRequest]) -> tuple[float, ...]:
        """Seconds after the beginning."""
        return tuple(number / self.rate for number in range(len(requests)))

    def __str__(self) -> str:
        return ALL_AT_ONCE if math.isinf(self.rate) else f"open loop, every {1 / self.rate:g} s ({self.rate:g} req/s)"


@dataclass(frozen=True)
class Traced:
    """As the workload's timestamps say."""

    def offsets(self, requests: Sequence[LoadRequest]) -> tuple[float, ...]:
        """Seconds after the beginning.

        Raises:
            InvalidRequestError: the workload has no times.
        """
        times = [request.timestamp for request in requests]
        known = [time for time in times if time is not None]
        if len(known) < len(times):
            raise InvalidRequestError(
                "The workload has no timestamps.", "Give --request-rate or --max-concurrency, or a trace with times."
            )
        return tuple(known)

    def __str__(self) -> str:
        return "open loop, at the times of the trace"


@dataclass(frozen=True)
class Closed:
    """So many users who send again as soon as they are answered.

    Its latencies are those of a load that waits for the server: the number of requests in flight never grows. Between
    two of a user lies the opening of a connection, which is told in the report.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InvalidRequestError(f"--max-concurrency is {self.concurrency}.", "Give at least 1.")

    def offsets(self, requests: Sequence[LoadRequest]) -> None:
        """None: each is sent when another has ended."""
        return None

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} at once"


Arrivals = Poisson | Constant | Traced | Closed


def _check_rate(rate: float) -> None:
    if not rate > 0:
        raise InvalidRequestError(
            f"--request-rate is {rate}.", "Give requests a second, above 0, or inf for all of them at once."
        )
