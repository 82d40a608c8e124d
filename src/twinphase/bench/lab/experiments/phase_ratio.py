"""Claim: prefill handles tokens many times faster than decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, ratio_of
from twinphase.bench.lab.figures import points, shown
from twinphase.bench.lab.phase_bound import PhaseBound, phase_bound
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.report.plots import bars
from twinphase.bench.report.report import Column, Plot, Table
from twinphase.phases.timeline import StepRecord

__all__ = ["PhaseRatio"]

PROMPT = (512, 256, 128, 64)
STEPS = 24
RATIO = Rule(
    "prefill's token rate / decode's",
    "(prompt tokens / prefill time) / (output tokens / decode time)",
    at_least=10,
    fails_from=256,
    sized_in="prompt tokens",
    disturbed="moves",  # prefill needs all cores, and decode the memory: others who compute slow one of them more
)


@dataclass(frozen=True)
class PhaseRatio(Experiment):
    """Both phases of a request."""

    name = "phase-ratio"
    claim = "Prefill handles tokens ten times faster than decode, or more."
    method = "One request alone: its prompt is read, then its answer is decoded behind it."
    rules = (RATIO,)
    meaning = "Count prompt tokens and output tokens apart: an output token costs as much as several prompt tokens."
    share = 0.6

    prefill: PhaseBound
    decode: PhaseBound

    @classmethod
    def measure(cls, bench: Workbench) -> PhaseRatio:
        """Both phases of one request, the same request in a repetition."""
        length = bench.size("prompt, tokens", PROMPT, lambda n: bench.speed.prefill(n) + bench.speed.decode(STEPS))
        engine = bench.engine()

        def both() -> tuple[list[StepRecord], list[StepRecord]]:
            ticket = engine.submit(bench.workshop.prompt(length), STEPS + 1)
            engine.run_until(lambda: bool(ticket.times))
            prefill = list(engine.records)
            decode = engine.run()
            engine.clear()
            return prefill, decode

        prefills, decodes = zip(*bench.interleave({"both": both})["both"], strict=True)
        return cls(phase_bound(bench, prefills), phase_bound(bench, decodes))

    @property
    def rates(self) -> dict[str, list[float]]:
        """Tokens a second of each repetition, by phase."""
        return {"prefill": self.prefill.rates, "decode": self.decode.rates}

    @property
    def possible(self) -> float | None:
        """The ratio if both phases ran at the ceilings; None if those are unknown."""
        p, d = self.prefill, self.decode
        if p.compute is None or p.memory is None or d.compute is None or d.memory is None:
            return None
        return (max(d.compute, d.memory) / d.tokens) / (max(p.compute, p.memory) / p.tokens)

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Within each request."""
        return {RATIO: ratio_of(self.prefill.rates, self.decode.rates).at(self.prefill.tokens)}

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What batching over tokens gains, and what the ceilings allow."""
        sentences = [
            f"Prefill reads the weights once for {self.prefill.tokens:,} tokens, decode once for each token: while "
            "memory is the limit, more tokens in a step are free. They stop being free when arithmetic becomes the "
            "limit."
        ]
        if self.possible is not None:
            sentences.append(
                f"With both phases exactly at this machine's measured ceilings the ratio would be {self.possible:.3g}: "
                "that is its balance of arithmetic and bandwidth with these weights, and a phase that stays farther "
                "below its ceiling than the other moves the ratio. An accelerator does 100 to 300 operations in the "
                "time of reading a byte, hence the ratios of 100 and more that people quote; fewer bits a weight make "
                "decode faster and the ratio smaller."
            )
        return sentences

    def tables(self) -> Sequence[Table]:
        columns = (Column("phase"), Column("tokens/s", "tokens computed / time of their steps; median and interval"))
        rows = tuple(
            (f"{name}, {phase.tokens:,} tokens", shown(phase.rates))
            for name, phase in (("prefill", self.prefill), ("decode", self.decode))
        )
        return (Table("Token rates of one request alone", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        return (
            bars(
                "phase_ratio",
                "Tokens a second of each phase",
                points(self.rates, "phase", "tokens/s"),
                ("phase", ""),
                ("tokens/s", "tokens a second, one request alone"),
                order=list(self.rates),
                caption="Medians with intervals; the same request, first its prompt, then its answer.",
            ),
        )
