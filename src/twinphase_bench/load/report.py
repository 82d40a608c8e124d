"""Reports a load and its repetitions.

`twinphase_bench/targets/server_times.py` reports the server's own figures.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twinphase.phases.observation import Observation
from twinphase.phases.report import DECODE_KINDS, PREFILL_KINDS
from twinphase.phases.slo import BLAMED_PHASE, Goodput
from twinphase.phases.statistics import has_percentile, percentile
from twinphase_bench.client.health import HEARTBEAT_SECONDS, MAX_CORE_SHARE
from twinphase_bench.client.sse import failure_kind
from twinphase_bench.load.plots import latency_plots, timeline_plot
from twinphase_bench.load.run import LoadResult
from twinphase_bench.report.report import Column, Metric, Section, Status, Table, Verdict, table_of
from twinphase_bench.targets.server_times import claims_section

DEFINITIONS = {
    "TTFT": "first piece of output at the client - intended send; queue and network in it, opening "
    "the connection not",
    "TPOT": "(last token - first piece) / (output tokens - 1), of each request; tokens by the "
    "target's count",
    "ITL": "gap between consecutive pieces of output, pooled over all requests, not divided by the "
    "tokens in a piece",
    "E2E": "last token - intended send; with fewer pieces than tokens, the last is taken to come "
    "when the target says that it has finished",
    "TTFO": "first piece of the answer itself - intended send, of requests that reasoned first",
}
PHASES = {
    **dict.fromkeys(map(str, PREFILL_KINDS), "prefill"),
    **dict.fromkeys(map(str, DECODE_KINDS), "decode"),
}
# `TargetFacts.kind` of a simulation, which has no client.
SIMULATION = "simulation"
# Parts of the ledger below this share of all time are not shown.
MIN_LEDGER_SHARE = 5e-4
PERCENTILES = (
    "nearest rank: a value that occurred; p50 is the median; -: too few values for this percentile"
)


@dataclass(frozen=True)
class LoadFigure:
    """A column of a table of loads: name with unit, definition, value."""

    name: str
    definition: str
    of: Callable[[LoadResult], float | None]

    def median_and_range(self, results: Sequence[LoadResult]) -> str:
        """The median and the range over several runs."""
        known = [
            value for run in results if (value := self.of(run)) is not None and math.isfinite(value)
        ]
        what, _, unit = self.name.partition(", ")
        if not known:
            return f"{what} unknown"
        return (
            f"{what} {shown(statistics.median(known))} {unit} ({shown(min(known))} .. "
            f"{shown(max(known))})"
        )


def _milliseconds(latency: str, q: int) -> LoadFigure:
    def of(result: LoadResult) -> float | None:
        values = getattr(result, latency.lower())
        # A high percentile of few values would only be the maximum.
        return 1e3 * percentile(values, q) if q == 50 or has_percentile(len(values), q) else None

    return LoadFigure(f"{latency} p{q}, ms", DEFINITIONS[latency] if q == 50 else PERCENTILES, of)


FIGURES = (
    LoadFigure(
        "served, req/s",
        "succeeded / (last end - first intended send)",
        lambda run: run.request_rate,
    ),
    LoadFigure(
        "output, tok/s",
        "output tokens of succeeded requests / the same time",
        lambda run: run.output_rate,
    ),
    *(_milliseconds(latency, q) for latency in ("TTFT", "TPOT") for q in (50, 90, 99)),
    _milliseconds("E2E", 50),
)


def shown(value: float | None) -> str:
    """A number with four digits, or more if its integer part is longer."""
    if value is None or math.isnan(value):
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def loads_table(title: str, head: str, rows: Iterable[tuple[str, LoadResult, str]]) -> Table:
    """A table with a row per (name, load, verdict); `head` is the first column's head."""
    columns: list[Column | str] = [
        head,
        *(Column(figure.name, figure.definition) for figure in FIGURES),
        Column("goodput, req/s", "requests that met the service levels / the same time"),
        Column("sent", "requests"),
        "failed",
        Column("verdict", "void: the client was the limit"),
    ]
    cells = []
    for name, run, verdict in rows:
        figures = (shown(figure.of(run)) for figure in FIGURES)
        good = "-" if run.goodput is None else shown(run.goodput.rate)
        failed = str(sum(run.failures.values()))
        ends = (str(len(run.observations)), failed, "void" if run.void else verdict)
        cells.append((name, *figures, good, *ends))
    return table_of(title, columns, cells)


def runs_verdicts(results: Sequence[LoadResult]) -> list[Verdict]:
    """Verdicts on the void runs of a load, and on the range of the other runs' figures."""
    found = [
        Verdict(
            Status.VOID,
            f"The client was the limit: run {number} of {len(results)} is void.",
            "; ".join(run.void),
        )
        for number, run in enumerate(results, 1)
        if run.void
    ]
    sound = [run for run in results if not run.void and run.succeeded]
    if len(sound) > 1:
        ranges = "; ".join(figure.median_and_range(sound) for figure in FIGURES)
        text = f"Over {len(sound)} runs with other prompts (median, lowest .. highest): {ranges}."
        found.append(Verdict(Status.INFO, text))
    return found


def runs_section(results: Sequence[LoadResult]) -> Section:
    """A section with a row per run."""
    rows = [(str(number), run, "counts") for number, run in enumerate(results, 1)]
    return Section("Runs of the load", tables=(loads_table("Runs of the load", "run", rows),))


def load_verdicts(result: LoadResult) -> list[Verdict]:
    """The most important facts: whether the figures are valid, failures, and the figures."""
    found = [
        Verdict(Status.VOID, "The client was the limit: this load is void.", fault)
        for fault in result.void
    ]
    if result.failures:
        kinds = ", ".join(f"{number} x {kind}" for kind, number in result.failures.items())
        text = (
            f"{sum(result.failures.values())} of {len(result.observations)} requests failed; they "
            "have no latencies."
        )
        found.append(Verdict(Status.INFO, text, kinds))
    if result.succeeded:
        asked = "" if result.offered is None else f" of {result.offered:.3g} offered"
        asked = asked if result.rate is None else f", {result.rate:.3g} asked for"
        text = (
            f"{result.request_rate:.3g} req/s served{asked}, {shown(result.output_rate)} output "
            "tok/s; "
        )
        text += (
            f"median TTFT {_median_and_tail(result.ttft)}, median TPOT "
            f"{_median_and_tail(result.tpot)}."
        )
        found.append(Verdict(Status.INFO, _void_mark(result) + text))
    if result.goodput is not None:
        found.append(_goodput_verdict(result, result.goodput))
    return found + _doubts(result)


def _median_and_tail(values: Sequence[float]) -> str:
    if not values:
        return "unknown"
    tail = [
        f"p{q} {_ms(percentile(values, q))}" for q in (90, 99) if has_percentile(len(values), q)
    ]
    return f"{_ms(percentile(values, 50))} ms ({', '.join(tail) or f'of {len(values)} requests'})"


def _goodput_verdict(result: LoadResult, goodput: Goodput) -> Verdict:
    if goodput.rate is None or goodput.fraction is None:
        text = f"Goodput for {result.slos} is unknown."
        return Verdict(Status.UNKNOWN, text, "The target does not count its tokens.")
    text = (
        f"Goodput {goodput.rate:.3g} req/s: {goodput.fraction:.0%} of the requests met "
        f"{result.slos}."
    )
    blamed = [
        f"{goodput.by_level[name]} of {goodput.total} requests missed {name} ({phase})"
        for name, phase in BLAMED_PHASE.items()
        if name in goodput.by_level
    ]
    return Verdict(Status.INFO, _void_mark(result) + text, "; ".join(blamed))


def _doubts(result: LoadResult) -> list[Verdict]:
    """Verdicts on limits of the figures' meaning."""
    found = []
    seen = result.succeeded
    cached, prompt = (
        sum(getattr(one, f"num_{name}_tokens") or 0 for one in seen)
        for name in ("cached", "prompt")
    )
    if (
        prompt
        and cached > 0.02 * prompt
        and not any("share prefixes" in note for note in result.notes)
    ):
        text = (
            f"{cached / prompt:.0%} of the prompt tokens came out of the server's prefix cache: "
            "prefill was less."
        )
        reason = (
            "Prompts have unique words; a template before them, or an earlier run with the same "
            "seed, is shared."
        )
        if "sharegpt" in result.conditions.get("trace", ""):
            reason = (
                "Questions of a file may begin alike; a template before them, or an earlier run of "
                "it, is shared."
            )
        found.append((text, reason))
    short = sum(one.finish_reason not in ("length", "") for one in seen)
    if short:
        found.append((f"{short} of {len(seen)} outputs ended before the length asked for.", ""))
    if "broken off" in result.failures:
        reason = (
            "llama-cpp-python does so when another request comes, unless started with "
            "--interrupt_requests False."
        )
        found.append(("Outputs that the server broke off are failures.", reason))
    if late := result.client.connected_late:
        reason = "The client asked for it in time; an overloaded server takes it late."
        found.append(
            (f"{late} requests waited for their connection: it is in their latencies.", reason)
        )
    pieces = sum(len(one.token_times) for one in seen)
    tokens = result.num_output_tokens
    if tokens and tokens > 1.02 * pieces:
        text = (
            f"A piece of output has {tokens / pieces:.2f} tokens on average: ITL is of pieces, "
            "TPOT of tokens."
        )
        found.append((text, "Or tokens have no text, and the server sends nothing for them."))
    return [Verdict(Status.INFO, *texts) for texts in found]


def load_sections(result: LoadResult) -> list[Section]:
    """All sections of one load."""
    tables = [_latencies(result), _throughput(result)]
    if (ledgers := ledger_table(result.succeeded)) is not None:
        tables.append(ledgers)
    if result.facts.kind != SIMULATION:
        tables.append(_client(result))
    if result.failures:
        tables.append(_failures(result))
    paragraphs = (f"{result.workload}; {result.arrivals}.", *notes_of(result))
    title = f"{_void_mark(result)}Load: {result.arrivals}"
    plots = [*latency_plots(result), timeline_plot(result)]
    load = Section(title, load_verdicts(result), paragraphs, tables, plots)
    return [load] if result.facts.kind == SIMULATION else [load, claims_section(result)]


def notes_of(result: LoadResult) -> list[str]:
    """Facts that a reader needs to judge a load, as sentences."""
    return [f"{note[:1].upper()}{note[1:]}." for note in result.notes]


def _latencies(result: LoadResult) -> Table:
    percentiles = [Column(f"p{q}, ms", PERCENTILES) for q in (50, 90, 95, 99)]
    rows = []
    for name, definition in DEFINITIONS.items():
        values = getattr(result, name.lower())
        if values or name != "TTFO":
            tails = (
                _ms(percentile(values, q)) if has_percentile(len(values), q) else "-"
                for q in (90, 95, 99)
            )
            rows.append((name, str(len(values)), _ms(percentile(values, 50)), *tails, definition))
    title = _void_mark(result) + "Latencies of requests that succeeded"
    return table_of(title, ["figure", "n", *percentiles, "definition"], rows)


def _throughput(result: LoadResult) -> Table:
    seconds = "seconds = last end - first intended send"
    goodput = result.goodput
    offered = "req/s: (requests - 1) / (last intended send - first)"
    if result.rate is not None and shown(result.rate) != shown(result.offered):
        offered += f"; random gaps of a mean of {result.rate:.4g} req/s"
    rows = [
        (
            "requests offered",
            shown(result.offered) if result.concurrency is None else "closed loop",
            offered,
        ),
        ("requests served", shown(result.request_rate), f"req/s: succeeded / seconds; {seconds}"),
    ]
    if goodput is not None:
        missed = ", ".join(f"{number} {name}" for name, number in goodput.missed.items()) or "none"
        rows.append(
            ("goodput", shown(goodput.rate), f"req/s: succeeded and {result.slos} / seconds")
        )
        rows.append(("missed", missed, "requests by the levels they missed"))
    rows.append(
        (
            "output",
            shown(result.output_rate),
            "tok/s: output tokens of succeeded requests / seconds",
        )
    )
    reasoning = [
        one.num_reasoning_tokens for one in result.succeeded if one.num_reasoning_tokens is not None
    ]
    if any(reasoning):
        what = (
            f"tokens before the answers, by the target's count of {len(reasoning)} requests; part "
            "of the output"
        )
        rows.append(("reasoning", f"{sum(reasoning):,}", what))
    rows += [
        ("prompt and output", shown(result.total_rate), "tok/s, cached prompt tokens in it"),
        (
            "sent",
            str(len(result.observations)),
            f"requests, of {result.num_requests} in the workload",
        ),
        ("succeeded", str(len(result.succeeded)), "requests"),
        ("seconds", f"{result.seconds:.2f}", seconds),
    ]
    return table_of(f"{_void_mark(result)}Throughput", ["figure", "value", "definition"], rows)


def ledger_table(observations: Iterable[Observation]) -> Table | None:
    """The requests' time by the server's ledgers; None if the server keeps none."""
    totals: Counter[str] = Counter()
    number = 0
    for one in observations:
        ledger = one.claims.get("timings", {}).get("ledger_ms")
        if isinstance(ledger, dict):
            number += 1
            totals.update({kind: spent or 0.0 for kind, spent in ledger.items()})
    whole = sum(totals.values())
    if not whole:
        return None
    rows = [
        (kind, PHASES.get(kind, ""), f"{spent / number:,.2f}", f"{spent / whole:.1%}")
        for kind, spent in totals.most_common()
        if spent >= MIN_LEDGER_SHARE * whole
    ]
    columns = ("part", "phase", Column("ms", "mean over the requests"), "share")
    return table_of(f"Where the time of {number:,} requests went", columns, rows)


def _client(result: LoadResult) -> Table:
    client = result.client
    connect = [
        c
        for one in result.observations
        if (c := one.claims.get("client_connect_seconds")) is not None
    ]
    opening = "opening a connection; part of no latency unless it was there too late"
    if client.connected_late:
        opening += (
            f", as {client.connected_late} were, which were asked for in time: the server took "
            "them slowly"
        )
    beat = (
        f"how late a heartbeat of {1e3 * HEARTBEAT_SECONDS:.0f} ms was at each token; up to 1 ms "
        "is its timer's own"
    )
    lags = [
        ("send lag", client.send_lags, "sent - intended; part of every latency"),
        ("loop lag", client.loop_lags, beat),
        ("connect", connect, opening),
    ]
    rows = [
        (
            name,
            _ms(percentile(values, 50)),
            _ms(percentile(values, 99)),
            _ms(max(values)),
            definition,
        )
        for name, values, definition in lags
        if values
    ]
    rows.append(
        (
            "CPU",
            f"{client.cpu:.2f} cores",
            "",
            "",
            f"of the client's thread; void above {MAX_CORE_SHARE}",
        )
    )
    columns = ("figure", "p50, ms", "p99, ms", "most, ms", "definition")
    return table_of("The client itself", columns, rows)


def _failures(result: LoadResult) -> Table:
    first = {
        failure_kind(one.error): one.error.partition(": ")[2]
        for one in reversed(result.observations)
    }
    rows = [(kind, str(number), first.get(kind, "")) for kind, number in result.failures.items()]
    return table_of("Failures", ["kind", "requests", "the first one"], rows)


def load_metrics(results: Sequence[LoadResult]) -> list[Metric]:
    """The metrics for `bench compare`: one value per run that is neither void nor empty.

    The requests of a run share a queue and depend on each other. If they were treated as
    independent, any two runs would differ.
    """
    runs = [run for run in results if not run.void and run.succeeded]
    found = []
    for name in ("TTFT", "TPOT", "E2E"):
        known = [values for run in runs if (values := getattr(run, name.lower()))]
        for q in (50, 99):
            definition = f"p{q} over a run's requests of {DEFINITIONS[name]}"
            values = tuple(percentile(of_run, q) for of_run in known)
            found.append(Metric(f"{name.lower()}_p{q}_seconds", "s", "lower", values, definition))
    goodput = [run.goodput.rate for run in runs if run.goodput]
    for name, unit, rates, definition in (
        (
            "requests_per_second",
            "req/s",
            [run.request_rate for run in runs],
            "succeeded requests / seconds",
        ),
        (
            "output_tokens_per_second",
            "tok/s",
            [run.output_rate for run in runs],
            "output tokens / seconds",
        ),
        ("goodput", "req/s", goodput, "requests that met the levels / seconds"),
    ):
        values = tuple(rate for rate in rates if rate is not None)
        found.append(Metric(name, unit, "higher", values, f"{definition}, of each run"))
    return [metric for metric in found if metric.values]


def load_data(result: LoadResult) -> dict[str, Any]:
    """All raw data as plain values for JSON."""
    data = {
        name: getattr(result, name)
        for name in (
            "workload",
            "arrivals",
            "rate",
            "concurrency",
            "num_requests",
            "conditions",
            "failures",
        )
    }
    return {
        "target": asdict(result.facts),
        **data,
        "notes": list(result.notes),
        "slos": result.slos.bounds,
        "void": list(result.void),
        "client": asdict(result.client),
        "observations": [asdict(one) for one in result.observations],
    }


def _void_mark(result: LoadResult) -> str:
    """A mark for every figure of a void run, because a reader may see only that figure."""
    return "VOID: " if result.void else ""


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "unknown"
    return f"{1e3 * seconds:,.2f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"
