"""A load, or a sweep of loads, as sections of a report: verdicts, tables with their definitions, plots, metrics.

Not for running loads (`load.py`, `saturation.py`) nor for what servers claim (`foreign_claims.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from twinphase.bench.client.health import CPU_OF_CORE, HEARTBEAT_SECONDS
from twinphase.bench.load.plots import latency_plots, sweep_plots, timeline_plot
from twinphase.bench.load.run import LoadResult
from twinphase.bench.load.saturation import SweepResult
from twinphase.bench.load.slo import PHASES
from twinphase.bench.report.report import Column, Metric, Section, Status, Table, Verdict
from twinphase.bench.statistics import Summary, has_percentile, percentile, summary
from twinphase.bench.targets.claims import claims_section

__all__ = [
    "load_data",
    "load_metrics",
    "load_sections",
    "load_verdicts",
    "sweep_data",
    "sweep_metrics",
    "sweep_sections",
    "sweep_verdicts",
]

DEFINITIONS = {
    "TTFT": "first piece of output at the client - intended send; queue and network in it, opening the connection not",
    "TPOT": "(last token - first piece) / (output tokens - 1), of each request; tokens by the target's count",
    "ITL": "gap between consecutive pieces of output, pooled over all requests, not divided by the tokens in a piece",
    "E2E": "last token - intended send; with fewer pieces than tokens, the last is taken to come when the target says "
    "that it has finished",
    "TTFO": "first piece of the answer itself - intended send, of requests that reasoned first",
}
PERCENTILES = "nearest rank: a value that occurred; p50 is the median; -: so few values have none but their highest"


def load_verdicts(result: LoadResult) -> tuple[Verdict, ...]:
    """What is to be known first: whether the figures count, failures, and the figures."""
    found = [Verdict(Status.VOID, "The client was the limit: this load is void.", fault) for fault in result.void]
    sent = len(result.observations)
    if result.failures:
        kinds = ", ".join(f"{number} x {kind}" for kind, number in result.failures.items())
        number = sum(result.failures.values())
        found.append(Verdict(Status.INFO, f"{number} of {sent} requests failed; they have no latencies.", kinds))
    if result.succeeded:
        ttft, tpot = summary(result.ttft), summary(result.tpot)
        text = f"{result.request_rate:.3g} req/s served"
        if result.rate is not None and math.isfinite(result.rate):
            text += f", {result.rate:.3g} asked for"
        elif result.offered is not None:
            text += f" of {result.offered:.3g} offered"
        text += f", {_number(result.output_rate)} output tok/s; median TTFT {_ms(ttft.median)} ms{_p99(ttft)}"
        text += f", median TPOT {_ms(tpot.median)} ms{_p99(tpot)}."
        found.append(Verdict(Status.INFO, _void_mark(result) + text))
    goodput = result.goodput
    if goodput is not None:
        found.append(_goodput_verdict(result))
    return (*found, *_doubts(result))


def _goodput_verdict(result: LoadResult) -> Verdict:
    goodput = result.goodput
    assert goodput is not None
    if goodput.rate is None or goodput.fraction is None:
        return Verdict(
            Status.UNKNOWN, f"Goodput for {result.slos} is unknown.", "The target does not count its tokens."
        )
    text = f"Goodput {goodput.rate:.3g} req/s: {goodput.fraction:.0%} of the requests met {result.slos}."
    late = {name: goodput.by_level[name] for name in PHASES if name in goodput.by_level}
    everyone = len(result.observations)
    blamed = [f"{number} of {everyone} requests missed {name} ({PHASES[name]})" for name, number in late.items()]
    return Verdict(Status.INFO, _void_mark(result) + text, "; ".join(blamed))


def _doubts(result: LoadResult) -> list[Verdict]:
    """What makes the figures say less than they seem to."""
    found, seen = [], result.succeeded
    cached = sum(one.num_cached_tokens or 0 for one in seen)
    prompt = sum(one.num_prompt_tokens or 0 for one in seen)
    if prompt and cached > 0.02 * prompt and not any("share prefixes" in note for note in result.notes):
        text = f"{cached / prompt:.0%} of the prompt tokens came out of the server's prefix cache: prefill was less."
        reason = "Prompts have unique words; a template before them, or an earlier run with the same seed, is shared."
        if "sharegpt" in result.conditions.get("trace", ""):
            reason = "Questions of a file may begin alike; a template before them, or an earlier run of it, is shared."
        found.append(Verdict(Status.INFO, text, reason))
    short = sum(one.finish_reason not in ("length", "") for one in seen)
    if short:
        found.append(Verdict(Status.INFO, f"{short} of {len(seen)} outputs ended before the length asked for."))
    if any(kind == "broken off" for kind in result.failures):
        text = "Outputs that the server broke off are failures."
        reason = "llama-cpp-python does, when another request comes, unless started with --interrupt_requests False."
        found.append(Verdict(Status.INFO, text, reason))
    if result.client.connected_late:
        text = f"{result.client.connected_late} requests waited for their connection: it is in their latencies."
        found.append(Verdict(Status.INFO, text, "The client asked for it in time; an overloaded server takes it late."))
    pieces, tokens = sum(len(one.token_times) for one in seen), result.num_output_tokens
    if tokens and tokens > 1.02 * pieces:
        text = f"A piece of output has {tokens / pieces:.2f} tokens on average: ITL is of pieces, TPOT of tokens."
        reason = "Or tokens have no text, and the server sends nothing for them."
        found.append(Verdict(Status.INFO, text, reason))
    return found


def load_sections(result: LoadResult) -> tuple[Section, ...]:
    """Everything of one load."""
    tables: tuple[Table, ...] = (_latencies(result), _throughput(result), _client(result))
    if result.failures:
        tables = (*tables, _failures(result))
    paragraphs = (
        f"{result.workload}; {result.arrivals}.",
        *(f"{note[:1].upper()}{note[1:]}." for note in result.notes),
    )
    title = f"{_void_mark(result)}Load: {result.arrivals}"
    first = Section(title, load_verdicts(result), paragraphs, tables, (*latency_plots(result), timeline_plot(result)))
    return (first, claims_section(result))


def _latencies(result: LoadResult) -> Table:
    columns = (Column("figure"), Column("n"), *(Column(f"{p}, ms", PERCENTILES) for p in ("p50", "p90", "p95", "p99")))
    rows = []
    figures = [("TTFT", result.ttft), ("TPOT", result.tpot), ("ITL", result.itl), ("E2E", result.e2e)]
    for name, values in figures + ([("TTFO", result.ttfo)] if result.ttfo else []):
        s = summary(values)
        tails = (_tail(s, q, value) for q, value in ((90, s.p90), (95, s.p95), (99, s.p99)))
        rows.append((name, str(s.n), _ms(s.median), *tails, DEFINITIONS[name]))
    return Table(
        _void_mark(result) + "Latencies of requests that succeeded", (*columns, Column("definition")), tuple(rows)
    )


def _throughput(result: LoadResult) -> Table:
    sent, seconds = len(result.observations), "seconds = last end - first intended send"
    goodput = result.goodput
    offered = "req/s: (requests - 1) / (last intended send - first)"
    if result.rate is not None and _number(result.rate) != _number(result.offered):
        offered += f"; random gaps of a mean of {result.rate:.4g} req/s"
    rows = [
        ("requests offered", _number(result.offered) if result.concurrency is None else "closed loop", offered),
        ("requests served", _number(result.request_rate), f"req/s: succeeded / seconds; {seconds}"),
        ("output", _number(result.output_rate), "tok/s: output tokens of succeeded requests / seconds"),
        *_reasoning(result),
        ("prompt and output", _number(result.total_rate), "tok/s, cached prompt tokens in it"),
        ("sent", str(sent), f"requests, of {result.num_requests} in the workload"),
        ("succeeded", str(len(result.succeeded)), "requests"),
        ("seconds", f"{result.seconds:.2f}", seconds),
    ]
    if goodput is not None:
        rate = "unknown" if goodput.rate is None else f"{goodput.rate:.3g}"
        rows.insert(2, ("goodput", rate, f"req/s: succeeded and {result.slos} / seconds"))
        missed = ", ".join(f"{number} {name}" for name, number in goodput.missed.items()) or "none"
        rows.insert(3, ("missed", missed, "requests by the levels they missed"))
    return Table(
        _void_mark(result) + "Throughput", (Column("figure"), Column("value"), Column("definition")), tuple(rows)
    )


def _reasoning(result: LoadResult) -> list[tuple[str, str, str]]:
    counts = [one.num_reasoning_tokens for one in result.succeeded if one.num_reasoning_tokens is not None]
    if not any(counts):
        return []
    told = f"by the target's count, of {len(counts)} requests that have one; part of the output"
    return [("reasoning", f"{sum(counts):,}", f"tokens before the answers, {told}")]


def _client(result: LoadResult) -> Table:
    client = result.client
    send, loop = summary(client.send_lags), summary(client.loop_lags)
    connect = [c for one in result.observations if (c := one.claims.get("client_connect_seconds")) is not None]
    columns = (Column("figure"), Column("p50, ms"), Column("p99, ms"), Column("most, ms"), Column("definition"))
    beat = f"how late a heartbeat of {1e3 * HEARTBEAT_SECONDS:.0f} ms was at each token; up to 1 ms is its timer's own"
    rows = [
        ("send lag", _ms(send.median), _ms(send.p99), _ms(send.highest), "sent - intended; part of every latency"),
        ("loop lag", _ms(loop.median), _ms(loop.p99), _ms(loop.highest), beat),
        ("CPU", f"{client.cpu:.2f} cores", "", "", f"of the client's thread; void above {CPU_OF_CORE}"),
    ]
    if connect:
        c = summary(connect)
        what = "opening a connection; part of no latency unless it was there too late"
        if client.connected_late:
            what += f", as {client.connected_late} were, which were asked for in time: the server took them slowly"
        rows.append(("connect", _ms(c.median), _ms(c.p99), _ms(c.highest), what))
    return Table("The client itself", columns, tuple(rows))


def _failures(result: LoadResult) -> Table:
    rows = []
    for kind, number in result.failures.items():
        example = next(one.error for one in result.observations if (one.error or "no output").startswith(kind))
        rows.append((kind, str(number), example.partition(": ")[2]))
    return Table("Failures", (Column("kind"), Column("requests"), Column("the first one")), tuple(rows))


def load_metrics(results: LoadResult | Sequence[LoadResult], point: str = "") -> tuple[Metric, ...]:
    """What `bench compare` compares: one value a run, so that how runs differ is in it.

    The requests of a run wait in one queue and depend on each other; as if independent, they would make any two runs
    differ.

    Args:
        results: of a load, or of its repetitions; those that are void or empty give nothing.
        point: in the names, "rate=4" for instance, where a report has several loads.
    """
    runs = [results] if isinstance(results, LoadResult) else list(results)
    runs = [run for run in runs if not run.void and run.succeeded]
    at = f"[{point}]" if point else ""
    found = []
    for name in ("TTFT", "TPOT", "E2E"):
        of_runs = [values for run in runs if (values := getattr(run, name.lower()))]
        for word, q in (("p50", 50), ("p99", 99)):
            values = tuple(percentile(of_run, q) for of_run in of_runs)
            definition = f"{word} over a run's requests of {DEFINITIONS[name]}"
            found.append(Metric(f"{name.lower()}_{word}_seconds{at}", "s", "lower", values, definition))
    for name, unit, rates, definition in (
        ("requests_per_second", "req/s", [run.request_rate for run in runs], "succeeded requests / seconds"),
        ("output_tokens_per_second", "tok/s", [run.output_rate for run in runs], "output tokens / seconds"),
        ("goodput", "req/s", [_goodput_rate(run) for run in runs], "requests that met the levels / seconds"),
    ):
        known = tuple(rate for rate in rates if rate is not None)
        found.append(Metric(f"{name}{at}", unit, "higher", known, f"{definition}, of each run"))
    return tuple(metric for metric in found if metric.values)


def _goodput_rate(result: LoadResult) -> float | None:
    return None if result.goodput is None else result.goodput.rate


def load_data(result: LoadResult) -> dict[str, Any]:
    """Everything raw, plain values for JSON."""
    return {
        "target": asdict(result.facts),
        "workload": result.workload,
        "arrivals": result.arrivals,
        "rate": result.rate,
        "concurrency": result.concurrency,
        "num_requests": result.num_requests,
        "conditions": dict(result.conditions),
        "notes": list(result.notes),
        "slos": result.slos.bounds,
        "void": list(result.void),
        "failures": result.failures,
        "client": asdict(result.client),
        "observations": [asdict(one) for one in result.observations],
    }


def sweep_verdicts(sweep: SweepResult) -> tuple[Verdict, ...]:
    """Where the target saturates, and what it serves within its levels."""
    unit = "req/s" if sweep.plan.mode == "rate" else "at once"
    found = []
    if sweep.capacity is not None and sweep.saturated_at is not None:
        text = f"Serves {sweep.capacity:.3g} {unit}, saturated at {sweep.saturated_at:.3g}."
        found.append(Verdict(Status.INFO, text, sweep.stopped))
    else:
        found.append(Verdict(Status.UNKNOWN, "Where the target saturates is not known.", sweep.stopped))
    best = sweep.best_goodput
    if best is not None and best.result.goodput is not None and best.result.goodput.rate is not None:
        goodput = best.result.goodput
        text = f"Highest goodput {goodput.rate:.3g} req/s, at {best.value:.3g} {unit} ({best.result.slos})."
        found.append(Verdict(Status.INFO, text))
    found += [Verdict(Status.VOID, "Alone is void.", fault) for fault in sweep.alone.void]
    for point in sweep.ordered:
        found += [Verdict(Status.VOID, f"{point.value:.3g} {unit} is void.", fault) for fault in point.result.void]
    return tuple(found)


def sweep_sections(sweep: SweepResult) -> tuple[Section, ...]:
    """The whole sweep; a table with a row for each load, and the loads' latencies against it."""
    unit = "rate, req/s" if sweep.plan.mode == "rate" else "concurrency"
    columns = (
        Column(unit),
        Column("n", "requests sent"),
        Column("served, req/s", "succeeded / (last end - first intended send)"),
        Column("output, tok/s"),
        Column("TTFT p50, ms", DEFINITIONS["TTFT"]),
        Column("TTFT p99, ms", PERCENTILES),
        Column("TPOT p50, ms", DEFINITIONS["TPOT"]),
        Column("TPOT p99, ms", PERCENTILES),
        Column("goodput, req/s", str(sweep.alone.slos) or "no service levels were given"),
        Column("failed"),
        Column("verdict"),
    )
    rows = [_sweep_row("alone", sweep.alone, "")]
    rows += [_sweep_row(f"{point.value:.3g}", point.result, point.saturated, point.untold) for point in sweep.ordered]
    table = Table("Loads", columns, tuple(rows))
    paragraph = f"{sweep.alone.workload.partition(', ')[2]}. The sweep ended: {sweep.stopped}."
    return (Section("Sweep to saturation", sweep_verdicts(sweep), (paragraph,), (table,), sweep_plots(sweep)),)


def _sweep_row(name: str, result: LoadResult, saturated: str, untold: str = "") -> tuple[str, ...]:
    ttft, tpot, goodput = summary(result.ttft), summary(result.tpot), result.goodput
    good = "" if goodput is None else _number(goodput.rate)
    verdict = f"saturated: {saturated}" if saturated else "served"
    verdict = "void" if result.void else (f"unknown: {untold}" if untold else verdict)
    cells = (_ms(ttft.median), _tail(ttft, 99, ttft.p99), _ms(tpot.median), _tail(tpot, 99, tpot.p99))
    failed = sum(result.failures.values())
    served, output = _number(result.request_rate), _number(result.output_rate)
    return (name, str(len(result.observations)), served, output, *cells, good, str(failed), verdict)


def sweep_metrics(sweep: SweepResult) -> tuple[Metric, ...]:
    """Of each load, and the capacity found."""
    name = sweep.plan.mode
    found = [metric for value, runs in sweep.runs.items() for metric in load_metrics(runs, f"{name}={value:.4g}")]
    if sweep.capacity is not None and sweep.saturated_at is not None:
        unit = "req/s" if name == "rate" else "requests"
        definition = f"highest {name} below every saturated one"
        found.append(Metric(f"capacity_{name}", unit, "higher", (sweep.capacity,), definition))
    return tuple(found)


def sweep_data(sweep: SweepResult) -> dict[str, Any]:
    """Everything raw, plain values for JSON."""
    points: Sequence[Any] = sweep.points
    return {
        "plan": asdict(sweep.plan),
        "stopped": sweep.stopped,
        "alone": load_data(sweep.alone),
        "points": [
            {"value": p.value, "saturated": p.saturated, "untold": p.untold, **load_data(p.result)} for p in points
        ],
    }


def _void_mark(result: LoadResult) -> str:
    """Before every figure of a run that is void, as a reader may see nothing else of it."""
    return "VOID: " if result.void else ""


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "unknown"
    return f"{1e3 * seconds:,.2f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def _tail(of: Summary, q: int, value: float) -> str:
    """A percentile that so many values can have; p99 of three would be the highest by another name."""
    return _ms(value) if not of.n or has_percentile(of.n, q) else "-"


def _p99(of: Summary) -> str:
    return f" (p99 {_ms(of.p99)})" if has_percentile(of.n, 99) else f" (of {of.n} requests)"


def _number(value: float | None) -> str:
    return "unknown" if value is None or math.isnan(value) else f"{value:,.4g}"
