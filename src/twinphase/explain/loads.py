"""The loads in a result file, and which requests were in flight at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from twinphase.errors import ResultError
from twinphase.phases.observation import Observation

MAX_JSON_LEVELS = 64
# A larger time or count means that the file is damaged.
MAX_NUMBER = 1e15
LOAD_WANTED = (
    "explain takes the result of a load: `twinphase bench URL --request-rate ...` or "
    "`--max-concurrency ...` measures "
    "one."
)


@dataclass(frozen=True)
class ObservedLoad:
    """The requests of one load, as a client observed them.

    Attributes:
        requests: successful requests, in the order of their intended times.
        void: reasons for not using the measurement.
    """

    name: str
    requests: tuple[Observation, ...]
    void: tuple[str, ...] = ()

    @cached_property
    def _moments(self) -> Any:
        """Sorted times [3, requests]: sent, first token, last token."""
        rows = [(one.intended, one.token_times[0], one.token_times[-1]) for one in self.requests]
        return np.sort(np.array(rows).T)

    def others_before(self, request: Observation) -> int:
        """Number of other requests in flight when `request` was sent, or sent at the same time."""
        sent, _, last = (
            np.searchsorted(times, request.intended, side="right") for times in self._moments
        )
        return max(0, int(sent - 1 - last))

    def others_in_prefill(self, begins: Sequence[float], ends: Sequence[float]) -> Any:
        """For each (begin, end): requests sent before `end` that had no first token at `begin`."""
        sent, first, _ = self._moments
        return np.searchsorted(sent, ends) - np.searchsorted(first, begins, side="right")

    def others_decoding(self, request: Observation) -> float:
        """Mean number of other requests that decoded during the decode of `request`."""
        start = request.token_times[0]
        end = request.token_times[-1]
        if end <= start:
            return 0.0
        _, first, last = np.clip(self._moments, start, end)
        # Rounding may give a value slightly below zero.
        return max(0.0, float(np.sum(last - first)) / (end - start) - 1)


def read_loads(data: Any, what: str = "a result") -> list[ObservedLoad]:
    """All loads in the `data` of a result, at any depth.

    Args:
        data: the result's JSON.
        what: description of the file, for the error about another kind of result.

    Raises:
        ResultError: there is no load with a request that succeeded.
    """
    loads = []
    for number, found in enumerate(_holders(data, 0), start=1):
        requests = [
            request
            for entry in found["observations"]
            if (request := _observation(entry)) is not None
        ]
        if requests:
            void = tuple(map(str, found["void"])) if isinstance(found.get("void"), list) else ()
            requests.sort(key=lambda request: request.intended)
            loads.append(ObservedLoad(_name(found, number), tuple(requests), void))
    if not loads:
        raise ResultError(
            f"The file is {what}, with no load whose requests succeeded.", LOAD_WANTED
        )
    return loads


def _holders(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The objects that have observations."""
    if isinstance(value, Mapping) and isinstance(value.get("observations"), list):
        yield value
    elif isinstance(value, (Mapping, list)) and depth < MAX_JSON_LEVELS:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _holders(item, depth + 1)


def _name(found: Mapping[str, Any], number: int) -> str:
    rate = found.get("rate")
    concurrency = found.get("concurrency")
    if isinstance(rate, (int, float)) and abs(rate) <= MAX_NUMBER:
        return f"{rate:g} requests/s"
    return f"{concurrency} at once" if isinstance(concurrency, int) else f"load {number}"


def _observation(entry: Any) -> Observation | None:
    """An observation from JSON; None if the request failed or the entry is malformed."""
    try:
        request = msgspec.convert(entry, Observation)
    except (ValueError, OverflowError):
        return None
    times = [-MAX_NUMBER, request.intended, *request.token_times, MAX_NUMBER]
    counts = (request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens)
    # Clocks do not run backwards; this also refuses NaN.
    ordered = all(before <= after for before, after in pairwise(times))
    counted = all(count is None or 0 <= count <= MAX_NUMBER for count in counts)
    return request if request.succeeded and ordered and counted else None
