"""What a server says of its own time, beside what its client saw: both definitions, and the difference.

A claim is taken from the same requests that were measured, or from the server's counters before and after them. Where a
server says nothing, nothing is made up. Not for recognising servers (`targets/servers.py`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from twinphase.bench.client.client import Reply
from twinphase.bench.client.observation import Observation
from twinphase.bench.client.sse import SHOWN
from twinphase.bench.load.run import LoadResult
from twinphase.bench.load.workload import PromptMaker
from twinphase.bench.report.report import Column, Section, Table
from twinphase.bench.statistics import percentile
from twinphase.bench.targets.openai import OpenAITarget

__all__ = ["Claim", "MetricsReader", "OllamaReader", "claims_of", "claims_reader", "claims_section", "read_counters"]

OURS = {
    "TTFT": "first piece of output at the client - intended send",
    "TPOT": "(last piece - first piece) / (output tokens - 1), at the client",
    "ITL": "gap between pieces of output at the client, pooled",
    "E2E": "last piece of output at the client - intended send",
    "decode time": "last piece - first piece of output, at the client",
}
NOT_SEEN = "a client cannot see it"
OLLAMA_LENGTHS = (128, 16)  # tokens of prompt and output of the requests that its claims take
Value = Callable[[Observation], float | None]


@dataclass(frozen=True)
class Claim:
    """One figure of a server beside ours, seconds.

    Attributes:
        figure: "TTFT", "TPOT", ...
        ours, theirs: of all requests together by `statistic`; ours is None where a client cannot see it.
        difference: ours - theirs: of each request, then the median, where the claim is one a request; None where the
            two are not of equally many.
        statistic: "median of N" or "mean of N"; a server's counters give means only.
        our_definition, their_definition: formulas.
        source: the field or metric.
    """

    figure: str
    ours: float | None
    theirs: float
    difference: float | None
    statistic: str
    our_definition: str
    their_definition: str
    source: str


@dataclass(frozen=True)
class _Field:
    """A field of a reply: its name, what it is to be compared with, what it means."""

    name: str
    figure: str
    definition: str
    per_token: str = ""  # divide by this other field


# Read from the projects' sources and documentation, October 2025.
LLAMA_CPP = (
    _Field(
        "prompt_ms", "TTFT", "start of prompt processing to first sampled token: no queue, no HTTP, no text handling"
    ),
    _Field("predicted_per_token_ms", "TPOT", "time since the first token / all tokens: n - 1 gaps divided by n"),
)
TWINPHASE = (
    _Field("ttft_ms", "TTFT", "first token handed to the socket - arrival, queue and tokenizing in it"),
    _Field("tpot_ms", "TPOT", "(last token - first token) / (output tokens - 1), handed to the socket"),
    _Field("e2e_ms", "E2E", "end of the request's ledger - arrival"),
)
VLLM_REQUEST = (
    _Field("queue_time_ms", "queue", "time in vLLM's waiting queue"),
    _Field("time_to_first_token_ms", "TTFT", "first token generated - scheduled: no queue, no HTTP"),
    _Field("mean_itl_ms", "TPOT", "mean gap between generated tokens"),
    _Field("generation_time_ms", "decode time", "last token generated - first token generated"),
)
# (metric without its prefix, figure, definition); several names for one figure: the first that is there.
COUNTERS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("time_to_first_token_seconds",), "TTFT", "first token - arrival at the server, queue in it"),
    (
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "ITL",
        "time between output tokens of a request, at the server",
    ),
    (("e2e_request_latency_seconds",), "E2E", "end of the request - arrival at the server"),
    (("request_queue_time_seconds", "queue_time_seconds"), "queue", "time in the waiting queue"),
    (("request_prefill_time_seconds",), "prefill time", "scheduled to first token, at the server"),
    (("request_decode_time_seconds",), "decode time", "first token to last token, at the server"),
)


def _decode_time(seen: Observation) -> float | None:
    return None if seen.last_token is None else seen.last_token - seen.token_times[0]


VALUES: dict[str, Value] = {
    "TTFT": lambda seen: seen.ttft,
    "TPOT": lambda seen: seen.tpot,
    "E2E": lambda seen: seen.e2e,
    "decode time": _decode_time,
}


def read_counters(text: str, prefix: str) -> dict[str, tuple[float, float]]:
    """(sum, count) of each histogram in Prometheus' text format, over all labels, by name without the prefix."""
    found: dict[str, dict[str, float]] = {}
    pattern = re.compile(rf"^{re.escape(prefix)}:(\w+)_(sum|count)(?:\{{.*\}})?\s+(\S+)")
    for line in text.splitlines():
        match = pattern.match(line)
        if match:
            name, which, value = match.groups()
            sums = found.setdefault(name, {"sum": 0.0, "count": 0.0})
            try:
                sums[which] += float(value)
            except ValueError:  # no number: nothing is claimed of this one
                sums[which] = math.nan
    return {n: (s["sum"], s["count"]) for n, s in found.items() if math.isfinite(s["sum"] + s["count"])}


class MetricsReader:
    """Histograms of /metrics before and after a load: of vLLM, SGLang and twinphase.

    Attributes:
        problem: why there are none; "" if there are.
    """

    def __init__(self, target: OpenAITarget, prefix: str) -> None:
        """Nothing is read yet."""
        self._target, self._prefix = target, prefix
        self._first: dict[str, tuple[float, float]] | None = None
        self._last: dict[str, tuple[float, float]] | None = None
        self.problem = "not read yet"

    async def before(self) -> None:
        """Read what was counted so far."""
        self._first = await self._read()

    async def after(self) -> None:
        """Read it again."""
        before = self.problem
        self._last = await self._read()
        if self._first is None and not self.problem:
            self.problem = f"{before} before the load, so that what is of the load cannot be told"

    async def _read(self) -> dict[str, tuple[float, float]] | None:
        reply = await self._target.get("/metrics")
        if reply.status == 200 and reply.whole:
            self.problem = ""
            return read_counters(reply.body.decode(errors="replace"), self._prefix)
        self.problem = f"/metrics answers with http {reply.status}" if reply.status else f"/metrics: {reply.error}"
        return None

    def claims(self, result: LoadResult) -> list[Claim]:
        """Means over the requests in between; none unless it was read before as well as after."""
        found: list[Claim] = []
        if self._first is None or self._last is None:
            return found
        for names, figure, definition in COUNTERS:
            name = next((name for name in names if name in self._last), None)
            if name is None:
                continue
            total, count = self._last[name]  # one that was not there before had counted nothing yet
            first_total, first_count = self._first.get(name, (0.0, 0.0))
            if count <= first_count:
                continue
            theirs = (total - first_total) / (count - first_count)
            number = round(count - first_count)
            values = result.itl if figure == "ITL" else _values(_population(result.succeeded, figure, number), figure)
            ours = statistics.fmean(values) if values else None
            shown = f"mean of {number}" + (f" (ours of {len(values)})" if values and len(values) != number else "")
            source = f"{self._prefix}:{name}"
            claim = _claim(figure, ours, theirs, None, shown, definition, source)
            # Means over different requests differ whatever the server's clock says.
            found.append(claim if len(values) == number else replace(claim, difference=None))
        return found


class OllamaReader:
    """Ollama's OpenAI routes claim nothing: some requests are put to its own API after the load, one at a time.

    Attributes:
        problem: why there are none; "" if there are.
    """

    def __init__(self, target: OpenAITarget, prompts: PromptMaker, lengths: tuple[int, int], repeats: int = 3) -> None:
        """`lengths` of prompts and outputs; `prompts` must not be those of the load."""
        self._target, self._prompts, self._lengths, self._repeats = target, prompts, lengths, repeats
        self._seen: list[Observation] = []
        self.problem = "not read yet"

    async def before(self) -> None:
        """Nothing."""

    async def after(self) -> None:
        """Ask."""
        self.problem = ""
        for _ in range(self._repeats):
            options = {"num_predict": self._lengths[1], "temperature": 0}
            prompt = self._prompts.take(self._lengths[0]).text
            body = {"model": self._target.model, "prompt": prompt, "stream": True, "options": options}
            reply = await self._target.post_root("/api/generate", body)
            if reply.status != 200 or reply.error:
                self.problem = f"/api/generate fails: http {reply.status} {reply.error}"
                return
            seen = read_ollama(reply)
            if seen.error:
                self.problem = f"/api/generate cannot be read: {seen.error}"
                return
            self._seen.append(seen)

    def claims(self, result: LoadResult) -> list[Claim]:
        """Of these requests, ours and theirs."""
        fields = (
            _Field(
                "prompt_eval_ms", "TTFT", "prompt_eval_duration: evaluation of the prompt, no loading, queue or HTTP"
            ),
            _Field("eval_ms", "TPOT", "eval_duration / eval_count: time to generate / all output tokens", "eval_count"),
            _Field("total_ms", "E2E", "total_duration: the response, loading in it"),
        )
        return _per_request(self._seen, "ollama", fields, "native API, one at a time after the load: ")


def read_ollama(reply: Reply) -> Observation:
    """A reply of Ollama's /api/generate: a line of JSON for each piece, the last with the durations."""
    seen = Observation("", reply.intended, reply.sent, ended=reply.ended, status=reply.status, error=reply.error)
    rest = b""
    for moment, data in reply.pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, lines):
            try:
                found = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                found = None
            if not isinstance(found, dict) or found.get("error"):
                seen.error = seen.error or f"bad line: {line[:SHOWN].decode(errors='replace')}"
                continue
            if found.get("response") or found.get("thinking"):
                seen.token_times.append(moment)
            if found.get("done"):
                seen.finished = moment
                seen.num_prompt_tokens, seen.num_output_tokens = found.get("prompt_eval_count"), found.get("eval_count")
                claims = {
                    key.replace("_duration", "_ms"): value / 1e6
                    for key, value in found.items()
                    if key.endswith("_duration") and isinstance(value, (int, float))
                }
                seen.claims["ollama"] = {**claims, "eval_count": found.get("eval_count")}
    if not seen.error and "ollama" not in seen.claims:
        seen.error = f"no line says that it is done: {(rest or reply.body)[:SHOWN].decode(errors='replace')}"
    return seen


def claims_reader(target: Any, prompts: PromptMaker | None = None) -> MetricsReader | OllamaReader | None:
    """Who reads a server's claims before and after a load; None for those that put them into replies, or nowhere.

    Args:
        target: of the load.
        prompts: for Ollama, whose claims need requests of their own; unlike those of the load.
    """
    if not isinstance(target, OpenAITarget):
        return None
    if target.server.kind in ("vllm", "sglang", "twinphase"):
        return MetricsReader(target, target.server.kind)
    if target.server.kind == "ollama" and prompts is not None:
        return OllamaReader(target, prompts, OLLAMA_LENGTHS)
    return None


def claims_of(result: LoadResult) -> list[Claim]:
    """All that the server said of this load."""
    seen = result.succeeded
    found = _per_request(seen, "metrics", VLLM_REQUEST, "metrics.")
    if any("ttft_ms" in one.claims.get("timings", {}) for one in seen):
        found += _per_request(seen, "timings", TWINPHASE, "timings.")
    else:
        found += _per_request(seen, "timings", LLAMA_CPP, "timings.")
    if result.claims is not None:
        found += result.claims.claims(result)
    return found


def claims_section(result: LoadResult) -> Section:
    """The server's claims beside ours."""
    claims = claims_of(result)
    if not claims:
        problem = getattr(result.claims, "problem", "")
        reason = f": {problem}" if problem else ""
        return Section(
            "The server's own claims", paragraphs=(f"{result.facts.engine} makes none that is read{reason}.",)
        )
    columns = (
        Column("figure"),
        Column("ours, ms"),
        Column("theirs, ms"),
        Column(
            "difference, ms",
            "ours - theirs; where a claim comes with each request: the median of the differences; none where means are "
            "of different numbers of requests",
        ),
        Column("over"),
        Column("our definition"),
        Column("their definition"),
        Column("their name"),
    )
    rows = tuple(
        (
            claim.figure,
            NOT_SEEN if claim.ours is None else f"{1e3 * claim.ours:.2f}",
            f"{1e3 * claim.theirs:.2f}",
            "" if claim.difference is None else f"{1e3 * claim.difference:+.2f}",
            claim.statistic,
            claim.our_definition,
            claim.their_definition,
            claim.source,
        )
        for claim in claims
    )
    return Section("The server's own claims", tables=(Table("Claims", columns, rows),))


def _values(seen: Sequence[Observation], figure: str) -> list[float]:
    value = VALUES.get(figure)
    return [found for one in seen if value and (found := value(one)) is not None]


def _population(seen: Sequence[Observation], figure: str, number: int) -> Sequence[Observation]:
    """Whose decode time is averaged: requests of two tokens or more, unless the server counted all `number` of them."""
    if figure != "decode time" or number == len(seen):
        return seen
    return [one for one in seen if one.num_output_tokens is None or one.num_output_tokens > 1]


def _per_request(seen: Sequence[Observation], key: str, fields: Sequence[_Field], where: str) -> list[Claim]:
    claims = []
    for wanted in fields:
        theirs, ours = [], []
        for one in seen:
            found = one.claims.get(key, {})
            value = found.get(wanted.name)
            if isinstance(value, (int, float)) and wanted.per_token:
                count = found.get(wanted.per_token)
                value = value / count if count else None
            if isinstance(value, (int, float)):
                theirs.append(value / 1e3)
                measured = VALUES[wanted.figure](one) if wanted.figure in VALUES else None
                ours.append(measured)
        if not theirs:
            continue
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None]
        our_median = percentile([a for a, _ in pairs], 50) if pairs else None
        difference = percentile([a - b for a, b in pairs], 50) if pairs else None
        statistic, source = f"median of {len(theirs)}", f"{where}{wanted.name}"
        theirs_median = percentile(theirs, 50)
        claims.append(
            _claim(wanted.figure, our_median, theirs_median, difference, statistic, wanted.definition, source)
        )
    return claims


def _claim(
    figure: str,
    ours: float | None,
    theirs: float,
    difference: float | None,
    statistic: str,
    definition: str,
    source: str,
) -> Claim:
    if difference is None and ours is not None:
        difference = ours - theirs
    return Claim(figure, ours, theirs, difference, statistic, OURS.get(figure, NOT_SEEN), definition, source)
