"""What a client alone can tell of a server's phases, from the result of a load: the same causes, by other evidence.

A client sees when it sent a prompt and when each piece of the answer came, nothing of the steps in between. Rules here
compare requests with each other: those sent into an idle server with those sent into a busy one, long prompts with
short ones, gaps in which somebody else's prompt was being read with gaps in which none was. Each has its own ratio; the
seconds are those of a request's TTFT, or of a token, and no share of one whole is claimed. What takes the server's own
word is `unknown`. Not for ledgers (`diagnosis.py`), nor for taking such measurements (bench/).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import mean, median
from typing import Any

from twinphase.phases.diagnosis import Diagnosis
from twinphase.phases.levers import WORTH_NAMING, Lever, duration
from twinphase.phases.saved import SavedLedgerError
from twinphase.phases.waterfall import Bar, Waterfall

__all__ = ["CLIENT_RULES", "ClientExplanation", "ClientRequest", "Load", "explain_client", "read_loads"]

FEW = 4  # requests on each side of a comparison, below which nothing is concluded
SPREAD = 1.5  # longest prompt over the shortest, below which nothing is said about length
FIRM = 0.5  # rank correlation, below which two quantities are not said to go together
MOSTLY = 0.8  # of pairs of one request of each group, in which the second's value must be the larger one
DEEP = 64  # levels of JSON that are searched
LARGEST = 1e15  # of a number that is taken for one; NaN is not

# What only the server knows, and why a client does not.
UNKNOWN = (
    "What bound each phase, MFU, MBU: the server's machine, model and steps are not seen from here.",
    "Cold start: the requests that warmed the server up are not in the result.",
    "Cache pressure, evictions: no preemption is seen from here, only a long gap.",
    "Sampling, detokenizing, sending: part of every gap, and not told apart.",
    "Had it run alone: there is no cost model of this server; its requests that ran alone are the nearest to it.",
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
        """Requests in flight when that one was sent."""
        sent, _, last = self._moments
        return bisect_left(sent, request.sent) - bisect_right(last, request.sent)

    def others_reading(self, begin: float, end: float) -> int:
        """Requests whose prompts were being read between two moments; one that had its first token by then is none."""
        sent, first, _ = self._moments
        return bisect_left(sent, end) - bisect_right(first, begin)

    def others_decoding(self, request: ClientRequest) -> float:
        """Requests that decoded beside that one, in the mean over its own decode."""
        start, end = request.times[0], request.times[-1]
        return (self._decoded(end) - self._decoded(start)) / (end - start) - 1 if end > start else 0.0

    def _decoded(self, moment: float) -> float:
        """Seconds of decode that all requests together had until then."""
        total = 0.0
        for sign, times, sums in zip((1, -1), self._moments[1:], self._sums, strict=True):
            count = bisect_right(times, moment)
            total += sign * (count * moment - sums[count])
        return total


@dataclass(frozen=True)
class ClientExplanation:
    """What can be told from outside, and what cannot.

    Attributes:
        waterfall: of the mean request: until its first token, and after it.
        diagnoses: as for a ledger.
        levers: of the diagnoses.
        unknown: what cannot be told, each with the reason.
        num_requests: that it was told from.
    """

    waterfall: Waterfall
    diagnoses: tuple[Diagnosis, ...]
    levers: tuple[Lever, ...]
    unknown: tuple[str, ...]
    num_requests: int


def read_loads(data: Any) -> list[Load]:
    """The loads in the `data` of a bench result, wherever in it they lie.

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
        raise SavedLedgerError(
            "The result has no load with requests that succeeded.",
            "`twinphase bench URL --rate ...` or `--concurrency ...` measures one.",
        )
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


def explain_client(loads: Sequence[Load]) -> ClientExplanation:
    """What the loads tell of a bad TTFT and of bad tokens a second, seen from outside.

    Raises:
        SavedLedgerError: no request took any time.
    """
    everyone = [request for load in loads for request in load.requests]
    found = []
    for rule in CLIENT_RULES.values():
        diagnosis = rule(loads)
        if diagnosis is not None:
            found.append(diagnosis)
    found.sort(key=lambda one: (one.phase != "prefill", one.seconds is None, -(one.seconds or 0.0)))
    until = mean(request.ttft for request in everyone)
    after = mean(request.times[-1] - request.times[0] for request in everyone)
    wall = until + after
    if wall <= 0:
        raise SavedLedgerError("No time has passed in this result.", "Its requests have no durations.")
    bars = tuple(
        Bar(name, spent, spent / wall, spent if name == "until first token" else 0.0)
        for name, spent in (("until first token", until), ("tokens after it", after))
        if spent > 0
    )
    levers = tuple(one.lever for one in found if one.lever)
    return ClientExplanation(Waterfall(wall, until, bars), tuple(found), levers, _unknown(loads, found), len(everyone))


def _unknown(loads: Sequence[Load], found: Sequence[Diagnosis]) -> tuple[str, ...]:
    causes = {one.cause for one in found}
    lines = [f"Everything at {load.name}: that run is void, {reason}." for load in loads for reason in load.void]
    if not {"queue", "prompt_length"} & causes:
        lines.append("What TTFT consists of: neither the load nor the length of prompts varied enough to tell.")
    everyone = [request for load in loads for request in load.requests]
    if all(request.num_prompt is None for request in everyone):
        lines.append("Prompt tokens: the server counts none, so that TTFT is not put in relation to them.")
    if all(request.num_output is None for request in everyone):
        lines.append("TPOT: the server counts no output tokens.")
    return (*lines, *UNKNOWN)


def _queue(loads: Sequence[Load]) -> Diagnosis | None:
    """TTFT of those sent into a busy server, against those that were alone."""
    alone: list[float] = []
    busy: list[float] = []
    for load in loads:
        for request in load.requests:
            (busy if load.others_before(request) else alone).append(request.ttft)
    if len(loads) > 1 and len(alone) < FEW:  # nobody was alone: the lightest load is the nearest to it
        by_others = sorted(loads, key=lambda load: mean(map(load.others_before, load.requests)))
        alone, busy = ([one.ttft for one in load.requests] for load in (by_others[0], by_others[-1]))
    if len(alone) < FEW or len(busy) < FEW:
        return None
    quiet, loaded = median(alone), median(busy)
    if not _differ(quiet, loaded):
        return None
    sentence = (
        f"TTFT is {duration(loaded)} (median of {len(busy)}) for requests sent into a busy server, "
        f"{duration(quiet)} (of {len(alone)}) with the least load{_times(quiet, loaded)}: the rest is queue, or "
        "others' prompts."
    )
    lever = Lever("load", "Fewer requests at once, more seats or replicas, or a scheduler that lets prompts in sooner.")
    return Diagnosis("queue", "prefill", sentence, loaded - quiet, None, lever)


def _prompt_length(loads: Sequence[Load]) -> Diagnosis | None:
    """TTFT by prompt tokens computed, among those that were alone if there are enough."""
    pairs = [(r.num_prompt, r.ttft) for load in loads for r in load.requests
             if r.num_prompt is not None and not load.others_before(r)]  # fmt: skip
    where = "sent when no other ran"
    if len(pairs) < 2 * FEW:
        pairs = [(r.num_prompt, r.ttft) for load in loads for r in load.requests if r.num_prompt is not None]
        where = "whatever else ran"
    if len(pairs) < 2 * FEW or max(n for n, _ in pairs) < SPREAD * max(1, min(n for n, _ in pairs)):
        return None
    together = _rank_correlation(pairs)
    middle_n, middle = mean(n for n, _ in pairs), mean(t for _, t in pairs)
    slope = sum((n - middle_n) * (t - middle) for n, t in pairs) / sum((n - middle_n) ** 2 for n, _ in pairs)
    if together < FIRM or slope <= 0:
        return None
    spent = min(middle, slope * middle_n)
    if spent < WORTH_NAMING * middle:
        return None
    sentence = (
        f"TTFT grows with the prompt ({len(pairs)} requests {where}, rank correlation {together:.2f}): "
        f"{1e6 * slope:,.0f} µs a token, {duration(spent)} of {duration(middle)} at the mean of {middle_n:,.0f} tokens."
    )
    lever = Lever("prompt", "Shorter prompts, or beginnings that are shared and cached.")
    return Diagnosis("prompt_length", "prefill", sentence, spent, None, lever)


def _stalls(loads: Sequence[Load]) -> Diagnosis | None:
    """Gaps in which somebody else's prompt was being read, against gaps in which none was."""
    within: list[float] = []
    without: list[float] = []
    for load in loads:
        for request in load.requests:
            for begin, end in zip(request.times, request.times[1:], strict=False):
                (within if load.others_reading(begin, end) > 0 else without).append(end - begin)
    if len(within) < FEW or len(without) < FEW:
        return None
    usual, num_gaps = median(without), len(within) + len(without)
    excess = sum(max(0.0, gap - usual) for gap in within) - len(within) * mean(
        max(0.0, gap - usual) for gap in without
    )  # what such gaps exceed the usual by anyway is no stall
    if excess < WORTH_NAMING * (sum(within) + sum(without)) or not _differ(usual, median(within)):
        return None
    sentence = (
        f"Gaps between tokens are {duration(median(within))} in the middle (longest {duration(max(within))}) while a "
        f"prompt of another request is being read, {duration(usual)} otherwise{_times(usual, median(within))}: "
        f"{duration(excess)} more in all."
    )
    lever = Lever("chunk size", "Smaller prefill chunks, or prefill on other machines.")
    return Diagnosis("stalls", "decode", sentence, excess / num_gaps, None, lever)


def _decode_batching(loads: Sequence[Load]) -> Diagnosis | None:
    """TPOT by how many others decoded beside."""
    pairs = [(load.others_decoding(r), r.tpot) for load in loads for r in load.requests if r.tpot is not None]
    if len(pairs) < 2 * FEW:
        return None
    pairs.sort()
    quarter = max(FEW, len(pairs) // 4)
    few, many = pairs[:quarter], pairs[-quarter:]
    low, high = median(t for _, t in few), median(t for _, t in many)
    longer = mean(b > a for _, a in few for _, b in many)
    if longer < MOSTLY or not _differ(low, high) or mean(n for n, _ in many) < 1 + mean(n for n, _ in few):
        return None
    sentence = (
        f"TPOT is {duration(low)} beside {mean(n for n, _ in few):.1f} other decodes, {duration(high)} beside "
        f"{mean(n for n, _ in many):.1f}{_times(low, high)} (longer in {longer:.0%} of the pairs of one of each)."
    )
    lever = Lever("batch size", "Fewer sequences at once shorten each token, and lower the tokens a second of all.")
    return Diagnosis("decode_batching", "decode", sentence, high - low, None, lever)


def _claims(loads: Sequence[Load]) -> Diagnosis | None:
    """What the server itself says, where it is ours."""
    ledgers = [request.ledger for load in loads for request in load.requests if request.ledger]
    if not ledgers:
        return None
    kinds = {kind for ledger in ledgers for kind in ledger}
    totals = {kind: sum(ledger.get(kind, 0.0) for ledger in ledgers) for kind in kinds}
    whole = sum(totals.values()) or 1.0
    most = sorted(kinds, key=lambda kind: -totals[kind])[:4]
    named = ", ".join(f"{totals[kind] / whole:.0%} {kind}" for kind in most)
    sentence = f"By the server's own ledgers of {len(ledgers)} requests: {named}. `twinphase explain ID` has one whole."
    return Diagnosis("claims", "prefill", sentence, None, None)


def _differ(usual: float, more: float) -> bool:
    return more - usual >= WORTH_NAMING * more and more > usual


def _times(usual: float, more: float) -> str:
    """A ratio. Each rule compares other requests with each other, so that shares of them would not add up."""
    return f", {more / usual:.1f} times as long" if usual > 0 else ""


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, with mean ranks for ties; 0 where one of both does not vary."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]

    x, y = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
    mx, my = mean(x), mean(y)
    spread = math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


CLIENT_RULES: dict[str, Callable[[Sequence[Load]], Diagnosis | None]] = {
    "queue": _queue,
    "prompt_length": _prompt_length,
    "stalls": _stalls,
    "decode_batching": _decode_batching,
    "claims": _claims,
}
