"""Claim: a busy queue delays the first token and leaves the stream alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, median_of, point, ratio_of, shown
from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.plots import bars
from twinphase.bench.report import Column, Plot, Table
from twinphase.bench.statistics import percentile

__all__ = ["EXPERIMENT", "Burst", "Queue"]

REQUESTS = (16, 12, 8, 4)
PROMPT, OUTPUT, SEATS = 96, 16, 2
KINDS = ("queue", "prefill", "prefill_wait", "decode", "batching", "stall")
ALONE, SEATED, TOGETHER = "one request alone", f"a burst, {SEATS} run at once", "a burst, all run at once"
TTFT, TPOT = "TTFT in the burst / alone", "TPOT in the burst / alone"


@dataclass(frozen=True)
class Burst:
    """Requests that came at the same moment: medians over them, seconds.

    Attributes:
        ttft, tpot: client-side.
        ledger: mean seconds of a request by kind of interval.
    """

    ttft: float
    tpot: float
    ledger: dict[str, float]


@dataclass(frozen=True)
class Queue:
    """Bursts of each repetition, by how they ran."""

    requests: int
    bursts: dict[str, list[Burst]]


def _measure(bench: Workbench) -> Queue:
    speed, workshop = bench.speed, bench.workshop
    room = min(workshop.config.max_num_seqs, workshop.capacity // (PROMPT + OUTPUT + 32))
    requests = bench.size(
        "requests in a burst",
        REQUESTS,
        lambda n: 2 * n * speed.prefill(PROMPT) + speed.decode(OUTPUT, n) + n / SEATS * speed.decode(OUTPUT, SEATS),
        room,
    )
    engines = {
        ALONE: (bench.engine(), 1),
        SEATED: (bench.engine(max_num_seqs=SEATS), requests),
        TOGETHER: (bench.engine(), requests),
    }

    def burst(name: str) -> Burst:
        engine, count = engines[name]
        tickets = [engine.submit(workshop.prompt(PROMPT), OUTPUT) for _ in range(count)]
        engine.run()
        engine.clear()
        totals = [ticket.timeline.totals() for ticket in tickets]
        ledger = {kind: sum(one[kind] for one in totals) / count for kind in KINDS}
        return Burst(
            percentile([ticket.ttft for ticket in tickets], 50),
            percentile([ticket.tpot for ticket in tickets], 50),
            ledger,
        )

    return Queue(requests, bench.interleave({name: partial(burst, name) for name in engines}))


def _estimates(found: Queue) -> Mapping[str, Estimate]:
    alone, busy = found.bursts[ALONE], found.bursts[TOGETHER]
    return {
        TTFT: ratio_of([one.ttft for one in busy], [one.ttft for one in alone]).at(found.requests),
        TPOT: ratio_of([one.tpot for one in busy], [one.tpot for one in alone]),
    }


def _ledger(found: Queue, name: str, kind: str) -> float:
    return median_of([one.ledger[kind] for one in found.bursts[name]]).value


def _why(found: Queue, judged: Sequence[Judged]) -> Sequence[str]:
    bursts = found.bursts
    seated = ratio_of([one.tpot for one in bursts[SEATED]], [one.tpot for one in bursts[ALONE]])
    parts = {kind: _ledger(found, TOGETHER, kind) * 1e3 for kind in KINDS}
    return [
        f"A queue in the strict sense, with {SEATS} running at once and the others waiting: TPOT {seated.value:.2f} "
        "times that of "
        f"one request alone, {_ledger(found, SEATED, 'queue') * 1e3:,.0f} ms of `queue` before the first token.",
        "Continuous batching lets a request in as soon as a step has room, so most of the wait for the first token is "
        f"others' prefill ({parts['prefill_wait']:,.0f} ms of `prefill_wait`, {parts['queue']:,.0f} ms of `queue`), "
        "and "
        f"those who run pay with their streams: others' decodes added {parts['batching']:,.0f} ms to each request "
        f"(`batching`) and others' prefill chunks {parts['stall']:,.0f} ms (`stall`), where its own decode takes "
        f"{parts['decode']:,.0f} ms.",
    ]


def _tables(found: Queue) -> Sequence[Table]:
    columns = (
        Column("load"),
        Column("TTFT, ms", "median over the requests, then median over the repetitions and its interval"),
        Column("TPOT, ms", "(last token - first) / (output tokens - 1), likewise"),
    )
    rows = tuple(
        (name, shown([one.ttft for one in values], 1e3), shown([one.tpot for one in values], 1e3))
        for name, values in found.bursts.items()
    )
    return (Table(f"{found.requests} requests at the same moment", columns, rows),)


def _plots(found: Queue) -> Sequence[Plot]:
    ledger = [
        {"load": name, "milliseconds": _ledger(found, name, kind) * 1e3, "interval": kind}
        for name in found.bursts
        for kind in KINDS
    ]
    tpot = [
        {"load": name, **point([one.tpot for one in values], "milliseconds", 1e3)}
        for name, values in found.bursts.items()
    ]
    return (
        bars(
            "queue",
            "Where a request's time goes in a burst",
            ledger,
            ("load", ""),
            ("milliseconds", "mean time of a request, ms"),
            part="interval",
            order=list(found.bursts),
            caption="The engine's ledger: intervals that partition the life of every request.",
        ),
        bars(
            "queue_tpot",
            "Time between tokens by load",
            tpot,
            ("load", ""),
            ("milliseconds", "TPOT, ms"),
            order=list(found.bursts),
            caption="Medians with intervals.",
        ),
    )


EXPERIMENT = Experiment(
    name="queue",
    claim="A busy machine delays the first token and leaves the stream after it alone.",
    method=f"One request alone; a burst of requests of which all may run at once; and the same with {SEATS} at once.",
    rules=(
        Rule(
            TTFT,
            "median TTFT of a burst under continuous batching / of one request alone",
            at_least=2,
            fails_from=8,
            sized_in="requests",
        ),
        Rule(TPOT, "median TPOT of a burst under continuous batching / of one request alone", at_most=1.2),
    ),
    meaning="Under load look at both figures: max_num_seqs chooses whether users wait before their stream or during "
    "it.",
    share=1.8,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
)
