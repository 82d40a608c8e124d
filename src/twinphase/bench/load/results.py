"""What a client wrote down of a load, read from a result: when each request was sent, and when its tokens came.

Not for what can be told from it (`client_diagnosis.py`), nor for taking such measurements (bench/).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from twinphase.explain.saved import SavedLedgerError

__all__ = ["ClientRequest", "Load", "read_loads"]

DEEP = 64  # levels of JSON that are searched
LARGEST = 1e15  # of a number that is taken for one; NaN is not
LOAD_WANTED = (
    "Of results, explain takes a load's: `twinphase bench URL --request-rate ...` or `--max-concurrency ...` measures "
    "one."
)


@dataclass(frozen=True)
class ClientRequest:
    """One request as the client saw it; seconds of the client's clock.

    Attributes:
        sent: when it was to be sent.
        times: when each piece of output came, one at least.
        num_prompt: prompt tokens that had to be computed, by the server's count; None is unknown.
        num_output: output tokens, by the server's count; None is unknown.
        ledger: seconds by kind, where the server is ours and said so; empty otherwise.
    """

    sent: float
    times: tuple[float, ...]
    num_prompt: int | None = None
    num_output: int | None = None
    ledger: Mapping[str, float] | None = None

    @property
    def ttft(self) -> float:
        """Client TTFT."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """(last token - first token) / (output tokens - 1), None below two."""
        count = self.num_output if self.num_output is not None else 0
        return (self.times[-1] - self.times[0]) / (count - 1) if count > 1 else None


@dataclass(frozen=True)
class Load:
    """One load.

    Attributes:
        name: for a reader.
        requests: those that succeeded, in the order of their sending.
        void: why the measurement itself is not to be used; empty if it is.
    """

    name: str
    requests: tuple[ClientRequest, ...]
    void: tuple[str, ...] = ()

    @cached_property
    def _moments(self) -> tuple[list[float], list[float], list[float]]:
        """When requests were sent, had their first tokens, and their last ones, each in order of time."""
        requests = self.requests
        columns = zip(*((one.sent, one.times[0], one.times[-1]) for one in requests), strict=True)
        sent, first, last = map(sorted, columns)
        return sent, first, last

    @cached_property
    def _sums(self) -> tuple[list[float], list[float]]:
        _, first, last = self._moments
        return list(accumulate(first, initial=0.0)), list(accumulate(last, initial=0.0))

    def others_before(self, request: ClientRequest) -> int:
        """Requests in flight when that one was sent; those sent at the same moment, as all of a burst are, too."""
        sent, _, last = self._moments
        return max(0, bisect_right(sent, request.sent) - 1 - bisect_right(last, request.sent))

    def others_reading(self, begin: float, end: float) -> int:
        """Requests whose prompts were being read between two moments; one that had its first token by then is none."""
        sent, first, _ = self._moments
        return bisect_left(sent, end) - bisect_right(first, begin)

    def others_decoding(self, request: ClientRequest) -> float:
        """Requests that decoded beside that one, in the mean over its own decode."""
        start, end = request.times[0], request.times[-1]
        if end <= start:
            return 0.0
        beside = (self._decoded(end) - self._decoded(start)) / (end - start) - 1
        return max(0.0, beside)  # of sums that are rounded, nobody may be a little less

    def _decoded(self, moment: float) -> float:
        """Seconds of decode that all requests together had until then."""
        total = 0.0
        for sign, times, sums in zip((1, -1), self._moments[1:], self._sums, strict=True):
            count = bisect_right(times, moment)
            total += sign * (count * moment - sums[count])
        return total


def read_loads(data: Any, what: str = "a result") -> list[Load]:
    """The loads in the `data` of a result, wherever in it they lie.

    Args:
        data: of the result.
        what: the file is, for a reader who gave another one than is taken.

    Raises:
        SavedLedgerError: there is none with a request that succeeded.
    """
    loads = []
    for number, found in enumerate(_holders(data, 0)):
        requests = [request for entry in found["observations"] if (request := _request(entry)) is not None]
        if requests:
            void = tuple(map(str, found["void"])) if isinstance(found.get("void"), list) else ()
            ordered = tuple(sorted(requests, key=lambda request: request.sent))
            loads.append(Load(_name(found, number), ordered, void))
    if not loads:
        raise SavedLedgerError(f"The file is {what}, with no load whose requests succeeded.", LOAD_WANTED)
    return loads


def _holders(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if depth > DEEP:
        return
    if isinstance(value, Mapping):
        if isinstance(value.get("observations"), list):
            yield value
            return
        for item in value.values():
            yield from _holders(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _holders(item, depth + 1)


def _name(found: Mapping[str, Any], number: int) -> str:
    if _is_number(found.get("rate")):
        return f"{found['rate']:g} requests/s"
    if isinstance(found.get("concurrency"), int):
        return f"{found['concurrency']} at once"
    return f"load {number + 1}"


def _request(entry: Any) -> ClientRequest | None:
    """None for one that failed, or is not readable as one."""
    if not isinstance(entry, Mapping) or entry.get("error"):
        return None
    intended, times = entry.get("intended"), entry.get("token_times")
    if not _is_number(intended) or not isinstance(times, list) or not times or not all(map(_is_number, times)):
        return None
    if any(after < before for before, after in pairwise([intended, *times])):
        return None  # no clock goes back
    prompt, cached, output = (
        value if isinstance(value := entry.get(f"num_{name}_tokens"), int) and 0 <= value <= LARGEST else None
        for name in ("prompt", "cached", "output")
    )
    computed = None if prompt is None else max(0, prompt - (cached or 0))
    return ClientRequest(
        float(intended or 0.0), tuple(map(float, times)), computed, output, _ledger(entry.get("claims"))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _ledger(claims: Any) -> dict[str, float] | None:
    for found in (claims, claims.get("timings") if isinstance(claims, Mapping) else None):
        ledger = found.get("ledger_ms") if isinstance(found, Mapping) else None
        if isinstance(ledger, Mapping) and ledger and all(map(_is_number, ledger.values())):
            return {str(kind): 1e-3 * float(spent) for kind, spent in ledger.items()}
    return None
