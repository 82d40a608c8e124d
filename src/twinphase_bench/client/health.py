"""Checks whether a load's client kept up with the load.

If it did not, the run is void, because its figures measure the client.

- *Send lag*, sent - intended, is part of every latency. A request is late above a tenth of the
  median TTFT (1 ms if that is less); void if more than one request and more than 5 % of them are
  late. A request that waited for a connection which it had asked for in time is counted apart: that
  is the server's lateness (or the network's).
- *Loop lag*, how late a heartbeat of 10 ms comes, is how late a token may have been stamped. A
  stamp counts with the lag of the heartbeat in whose interval it was taken, so that a lag while
  nothing arrives does not matter. A stamp is late above half the median gap between tokens (2 ms if
  that is less); void if more than 5 % of the stamps are late.
- *CPU* of the client's thread: void above 0.9 of a core, where requests queue inside the client. -
Requests that were not sent, or got no connection because this machine allows no more: void if there
is one.

Shares of late requests, not a 99th percentile, which of fewer than 100 is the highest: one hiccup
voids nothing.

Not for what a load is (`load/run.py`).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

HEARTBEAT_SECONDS = 0.01
MIN_SEND_LAG_SECONDS = 0.001
# The event loop's own timer takes 1 ms of this.
MIN_LOOP_LAG_SECONDS = 0.002
MAX_SEND_LAG_PER_TTFT = 0.1
MAX_LOOP_LAG_PER_GAP = 0.5
MAX_LATE_SHARE = 0.05
MAX_CORE_SHARE = 0.9
Beat = tuple[float, float]  # The times when a heartbeat was due and when it came.


@dataclass
class ClientHealth:
    """Measurements of how well the client kept up."""

    send_lags: list[float] = field(
        default_factory=list
    )  # Send lags in seconds of requests whose connection was open in time.
    loop_lags: list[float] = field(
        default_factory=list
    )  # Upper bounds in seconds of the delay of each token's timestamp.
    cpu: float = 0.0  # Cores used by the client's thread.
    not_sent: int = 0  # Number of requests that were due when too many were in flight.
    connected_late: int = (
        0  # Number of requests whose connection opened too late although it was requested in time.
    )
    refused: dict[str, int] = field(
        default_factory=dict
    )  # Requests for which this machine allowed no connection, by reason.

    def faults(self, median_ttft: float, median_gap: float) -> tuple[str, ...]:
        """The reasons why the run is void; empty if it is valid.

        Medians are in seconds; NaN if there are none.
        """
        found = []
        # If the median is NaN, the bound is the first value.
        bound = max(MIN_SEND_LAG_SECONDS, MAX_SEND_LAG_PER_TTFT * median_ttft)
        if late := _too_many(self.send_lags, bound):
            found.append(
                f"requests were sent late: {late} by more than {1e3 * bound:.1f} ms after their "
                "moment"
            )
        bound = max(MIN_LOOP_LAG_SECONDS, MAX_LOOP_LAG_PER_GAP * median_gap)
        if late := _too_many(self.loop_lags, bound):
            found.append(
                f"tokens were stamped late: {late} when the loop's lag was more than "
                f"{1e3 * bound:.1f} ms"
            )
        if self.cpu > MAX_CORE_SHARE:
            found.append(f"the client used {self.cpu:.2f} of a core, above {MAX_CORE_SHARE}")
        if self.not_sent:
            found.append(f"{self.not_sent} requests were not sent: too many were in flight")
        for reason, number in self.refused.items():
            found.append(f"{number} requests got no connection from this machine: {reason}")
        return tuple(found)


def _too_many(lags: Sequence[float], bound: float) -> str:
    """The number of lags above the bound, in words, if there are too many; otherwise empty."""
    late = sum(lag > bound for lag in lags)
    if not late or (late < len(lags) and late <= max(1.0, MAX_LATE_SHARE * len(lags))):
        return ""
    return f"{late} of {len(lags)} (the latest {1e3 * max(lags):.1f} ms)"


async def watch_loop(beats: list[Beat]) -> None:
    """Record the due time and the actual time of each heartbeat, until cancelled."""
    while True:
        due = time.perf_counter() + HEARTBEAT_SECONDS
        await asyncio.sleep(HEARTBEAT_SECONDS)
        beats.append((due, time.perf_counter()))


def lags_of_stamps(beats: Sequence[Beat], stamps: Sequence[float]) -> list[float]:
    """The maximum delay of each timestamp, in seconds.

    A blocked loop misses heartbeats, and data that arrived in the meantime waited only for a part
    of that time: timestamps in a heartbeat's interval get its lag, then its lag minus one
    heartbeat, and so on. Stamps before the first heartbeat count with the first, those after the
    last with the last.
    """
    found: list[float] = []
    dues = [due for due, _ in beats]
    taken = [0] * len(beats)
    for stamp in sorted(stamps) if beats else ():
        at = max(0, bisect_right(dues, stamp) - 1)
        due, came = beats[at]
        lag = max(0.0, came - due)
        swallowed = 1 + int(lag / HEARTBEAT_SECONDS)
        found.append(lag - (taken[at] % swallowed) * HEARTBEAT_SECONDS)
        taken[at] += 1
    return found
