"""Claim: more cores help prefill more than decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.experiments.experiment import (
    Estimate,
    Experiment,
    Judged,
    Rule,
    median_of,
    point,
    ratio_of,
    shown,
    unknown,
)
from twinphase.bench.experiments.workbench import QUIET_CORES, Workbench
from twinphase.bench.plots import bars
from twinphase.bench.report import Column, Plot, Table
from twinphase.bench.statistics import percentile
from twinphase.bench.stepped import Workshop
from twinphase.config import available_cores

__all__ = ["EXPERIMENT", "Cores"]

PROMPT = (256, 128, 64)
STEPS = 16
GAIN, HELP = "prefill's speed-up", "prefill's speed-up / decode's"


@dataclass(frozen=True)
class Cores:
    """Tokens a second of each repetition, by threads; only one entry on a machine with one core.

    `others` is how many cores other programs used meanwhile.
    """

    prefill: dict[int, list[float]]
    decode: dict[int, list[float]]
    others: float | None = None

    @property
    def threads(self) -> list[int]:
        """Rising."""
        return sorted(self.prefill)

    def speedups(self, rates: dict[int, list[float]]) -> list[float]:
        """Most threads against one, within each repetition."""
        pairs = zip(rates[self.threads[-1]], rates[self.threads[0]], strict=True)
        return [many / one for many, one in pairs]


def _measure(bench: Workbench) -> Cores:
    speed, most = bench.speed, bench.workshop.config.threads or available_cores()
    length = bench.size("prompt, tokens", PROMPT, lambda n: 3 * (speed.prefill(n) + speed.decode(STEPS)))
    workshops: dict[int, Workshop] = {most: bench.workshop}
    if most > 1:
        workshops[1] = bench.open(threads=1)

    def prefill(workshop: Workshop) -> float:
        return length / workshop.engine().prefill(workshop.prompt(length))

    def decode(workshop: Workshop) -> float:
        records = workshop.engine().decode([workshop.prompt(16)], STEPS)
        return 1 / percentile([record.seconds for record in records], 50)

    variants: dict[tuple[str, int], Callable[[], float]] = {}
    for threads, workshop in sorted(workshops.items()):
        prefill(workshop)  # memory that nobody has touched yet is slow
        variants["prefill", threads] = partial(prefill, workshop)
        variants["decode", threads] = partial(decode, workshop)
    found = bench.interleave(variants)
    return Cores({n: found["prefill", n] for n in workshops}, {n: found["decode", n] for n in workshops}, bench.others)


def _estimates(found: Cores) -> Mapping[str, Estimate]:
    if len(found.threads) < 2:
        return dict.fromkeys((GAIN, HELP), unknown("There is one core only."))
    if found.others is not None and found.others >= QUIET_CORES:
        note = f"Other programs used {found.others:.1f} cores meanwhile: the second core was not free."
        return dict.fromkeys((GAIN, HELP), unknown(note))
    return {
        GAIN: median_of(found.speedups(found.prefill)),
        HELP: ratio_of(found.speedups(found.prefill), found.speedups(found.decode)),
    }


def _why(found: Cores, judged: Sequence[Judged]) -> Sequence[str]:
    if len(found.threads) < 2:
        return ["With one core there is nothing to compare."]
    speedups = [median_of(found.speedups(rates)).value for rates in (found.prefill, found.decode)]
    sentences = [
        f"From one thread to {found.threads[-1]}, prefill became {speedups[0]:.2f} times as fast and decode "
        f"{speedups[1]:.2f} times."
    ]
    if speedups[1] > 0.75 * found.threads[-1]:
        sentences.append(
            "Decode gained about as many times as there are cores: one core alone cannot use all the bandwidth here, "
            "so "
            "memory is not yet what these few cores share. With more cores it would be."
        )
    return sentences


def _tables(found: Cores) -> Sequence[Table]:
    columns = (Column("threads"), Column("prefill, tokens/s", "median and interval"), Column("decode, tokens/s"))
    rows = tuple((str(n), shown(found.prefill[n]), shown(found.decode[n])) for n in found.threads)
    return (Table("Both phases by number of threads", columns, rows),)


def _plots(found: Cores) -> Sequence[Plot]:
    first = found.threads[0]
    rows = []
    for name, rates in (("prefill", found.prefill), ("decode", found.decode)):
        base = point(rates[first], "rate")["rate"]
        for n in found.threads:
            label = f"{name}, {n} thread{'' if n == 1 else 's'}"
            rows.append({"phase": label, **point(rates[n], "speed-up", 1 / base)})
    return (
        bars(
            "cores",
            "What another core brings to each phase",
            rows,
            ("phase", ""),
            ("speed-up", f"speed against {first} thread{'' if first == 1 else 's'}, times"),
            order=[str(row["phase"]) for row in rows],
            caption="Medians with intervals; one request alone.",
        ),
    )


EXPERIMENT = Experiment(
    name="cores",
    claim="More cores help prefill more than decode.",
    method="The same prefill and decode with one thread and with all; arithmetic grows with the cores, bandwidth is "
    "shared.",
    rules=(
        Rule(GAIN, "prefill's tokens/s with all threads / with one", at_least=1.3),
        Rule(HELP, "(prefill with all threads / with one) / (decode with all / with one)", at_least=1.1),
    ),
    meaning="Cores shorten the wait for the first token; whether they speed the stream up depends on the memory "
    "behind.",
    share=1.0,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
)
