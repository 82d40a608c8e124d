"""Claim: more cores help prefill more than decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.lab.experiment import (
    Estimate,
    Experiment,
    Judged,
    Rule,
    median_of,
    ratio_of,
    unknown,
)
from twinphase.bench.lab.figures import points, shown
from twinphase.bench.lab.workbench import Workbench, median_step
from twinphase.bench.report.plots import bars
from twinphase.bench.report.report import Column, Plot, Table
from twinphase.bench.targets.stepped import Workshop
from twinphase.config import available_cores

__all__ = ["Cores"]

PROMPT = (256, 128, 64)
STEPS = 16
GAIN = Rule("prefill's speed-up", "prefill's tokens/s with all threads / with one", at_least=1.3, disturbed="moves")
HELP = Rule(
    "prefill's speed-up / decode's",
    "(prefill with all threads / with one) / (decode with all / with one)",
    at_least=1.1,
    disturbed="moves",  # the second core is not free then
)


@dataclass(frozen=True)
class Cores(Experiment):
    """Both phases by number of threads.

    Attributes:
        prefill: tokens a second of each repetition, by threads, rising; one entry only on a machine with one core.
        decode: likewise.
    """

    name = "cores"
    claim = "More cores help prefill more than decode."
    method = (
        "The same prefill and decode with one thread and with all: cores bring arithmetic, and share the bandwidth."
    )
    rules = (GAIN, HELP)
    meaning = (
        "Cores shorten the wait for the first token; whether they speed the stream up depends on the memory behind."
    )
    share = 1.0

    prefill: dict[int, list[float]]
    decode: dict[int, list[float]]

    @classmethod
    def measure(cls, bench: Workbench) -> Cores:
        """Both phases, with one thread and with all, in turn."""
        speed, most = bench.speed, bench.workshop.config.threads or available_cores()
        length = bench.size("prompt, tokens", PROMPT, lambda n: 3 * (speed.prefill(n) + speed.decode(STEPS)))
        workshops: dict[int, Workshop] = {1: bench.open(threads=1)} if most > 1 else {}
        workshops[most] = bench.workshop

        def prefill(workshop: Workshop) -> float:
            return length / workshop.engine().prefill(workshop.prompt(length))

        def decode(workshop: Workshop) -> float:
            return 1 / median_step(workshop.engine().decode([workshop.prompt(16)], STEPS))

        variants: dict[tuple[str, int], Callable[[], float]] = {}
        for threads, workshop in workshops.items():
            prefill(workshop)  # memory that nobody has touched yet is slow
            variants["prefill", threads] = partial(prefill, workshop)
            variants["decode", threads] = partial(decode, workshop)
        found = bench.interleave(variants)
        return cls({n: found["prefill", n] for n in workshops}, {n: found["decode", n] for n in workshops})

    @property
    def most(self) -> int:
        """Threads."""
        return max(self.prefill)

    def speedups(self, rates: dict[int, list[float]]) -> list[float]:
        """Most threads against the fewest, within each repetition."""
        return [many / few for many, few in zip(rates[self.most], rates[min(rates)], strict=True)]

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Unknown where there was no second core to help."""
        if self.most == min(self.prefill):
            return dict.fromkeys(self.rules, unknown("There is one core only."))
        prefill, decode = self.speedups(self.prefill), self.speedups(self.decode)
        return {GAIN: median_of(prefill), HELP: ratio_of(prefill, decode)}

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What the second core brought to each phase."""
        if self.most == min(self.prefill):
            return ["With one core there is nothing to compare."]
        prefill, decode = (median_of(self.speedups(rates)) for rates in (self.prefill, self.decode))
        sentences = [
            f"From one thread to {self.most}, prefill became {prefill.value:.2f} times as fast and decode "
            f"{decode.value:.2f} times."
        ]
        if decode.low > 0.75 * self.most:
            sentences.append(
                "Decode gained about as many times as there are cores: one core alone cannot use all the bandwidth "
                "here, so memory is not yet what these few cores share. With more cores it would be."
            )
        return sentences

    def tables(self) -> Sequence[Table]:
        columns = (Column("threads"), Column("prefill, tokens/s", "median and interval"), Column("decode, tokens/s"))
        rows = tuple((str(n), shown(self.prefill[n]), shown(self.decode[n])) for n in self.prefill)
        return (Table("Both phases by number of threads", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        few = min(self.prefill)
        rows = []
        for phase, rates in (("prefill", self.prefill), ("decode", self.decode)):
            named = {f"{phase}, {_threads(n)}": values for n, values in rates.items()}
            rows += points(named, "phase", "speed-up", 1 / median_of(rates[few]).value)
        return (
            bars(
                "cores",
                "What another core brings to each phase",
                rows,
                ("phase", ""),
                ("speed-up", f"speed against {_threads(few)}, times"),
                order=[row["phase"] for row in rows],
                caption="Medians with intervals; one request alone.",
            ),
        )


def _threads(number: int) -> str:
    return f"{number} thread{'' if number == 1 else 's'}"
