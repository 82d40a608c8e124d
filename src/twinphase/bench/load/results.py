"""The loads in a result file, and who was in flight beside whom. Not for what can be told from it (`diagnosis.py`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from twinphase.bench.client.observation import Observation
from twinphase.bench.report.result import ResultError

__all__ = ["ObservedLoad", "read_loads"]

DEEPEST = 64  # levels of JSON that are searched
LARGEST = 1e15  # of a time or a count; more is a damaged file
LOAD_WANTED = (
    "explain takes the result of a load: `twinphase bench URL --request-rate ...` or `--max-concurrency ...` measures "
    "one."
)


@dataclass(frozen=True)
class ObservedLoad:
    """One load.

    Attributes:
        name: for a reader.
        requests: those that succeeded, by the moment of their intended sending.
        void: why the measurement itself must not be used; empty if it may.
    """

    name: str
    requests: tuple[Observation, ...]
    void: tuple[str, ...] = ()

    @cached_property
    def _moments(self) -> tuple[list[float], list[float], list[float]]:
        """When requests were sent, had their first tokens, and their last ones, each in order of time."""
        columns = zip(*((one.intended, one.token_times[0], one.token_times[-1]) for one in self.requests), strict=True)
        sent, first, last = map(sorted, columns)
        return sent, first, last

    @cached_property
    def _sums(self) -> tuple[list[float], list[float]]:
        _, first, last = self._moments
        return list(accumulate(first, initial=0.0)), list(accumulate(last, initial=0.0))

    def others_before(self, request: Observation) -> int:
        """Requests in flight when that one was sent, and those sent at the same moment, as all of a burst are."""
        sent, _, last = self._moments
        return max(0, bisect_right(sent, request.intended) - 1 - bisect_right(last, request.intended))

    def others_reading(self, begin: float, end: float) -> int:
        """Requests whose prompts were being computed between two moments, and had no first token at the first."""
        sent, first, _ = self._moments
        return bisect_left(sent, end) - bisect_right(first, begin)

    def others_decoding(self, request: Observation) -> float:
        """Mean number of requests that decoded beside that one, over its own decode."""
        start, end = request.token_times[0], request.token_times[-1]
        if end <= start:
            return 0.0
        beside = (self._decoded(end) - self._decoded(start)) / (end - start) - 1
        return max(0.0, beside)  # of rounded sums, nobody may be a little less

    def _decoded(self, moment: float) -> float:
        """Seconds of decode that all requests together had until then."""
        total = 0.0
        for sign, times, sums in zip((1, -1), self._moments[1:], self._sums, strict=True):
            count = bisect_right(times, moment)
            total += sign * (count * moment - sums[count])
        return total


def read_loads(data: Any, what: str = "a result") -> list[ObservedLoad]:
    """The loads in the `data` of a result, wherever in it they are.

    Args:
        data: of the result.
        what: what the file is, for a reader who gave another kind of result.

    Raises:
        ResultError: there is no load with a request that succeeded.
    """
    loads = []
    for number, found in enumerate(_holders(data, 0), start=1):
        requests = [request for entry in found["observations"] if (request := _observation(entry)) is not None]
        if requests:
            void = tuple(map(str, found["void"])) if isinstance(found.get("void"), list) else ()
            requests.sort(key=lambda request: request.intended)
            loads.append(ObservedLoad(_name(found, number), tuple(requests), void))
    if not loads:
        raise ResultError(f"The file is {what}, with no load whose requests succeeded.", LOAD_WANTED)
    return loads


def _holders(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The objects that have observations."""
    if isinstance(value, Mapping) and isinstance(value.get("observations"), list):
        yield value
    elif isinstance(value, (Mapping, list)) and depth < DEEPEST:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _holders(item, depth + 1)


def _name(found: Mapping[str, Any], number: int) -> str:
    rate, concurrency = found.get("rate"), found.get("concurrency")
    if isinstance(rate, (int, float)) and abs(rate) <= LARGEST:
        return f"{rate:g} requests/s"
    return f"{concurrency} at once" if isinstance(concurrency, int) else f"load {number}"


def _observation(entry: Any) -> Observation | None:
    """None for a request that failed, or is not readable as one."""
    try:
        request = msgspec.convert(entry, Observation)
    except (ValueError, OverflowError):  # msgspec's own is a ValueError
        return None
    times = [-LARGEST, request.intended, *request.token_times, LARGEST]
    counts = (request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens)
    ordered = all(before <= after for before, after in pairwise(times))  # no clock goes back, and NaN is refused
    counted = all(count is None or 0 <= count <= LARGEST for count in counts)
    return request if request.succeeded and ordered and counted else None
