"""Claim: prefill is bound by arithmetic, decode by memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from twinphase.bench.experiments.experiment import (
    Estimate,
    Experiment,
    Judged,
    Rule,
    exactly,
    median_of,
    point,
    shown,
    unknown,
)
from twinphase.bench.experiments.workbench import QUIET_CORES, Workbench
from twinphase.bench.plots import bars
from twinphase.bench.report import Column, Metric, Plot, Status, Table
from twinphase.phases.hardware import Ceilings, compute_seconds, memory_seconds
from twinphase.phases.report import flops_by_unit
from twinphase.phases.timeline import PhaseTotals, StepRecord

__all__ = ["EXPERIMENT", "Bounds", "PhaseBound", "phase_bound"]

PROMPT = (512, 256, 128, 64)
DECODE_TOKENS = 24
HALF = 0.5  # of the time: from here on a limit explains most of it
NO_CEILING = "This machine's ceilings are unknown."
PREFILL_SIDE, DECODE_SIDE = "prefill: arithmetic over memory", "decode: memory over arithmetic"
MFU, MBU = "prefill's MFU", "decode's MBU"


@dataclass(frozen=True)
class PhaseBound:
    """One phase: how long it took, and how long its arithmetic or its bytes alone would take at the ceilings.

    Attributes:
        tokens: computed.
        seconds: of each repetition.
        flops: what the algorithm needs, by the unit that computes it.
        bytes: likewise, in `steps` steps.
        compute: seconds of the arithmetic at the measured peaks; None is unknown.
        memory: seconds of the bytes at the measured bandwidth; None is unknown.
        outside: share of the time outside of the model's computation: scheduling, bookkeeping.
    """

    tokens: int
    seconds: list[float]
    flops: Mapping[str, int]
    bytes: int
    steps: int
    compute: float | None
    memory: float | None
    outside: float

    def share(self, ideal: float | None) -> list[float]:
        """ideal / seconds of each repetition: MFU or MBU; empty if unknown."""
        return [] if ideal is None else [ideal / one for one in self.seconds]

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return sum(self.flops.values()) / self.bytes

    def under(self, ceilings: Ceilings | None) -> PhaseBound:
        """The same against these ceilings."""
        compute = compute_seconds(self.flops, ceilings)
        return replace(self, compute=compute, memory=memory_seconds(self.bytes, self.bytes / self.steps, ceilings))


@dataclass(frozen=True)
class Bounds:
    """Both phases, and the cores that other programs used meanwhile."""

    prefill: PhaseBound
    decode: PhaseBound
    others: float | None = None


def phase_bound(bench: Workbench, repetitions: Sequence[Sequence[StepRecord]]) -> PhaseBound:
    """What bounds the steps of one phase; every repetition did the same work.

    A repetition's time is that of its steps. Decode steps all do the same work but for a token more of KV: theirs is
    the median step times their number, so that one that was held up does not count.
    """
    first = repetitions[0]
    totals = PhaseTotals()
    for record in first:
        for cost in (record.prefill, record.decode):
            totals.linear_flops += cost.linear_flops
            totals.attention_flops += cost.attention_flops
            totals.bytes += cost.bytes
    taken = sum(record.seconds for records in repetitions for record in records)
    executed = sum(record.executed for records in repetitions for record in records)
    phase = PhaseBound(
        tokens=sum(record.prefill_tokens + record.decode_tokens for record in first),
        seconds=[_seconds(records) for records in repetitions],
        flops=flops_by_unit(totals, bench.workshop.units),
        bytes=totals.bytes,
        steps=len(first),
        compute=None,
        memory=None,
        outside=1 - executed / taken,
    )
    return phase.under(bench.ceilings)


def _seconds(records: Sequence[StepRecord]) -> float:
    seconds = [record.seconds for record in records]
    decode = not any(record.prefill_tokens for record in records)
    return median(seconds) * len(seconds) if decode else sum(seconds)


def _measure(bench: Workbench) -> Bounds:
    length = bench.size("prompt, tokens", PROMPT, lambda n: bench.speed.prefill(n) + bench.speed.decode(DECODE_TOKENS))
    engine = bench.engine()

    def prefill() -> list[StepRecord]:
        engine.submit(bench.workshop.prompt(length), 1)
        return engine.run()

    def decode() -> list[StepRecord]:
        return engine.decode([bench.workshop.prompt(16)], DECODE_TOKENS)

    found = bench.interleave({"prefill": prefill, "decode": decode})
    return Bounds(phase_bound(bench, found["prefill"]), phase_bound(bench, found["decode"]), bench.others)


def _under(found: Bounds, ceilings: Ceilings | None) -> Bounds:
    return replace(found, prefill=found.prefill.under(ceilings), decode=found.decode.under(ceilings))


def _efficiency(phase: PhaseBound, ideal: float | None, others: float | None) -> Estimate:
    if ideal is None:
        return unknown(NO_CEILING)
    estimate = median_of(phase.share(ideal))
    if estimate.value > 1:
        return unknown(f"{estimate.value:.0%} of a ceiling: the count or the ceiling is wrong.")
    if estimate.low < HALF and others is not None and others >= QUIET_CORES:
        # The ceilings are those of the whole machine, which the phase did not have.
        return unknown(f"{estimate.value:.0%}, but other programs used {others:.1f} cores meanwhile.")
    return estimate


def _side(one: float | None, other: float | None) -> Estimate:
    return unknown(NO_CEILING) if one is None or other is None else exactly(one / other)


def _estimates(found: Bounds) -> Mapping[str, Estimate]:
    prefill, decode = found.prefill, found.decode
    return {
        PREFILL_SIDE: _side(prefill.compute, prefill.memory).at(prefill.tokens),
        DECODE_SIDE: _side(decode.memory, decode.compute),
        MFU: _efficiency(prefill, prefill.compute, found.others).at(prefill.tokens),
        MBU: _efficiency(decode, decode.memory, found.others),
    }


def _why(found: Bounds, judged: Sequence[Judged]) -> Sequence[str]:
    prefill, decode = found.prefill, found.decode
    sentences = [
        f"Prefill does {prefill.intensity:,.0f} FLOP for every byte it must move, decode {decode.intensity:.1f}: the "
        f"weights are read once a step, for {prefill.tokens:,} tokens in the one and for a single one in the other."
    ]
    for name, phase, ideal, ceiling in (
        ("Prefill", prefill, prefill.compute, "arithmetic peak"),
        ("Decode", decode, decode.memory, "bandwidth"),
    ):
        if ideal is not None:
            took, best = median_of(phase.seconds).value * 1e3 / phase.tokens, ideal * 1e3 / phase.tokens
            sentences.append(
                f"{name} took {took:.3g} ms a token; at the {ceiling} it would be {best:.3g} ms. "
                f"Scheduling and bookkeeping are {phase.outside:.1%} of the time."
            )
    if any(one.status is Status.FAILS and one.rule.name in (MFU, MBU) for one in judged):
        sentences.append(
            "Where a ceiling explains less than half of the time, neither limit binds: the rest is work that FLOP and "
            "bytes do not count (unpacking 4-bit weights, quantizing activations, norms, softmax, waiting between "
            "threads)."
        )
    return sentences


def _tables(found: Bounds) -> Sequence[Table]:
    columns = (
        Column("phase"),
        Column("time, ms", "median of the repetitions and its interval"),
        Column("arithmetic, ms", "sum over units of FLOP / measured peak"),
        Column("memory, ms", "(weights once a step + KV read and written) / bandwidth for that working set"),
        Column("MFU", "arithmetic / time"),
        Column("MBU", "memory / time"),
        Column("FLOP a byte", "arithmetic intensity"),
    )

    def cells(name: str, phase: PhaseBound) -> tuple[str, ...]:
        ideal = ["unknown" if one is None else f"{one * 1e3:.3g}" for one in (phase.compute, phase.memory)]
        shares = [
            f"{median_of(phase.share(one)).value:.0%}" if one is not None else "unknown"
            for one in (phase.compute, phase.memory)
        ]
        return (
            f"{name}, {phase.tokens:,} tokens",
            shown(phase.seconds, 1e3),
            *ideal,
            *shares,
            f"{phase.intensity:.3g}",
        )

    return (
        Table("Time against the ceilings", columns, (cells("prefill", found.prefill), cells("decode", found.decode))),
    )


def _plots(found: Bounds) -> Sequence[Plot]:
    rows = []
    for name, phase in (("prefill", found.prefill), ("decode", found.decode)):
        for what, ideal in (("MFU: arithmetic", phase.compute), ("MBU: memory", phase.memory)):
            if ideal is not None:
                rows.append({"limit": f"{name}, {what}", **point(phase.share(ideal), "per cent of the ceiling", 100)})
    return (
        bars(
            "bounds",
            "How much of each ceiling a phase uses",
            rows,
            ("limit", ""),
            ("per cent of the ceiling", "of this machine's measured ceiling, %"),
            order=[str(row["limit"]) for row in rows],
            caption="A phase is bound by the ceiling that it comes closest to, if that explains at least half of its "
            "time.",
        ),
    )


def _metrics(found: Bounds) -> Sequence[Metric]:
    mfu, mbu = found.prefill.share(found.prefill.compute), found.decode.share(found.decode.memory)
    return [
        Metric("prefill_mfu", "fraction", "higher", tuple(mfu), "arithmetic at the measured peaks / time"),
        Metric("decode_mbu", "fraction", "higher", tuple(mbu), "bytes at the measured bandwidth / time"),
    ]


EXPERIMENT = Experiment(
    name="bounds",
    claim="Prefill is bound by arithmetic; decode is bound by memory bandwidth.",
    method="One prompt read, and tokens decoded alone; FLOP and bytes by the model's shape, against ceilings measured "
    "on this machine.",
    rules=(
        Rule(
            PREFILL_SIDE,
            "time of its FLOP at the peak / time of its bytes at the bandwidth",
            at_least=1,
            fails_from=256,
            sized_in="prompt tokens",
        ),
        Rule(
            MFU,
            "time of its FLOP at the peak / time taken; from half on, arithmetic explains most",
            HALF,
            1,
            "%",
            fails_from=256,
            sized_in="prompt tokens",
        ),
        Rule(DECODE_SIDE, "time of its bytes at the bandwidth / time of its FLOP at the peak", at_least=1),
        Rule(MBU, "time of its bytes at the bandwidth / time taken; from half on, memory explains most", HALF, 1, "%"),
    ),
    meaning="A faster processor shortens the wait for the first token; faster memory, or fewer bytes, the stream "
    "after it.",
    share=0.8,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
    metrics=_metrics,
    under=_under,
)
