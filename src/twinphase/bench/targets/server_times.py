"""What a server says of its own time beside what its client saw: both definitions, and the difference.

A claim comes with the replies to the requests that were measured, or from the server's counters before and after them.
Where a server says nothing, nothing is made up. Not for recognising servers (`servers.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from twinphase.bench.client.client import Reply
from twinphase.bench.client.observation import Observation
from twinphase.bench.client.sse import SHOWN
from twinphase.bench.load.run import LoadResult
from twinphase.bench.load.workload import PromptMaker
from twinphase.bench.report.report import Column, Section, Table
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
DIFFERENCE = (
    "ours - theirs; where a claim comes with each request: the median of the differences; none where the means are of "
    "different numbers of requests"
)
OLLAMA_REQUESTS, OLLAMA_LENGTHS = 3, (128, 16)  # requests for its claims; tokens of their prompts and outputs


class Source(NamedTuple):
    """A name by which servers tell a figure, and what they mean by it."""

    name: str
    figure: str
    definition: str


# Read from the projects' sources and documentation, October 2025. In replies: fields of milliseconds.
TWINPHASE = (
    Source("ttft_ms", "TTFT", "first token handed to the socket - arrival, queue and tokenizing in it"),
    Source("tpot_ms", "TPOT", "(last token - first token) / (output tokens - 1), handed to the socket"),
    Source("e2e_ms", "E2E", "end of the request's ledger - arrival"),
)
LLAMA_CPP = (
    Source("prompt_ms", "TTFT", "start of prompt processing to first sampled token: no queue, HTTP or text handling"),
    Source("predicted_per_token_ms", "TPOT", "time since first token / all tokens: n - 1 gaps divided by n"),
)
VLLM = (
    Source("queue_time_ms", "queue", "time in vLLM's waiting queue"),
    Source("time_to_first_token_ms", "TTFT", "first token generated - scheduled: no queue, no HTTP"),
    Source("mean_itl_ms", "TPOT", "mean gap between generated tokens"),
    Source("generation_time_ms", "decode time", "last token generated - first token generated"),
)
OLLAMA = (
    Source("prompt_eval_ms", "TTFT", "prompt_eval_duration: evaluation of the prompt, no loading, queue or HTTP"),
    Source("eval_per_token_ms", "TPOT", "eval_duration / eval_count: time to generate / all output tokens"),
    Source("total_ms", "E2E", "total_duration: the response, loading in it"),
)
# By the claim in a reply; of two with one name, that counts whose first field is there.
IN_REPLIES = (("timings", TWINPHASE), ("timings", LLAMA_CPP), ("metrics", VLLM), ("ollama", OLLAMA))
# Histograms of seconds in /metrics, without the server's prefix; of two for one figure the first that is there.
COUNTERS = (
    Source("time_to_first_token_seconds", "TTFT", "first token - arrival at the server, queue in it"),
    Source("inter_token_latency_seconds", "ITL", "time between output tokens of a request, at the server"),
    Source("time_per_output_token_seconds", "ITL", "time between output tokens of a request, at the server"),
    Source("e2e_request_latency_seconds", "E2E", "end of the request - arrival at the server"),
    Source("request_queue_time_seconds", "queue", "time in the waiting queue"),
    Source("queue_time_seconds", "queue", "time in the waiting queue"),
    Source("request_prefill_time_seconds", "prefill time", "scheduled to first token, at the server"),
    Source("request_decode_time_seconds", "decode time", "first token to last token, at the server"),
)


@dataclass(frozen=True)
class Claim:
    """One figure of a server beside ours, seconds.

    Attributes:
        figure: "TTFT", "TPOT", ...
        ours, theirs: of all requests together by `statistic`; ours is None where a client cannot see it.
        difference: ours - theirs. Where each reply has its claim: the median of the requests' differences. None where
            the two are not of equally many.
        statistic: "median of N" or "mean of N"; a server's counters give means only.
        definition: their formula.
        source: their field or metric.
    """

    figure: str
    ours: float | None
    theirs: float
    difference: float | None
    statistic: str
    definition: str
    source: str


def read_counters(text: str, prefix: str) -> dict[str, tuple[float, float]]:
    """(sum, count) of each histogram in Prometheus' text format, over all labels, by name without the prefix.

    Raises:
        ValueError: the text is not in that format.
    """
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(f"{prefix}:"):
                name = sample.name.removeprefix(f"{prefix}:")
                sums[name] = sums.get(name, 0.0) + sample.value
    names = [name.removesuffix("_count") for name in sums if name.endswith("_count")]
    found = {name: (sums.get(f"{name}_sum", math.nan), sums[f"{name}_count"]) for name in names}
    return {name: values for name, values in found.items() if all(map(math.isfinite, values))}


class MetricsReader:
    """Histograms of /metrics before and after a load: of vLLM, SGLang and twinphase.

    Attributes:
        problem: why there are none; "" if there are.
    """

    def __init__(self, target: OpenAITarget, prefix: str) -> None:
        self._target, self._prefix = target, prefix
        self._first: dict[str, tuple[float, float]] | None = None
        self._last: dict[str, tuple[float, float]] | None = None
        self.problem = "not read yet"

    async def before(self) -> None:
        self._first = await self._read()

    async def after(self) -> None:
        before = self.problem
        self._last = await self._read()
        if self._first is None and not self.problem:
            self.problem = f"{before} before the load, so that what belongs to the load cannot be told"

    async def _read(self) -> dict[str, tuple[float, float]] | None:
        reply = await self._target.ask("/metrics")
        self.problem = ""
        if reply.status != 200 or not reply.whole:
            self.problem = f"/metrics answers with http {reply.status}" if reply.status else f"/metrics: {reply.error}"
            return None
        try:
            return read_counters(reply.body.decode(errors="replace"), self._prefix)
        except ValueError as error:
            self.problem = f"/metrics cannot be read: {error}"
            return None

    def claims(self, result: LoadResult) -> list[Claim]:
        """Means over the requests in between; none unless it was read before as well as after."""
        found: dict[str, Claim] = {}
        for name, figure, definition in COUNTERS:
            if self._first is None or self._last is None or name not in self._last or figure in found:
                continue
            total, count = self._last[name]
            first_total, first_count = self._first.get(name, (0.0, 0.0))  # one that was not there had counted nothing
            number = round(count - first_count)
            if number < 1:
                continue
            theirs = (total - first_total) / number
            each = [_our_value(one, figure) for one in result.succeeded]
            values = result.itl if figure == "ITL" else [value for value in each if value is not None]
            ours = statistics.fmean(values) if values else None
            same = len(values) == number  # means over different requests differ whatever the server's clock says
            over = f"mean of {number}" + (f" (ours of {len(values)})" if values and not same else "")
            difference = ours - theirs if same and ours is not None else None
            found[figure] = Claim(figure, ours, theirs, difference, over, definition, f"{self._prefix}:{name}")
        return list(found.values())


class OllamaReader:
    """Ollama's OpenAI routes claim nothing: after the load a few requests are put to its own API, one at a time.

    Attributes:
        problem: why there are no claims; "" if there are.
    """

    def __init__(self, target: OpenAITarget, prompts: PromptMaker) -> None:
        """`prompts` must not be those of the load."""
        self._target, self._prompts = target, prompts
        self._seen: list[Observation] = []
        self.problem = "not read yet"

    async def before(self) -> None:
        """Nothing to do."""

    async def after(self) -> None:
        self.problem = ""
        for _ in range(OLLAMA_REQUESTS):
            prompt, options = self._prompts.take(OLLAMA_LENGTHS[0]).text, {"num_predict": OLLAMA_LENGTHS[1]}
            body = {"model": self._target.model, "prompt": prompt, "options": {**options, "temperature": 0}}
            reply = await self._target.ask("/api/generate", {**body, "stream": True})
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
        return _claims_in_replies(self._seen, "native API, one at a time after the load: ")


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
                seen.claims["ollama"] = _ollama_durations(found)
    if not seen.error and "ollama" not in seen.claims:
        seen.error = f"no line says that it is done: {(rest or reply.body)[:SHOWN].decode(errors='replace')}"
    return seen


def _ollama_durations(line: dict[str, Any]) -> dict[str, float]:
    """Milliseconds, of nanoseconds."""
    times = {key: value for key, value in line.items() if key.endswith("_duration") and isinstance(value, (int, float))}
    found = {key.replace("_duration", "_ms"): value / 1e6 for key, value in times.items()}
    if "eval_ms" in found and line.get("eval_count"):
        found["eval_per_token_ms"] = found["eval_ms"] / line["eval_count"]
    return found


def claims_reader(target: Any, prompts: PromptMaker | None = None) -> MetricsReader | OllamaReader | None:
    """What reads a server's claims before and after a load; None for servers that put them into replies, or nowhere.

    Args:
        target: of the load.
        prompts: for Ollama, whose claims need requests of their own; unlike those of the load.
    """
    if not isinstance(target, OpenAITarget):
        return None
    if target.server.kind in ("vllm", "sglang", "twinphase"):
        return MetricsReader(target, target.server.kind)
    if target.server.kind == "ollama" and prompts is not None:
        return OllamaReader(target, prompts)
    return None


def claims_of(result: LoadResult) -> list[Claim]:
    """All that the server said of this load."""
    found = _claims_in_replies(result.succeeded)
    return found if result.claims is None else found + result.claims.claims(result)


def claims_section(result: LoadResult) -> Section:
    """The server's claims beside ours."""
    title, claims = "The server's own claims", claims_of(result)
    if not claims:
        problem = getattr(result.claims, "problem", "")
        reason = f": {problem}" if problem else ""
        return Section(title, paragraphs=(f"{result.facts.engine} makes none that is read{reason}.",))
    heads = ("figure", "ours, ms", "theirs, ms", "difference, ms", "over", "our definition", "their definition")
    columns = tuple(Column(head, DIFFERENCE if "difference" in head else "") for head in (*heads, "their name"))
    rows = tuple(
        (
            claim.figure,
            NOT_SEEN if claim.ours is None else f"{1e3 * claim.ours:.2f}",
            f"{1e3 * claim.theirs:.2f}",
            "" if claim.difference is None else f"{1e3 * claim.difference:+.2f}",
            claim.statistic,
            OURS.get(claim.figure, NOT_SEEN),
            claim.definition,
            claim.source,
        )
        for claim in claims
    )
    return Section(title, tables=(Table("Claims", columns, rows),))


def _our_value(seen: Observation, figure: str) -> float | None:
    if figure == "decode time":  # a request of one token has none, as vLLM counts
        if seen.last_token is None or seen.num_output_tokens == 1:
            return None
        return seen.last_token - seen.token_times[0]
    return {"TTFT": seen.ttft, "TPOT": seen.tpot, "E2E": seen.e2e}.get(figure)


def _claims_in_replies(seen: Sequence[Observation], where: str = "") -> list[Claim]:
    found, done = [], set()
    for key, sources in IN_REPLIES:
        told = [(one, one.claims.get(key, {})) for one in seen]
        if key in done or not any(sources[0].name in fields for _, fields in told):
            continue
        done.add(key)
        for name, figure, definition in sources:
            pairs = [
                (_our_value(one, figure), fields[name] / 1e3)
                for one, fields in told
                if isinstance(fields.get(name), (int, float))
            ]
            if not pairs:
                continue
            theirs = statistics.median(value for _, value in pairs)
            both = [(a, b) for a, b in pairs if a is not None]
            ours = statistics.median(a for a, _ in both) if both else None
            difference = statistics.median(a - b for a, b in both) if both else None
            source = f"{where or key + '.'}{name}"
            found.append(Claim(figure, ours, theirs, difference, f"median of {len(pairs)}", definition, source))
    return found
