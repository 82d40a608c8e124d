"""Claim: a busy queue delays the first token and leaves the stream alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, median_of, ratio_of
from twinphase.bench.lab.figures import points, shown
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.report.plots import bars
from twinphase.bench.report.report import Column, Plot, Table
from twinphase.bench.statistics import percentile

__all__ = ["Burst", "Queue"]

REQUESTS = (16, 12, 8, 4)
PROMPT, OUTPUT, SEATS = 96, 16, 2
KINDS = ("queue", "prefill", "prefill_wait", "decode", "batching", "stall")
ALONE, SEATED, TOGETHER = "one request alone", f"a burst, {SEATS} run at once", "a burst, all run at once"
TTFT = Rule(
    "TTFT in the burst / alone",
    "median TTFT of a burst under continuous batching / of one request alone",
    at_least=2,
    fails_from=8,
    sized_in="requests",
)
TPOT = Rule(
    "TPOT in the burst / alone",
    "median TPOT of a burst under continuous batching / of one request alone",
    at_most=1.2,
)


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
class Queue(Experiment):
    """Bursts of each repetition, by how they ran."""

    name = "queue"
    claim = "A busy machine delays the first token and leaves the stream after it alone."
    method = f"One request alone; a burst of requests of which all may run at once; and the same with {SEATS} at once."
    rules = (TTFT, TPOT)
    meaning = (
        "Under load look at both figures: max_num_seqs chooses whether users wait before their stream or during it."
    )
    share = 1.8

    requests: int
    bursts: dict[str, list[Burst]]

    @classmethod
    def measure(cls, bench: Workbench) -> Queue:
        """Requests that come at the same moment, and one that comes alone."""
        speed, workshop = bench.speed, bench.workshop
        requests = bench.size(
            "requests in a burst",
            REQUESTS,
            lambda n: 2 * n * speed.prefill(PROMPT) + speed.decode(OUTPUT, n) + n / SEATS * speed.decode(OUTPUT, SEATS),
            room=min(workshop.config.max_num_seqs, workshop.capacity // (PROMPT + OUTPUT + 32)),
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
            return Burst(
                percentile([ticket.ttft for ticket in tickets], 50),
                percentile([ticket.tpot for ticket in tickets], 50),
                {kind: sum(one[kind] for one in totals) / count for kind in KINDS},
            )

        return cls(requests, bench.interleave({name: partial(burst, name) for name in engines}))

    @property
    def ttft(self) -> dict[str, list[float]]:
        """By how they ran."""
        return {name: [one.ttft for one in many] for name, many in self.bursts.items()}

    @property
    def tpot(self) -> dict[str, list[float]]:
        """By how they ran."""
        return {name: [one.tpot for one in many] for name, many in self.bursts.items()}

    def ledger(self, name: str) -> dict[str, float]:
        """Milliseconds of a request by kind of interval."""
        return {kind: median_of([one.ledger[kind] for one in self.bursts[name]]).value * 1e3 for kind in KINDS}

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Of the burst of which all may run, against one request alone."""
        return {
            TTFT: ratio_of(self.ttft[TOGETHER], self.ttft[ALONE]).at(self.requests),
            TPOT: ratio_of(self.tpot[TOGETHER], self.tpot[ALONE]),
        }

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """Where a queue in the strict sense would leave the stream alone, and what batching does instead."""
        seated, parts = ratio_of(self.tpot[SEATED], self.tpot[ALONE]), self.ledger(TOGETHER)
        return [
            f"A queue in the strict sense, with {SEATS} running at once and the others waiting: TPOT "
            f"{seated.value:.2f} times that of one request alone, {self.ledger(SEATED)['queue']:,.0f} ms of queue "
            "before the first token.",
            "Continuous batching lets a request in as soon as a step has room, so most of the wait for the first token "
            f"is others' prefill ({parts['prefill_wait']:,.0f} ms of prefill_wait, {parts['queue']:,.0f} ms of "
            "queue), and those who run pay with their streams: others' decodes added "
            f"{parts['batching']:,.0f} ms to each request (batching) and others' prefill chunks "
            f"{parts['stall']:,.0f} ms (stall), where its own decode takes {parts['decode']:,.0f} ms.",
        ]

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("load"),
            Column("TTFT, ms", "median over the requests, then median over the repetitions and its interval"),
            Column("TPOT, ms", "(last token - first) / (output tokens - 1), likewise"),
        )
        rows = tuple((name, shown(self.ttft[name], 1e3), shown(self.tpot[name], 1e3)) for name in self.bursts)
        return (Table(f"{self.requests} requests at the same moment", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        ledger = [
            {"load": name, "milliseconds": milliseconds, "interval": kind}
            for name in self.bursts
            for kind, milliseconds in self.ledger(name).items()
        ]
        return (
            bars(
                "queue",
                "Where a request's time goes in a burst",
                ledger,
                ("load", ""),
                ("milliseconds", "mean time of a request, ms"),
                part="interval",
                order=list(self.bursts),
                caption="The engine's ledger: intervals that partition the life of every request.",
            ),
            bars(
                "queue_tpot",
                "Time between tokens by load",
                points(self.tpot, "load", "milliseconds", 1e3),
                ("load", ""),
                ("milliseconds", "TPOT, ms"),
                order=list(self.bursts),
                caption="Medians with intervals.",
            ),
        )
