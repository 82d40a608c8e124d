"""Claim: prefill handles tokens many times faster than decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.bench.experiments.bounds import PhaseBound, phase_bound
from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, point, ratio_of, shown
from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.plots import bars
from twinphase.bench.report import Column, Plot, Table
from twinphase.phases.timeline import StepRecord

__all__ = ["EXPERIMENT", "PhaseRatio"]

PROMPT = (512, 256, 128, 64)
STEPS = 24
RATIO = "prefill's token rate / decode's"


@dataclass(frozen=True)
class PhaseRatio:
    """The same context for both: a prompt is read, then tokens are decoded behind it."""

    prefill: PhaseBound
    decode: PhaseBound

    def rates(self, phase: PhaseBound) -> list[float]:
        """Tokens a second of each repetition."""
        return [phase.tokens / seconds for seconds in phase.seconds]

    @property
    def possible(self) -> float | None:
        """The ratio if both phases ran at the ceilings; None if those are unknown."""
        p, d = self.prefill, self.decode
        if p.compute is None or p.memory is None or d.compute is None or d.memory is None:
            return None
        return (max(d.compute, d.memory) / d.tokens) / (max(p.compute, p.memory) / p.tokens)


def _measure(bench: Workbench) -> PhaseRatio:
    length = bench.size("prompt, tokens", PROMPT, lambda n: bench.speed.prefill(n) + bench.speed.decode(STEPS))
    engine = bench.engine()

    def both() -> tuple[list[StepRecord], list[StepRecord]]:
        ticket = engine.submit(bench.workshop.prompt(length), STEPS + 1)
        engine.run_until(lambda: bool(ticket.times))
        prefill = list(engine.records)
        engine.records.clear()
        decode = engine.run()
        engine.clear()
        return prefill, decode

    found = bench.interleave({"both": both})["both"]
    return PhaseRatio(phase_bound(bench, [one for one, _ in found]), phase_bound(bench, [one for _, one in found]))


def _estimates(found: PhaseRatio) -> Mapping[str, Estimate]:
    return {RATIO: ratio_of(found.rates(found.prefill), found.rates(found.decode)).at(found.prefill.tokens)}


def _why(found: PhaseRatio, judged: Sequence[Judged]) -> Sequence[str]:
    sentences = [
        f"Prefill reads the weights once for {found.prefill.tokens:,} tokens, decode once for each token: while "
        "memory is "
        "the limit, more tokens in a step are free. They stop being free when arithmetic becomes the limit."
    ]
    if found.possible is not None:
        sentences.append(
            f"With both phases exactly at this machine's measured ceilings the ratio would be {found.possible:.3g}: "
            "that "
            "is its balance of arithmetic and bandwidth with these weights, and a phase that stays farther below its "
            "ceiling than the other moves the ratio. An accelerator does 100 to 300 operations in the time of reading "
            "a "
            "byte, hence the ratios of 100 and more that people quote; fewer bits a weight make decode faster and the "
            "ratio smaller."
        )
    return sentences


def _tables(found: PhaseRatio) -> Sequence[Table]:
    columns = (Column("phase"), Column("tokens/s", "tokens computed / time of their steps; median and interval"))
    rows = tuple(
        (f"{name}, {phase.tokens:,} tokens", shown(found.rates(phase)))
        for name, phase in (("prefill", found.prefill), ("decode", found.decode))
    )
    return (Table("Token rates of one request alone", columns, rows),)


def _plots(found: PhaseRatio) -> Sequence[Plot]:
    rows = [
        {"phase": name, **point(found.rates(phase), "tokens/s")}
        for name, phase in (("prefill", found.prefill), ("decode", found.decode))
    ]
    return (
        bars(
            "phase_ratio",
            "Tokens a second of each phase",
            rows,
            ("phase", ""),
            ("tokens/s", "tokens a second, one request alone"),
            order=["prefill", "decode"],
            caption="Medians with intervals; the same request, first its prompt, then its answer.",
        ),
    )


EXPERIMENT = Experiment(
    name="phase-ratio",
    claim="Prefill handles tokens ten times faster than decode, or more.",
    method="One request alone: its prompt is read, then its answer is decoded behind it.",
    rules=(
        Rule(
            RATIO,
            "(prompt tokens / prefill time) / (output tokens / decode time)",
            at_least=10,
            fails_from=256,
            sized_in="prompt tokens",
        ),
    ),
    meaning="Count prompt tokens and output tokens apart: an output token costs as much as several prompt tokens.",
    share=0.6,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
)
