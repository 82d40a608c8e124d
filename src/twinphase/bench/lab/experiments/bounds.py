"""Claim: prefill is bound by arithmetic, decode by memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twinphase.bench.lab.experiment import (
    OTHER_BANDWIDTH,
    OTHER_RUN,
    Estimate,
    Experiment,
    Judged,
    Rule,
    exactly,
    median_of,
    percent,
    unknown,
)
from twinphase.bench.lab.figures import milliseconds, points, shown
from twinphase.bench.lab.phase_bound import PhaseBound, phase_bound
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.report.plots import bars
from twinphase.bench.report.report import Column, Metric, Plot, Status, Table
from twinphase.phases.hardware import Ceilings
from twinphase.phases.timeline import StepRecord

__all__ = ["Bounds"]

PROMPT = (512, 256, 128, 64)
DECODE_TOKENS = 24
NO_CEILING = unknown("This machine's ceilings are unknown.")
HALF = 0.5  # of the time: from here on a limit explains most of it
PREFILL_SIDE = Rule(
    "prefill: arithmetic over memory",
    "time of its FLOP at the peak / time of its bytes at the bandwidth",
    at_least=1,
    fails_from=256,
    sized_in="prompt tokens",
    margin=OTHER_BANDWIDTH,
)
MFU = Rule(
    "prefill's MFU",
    "time of its FLOP at the peak / time taken; from half on, arithmetic explains most",
    at_least=HALF,
    unit="%",
    fails_from=256,
    sized_in="prompt tokens",
    margin=OTHER_RUN,
    disturbed="lowers",  # the ceilings are those of the whole machine
)
DECODE_SIDE = Rule(
    "decode: memory over arithmetic",
    "time of its bytes at the bandwidth / time of its FLOP at the peak",
    at_least=1,
    margin=OTHER_BANDWIDTH,
)
MBU = Rule(
    "decode's MBU",
    "time of its bytes at the bandwidth / time taken; from half on, memory explains most",
    at_least=HALF,
    unit="%",
    margin=OTHER_BANDWIDTH,
    disturbed="lowers",
)


@dataclass(frozen=True)
class Bounds(Experiment):
    """Both phases."""

    name = "bounds"
    claim = "Prefill is bound by arithmetic; decode is bound by memory bandwidth."
    method = (
        "One prompt read, and tokens decoded alone; FLOP and bytes by the model's shape, against ceilings measured on "
        "this machine."
    )
    rules = (PREFILL_SIDE, MFU, DECODE_SIDE, MBU)
    meaning = (
        "A faster processor shortens the wait for the first token; faster memory, or fewer bytes, the stream after it."
    )
    share = 0.8
    uses_ceilings = True

    prefill: PhaseBound
    decode: PhaseBound

    @classmethod
    def measure(cls, bench: Workbench) -> Bounds:
        """A prompt, and tokens behind a short one, in turn."""
        speed, workshop, engine = bench.speed, bench.workshop, bench.engine()
        length = bench.size("prompt, tokens", PROMPT, lambda n: speed.prefill(n) + speed.decode(DECODE_TOKENS))

        def prefill() -> list[StepRecord]:
            engine.submit(workshop.prompt(length), 1)
            return engine.run()

        def decode() -> list[StepRecord]:
            return engine.decode([workshop.prompt(16)], DECODE_TOKENS)

        found = bench.interleave({"prefill": prefill, "decode": decode})
        return cls(phase_bound(bench, found["prefill"]), phase_bound(bench, found["decode"]))

    def under(self, ceilings: Ceilings | None) -> Bounds:
        """Both phases against these ceilings."""
        return replace(self, prefill=self.prefill.under(ceilings), decode=self.decode.under(ceilings))

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Which limit is the nearer one, and whether it explains most of the time."""
        prefill, decode = self.prefill, self.decode
        return {
            PREFILL_SIDE: _side(prefill.compute, prefill.memory).at(prefill.tokens),
            MFU: _efficiency(MFU, prefill.mfu).at(prefill.tokens),
            DECODE_SIDE: _side(decode.memory, decode.compute),
            MBU: _efficiency(MBU, decode.mbu),
        }

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """Why the phases differ, how far each is from its ceiling, and what else takes time."""
        prefill, decode = self.prefill, self.decode
        sentences = [
            f"Prefill does {prefill.intensity:,.0f} FLOP for every byte it must move, decode {decode.intensity:.1f}: "
            f"the weights are read once a step, for {prefill.tokens:,} tokens in the one and for a single one in the "
            "other."
        ]
        for name, phase, ideal, ceiling in (
            ("Prefill", prefill, prefill.compute, "arithmetic peak"),
            ("Decode", decode, decode.memory, "bandwidth"),
        ):
            if ideal is not None:
                took, best = median_of(phase.seconds).value * 1e3 / phase.tokens, ideal * 1e3 / phase.tokens
                sentences.append(
                    f"{name} took {took:.3g} ms a token; at the {ceiling} it would be {best:.3g} ms. "
                    f"Scheduling and bookkeeping are {percent(phase.outside)} of the time."
                )
        if any(one.status is Status.FAILS and one.rule in (MFU, MBU) for one in judged):
            sentences.append(
                "Where a ceiling explains less than half of the time, neither limit binds: the rest is work that FLOP "
                "and bytes do not count (unpacking 4-bit weights, quantizing activations, norms, softmax, waiting "
                "between threads)."
            )
        return sentences

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("phase"),
            Column("time, ms", "median of the repetitions and its interval"),
            Column("arithmetic, ms", "sum over units of FLOP / measured peak"),
            Column("memory, ms", "(weights once a step + KV read and written) / bandwidth for that working set"),
            Column("MFU", "arithmetic / time"),
            Column("MBU", "memory / time"),
            Column("FLOP a byte", "arithmetic intensity"),
        )
        rows = tuple(
            (
                f"{name}, {phase.tokens:,} tokens",
                shown(phase.seconds, 1e3),
                milliseconds(phase.compute),
                milliseconds(phase.memory),
                *(MFU.measured(median_of(shares)) for shares in (phase.mfu, phase.mbu)),
                f"{phase.intensity:.3g}",
            )
            for name, phase in (("prefill", self.prefill), ("decode", self.decode))
        )
        return (Table("Time against the ceilings", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        shares = {
            "prefill, MFU: arithmetic": self.prefill.mfu,
            "prefill, MBU: memory": self.prefill.mbu,
            "decode, MFU: arithmetic": self.decode.mfu,
            "decode, MBU: memory": self.decode.mbu,
        }
        known = {name: values for name, values in shares.items() if values}
        return (
            bars(
                "bounds",
                "How much of each ceiling a phase uses",
                points(known, "limit", "per cent of the ceiling", 100),
                ("limit", ""),
                ("per cent of the ceiling", "of this machine's measured ceiling, %"),
                order=list(known),
                caption="A phase is bound by the ceiling that it comes closest to, if that explains at least half of "
                "its time. Medians with intervals.",
            ),
        )

    def metrics(self) -> Sequence[Metric]:
        mfu, mbu = tuple(self.prefill.mfu), tuple(self.decode.mbu)
        return [
            Metric("prefill_mfu", "fraction", "higher", mfu, "arithmetic at the measured peaks / time"),
            Metric("decode_mbu", "fraction", "higher", mbu, "bytes at the measured bandwidth / time"),
        ]


def _side(one: float | None, other: float | None) -> Estimate:
    return NO_CEILING if one is None or other is None else exactly(one / other)


def _efficiency(rule: Rule, shares: Sequence[float]) -> Estimate:
    if not shares:
        return NO_CEILING
    estimate = median_of(shares)
    if estimate.high > 1:
        return unknown(f"{rule.measured(estimate)} of a ceiling: the count or the ceiling is wrong.")
    return estimate
