"""Claim: batching decodes multiplies throughput at first, and makes each request slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, median_of, point, ratio_of, shown
from twinphase.bench.experiments.workbench import Workbench, fitted
from twinphase.bench.plots import lines
from twinphase.bench.report import Column, Metric, Plot, Table
from twinphase.bench.statistics import percentile
from twinphase.phases.hardware import compute_seconds, memory_seconds
from twinphase.phases.report import flops_by_unit
from twinphase.phases.timeline import PhaseTotals, StepRecord

__all__ = ["EXPERIMENT", "Batching"]

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT, STEPS = 48, 12
LARGEST = (32, 16, 8, 4)
TWO, TOTAL, SLOWER = "throughput of 2 / of 1", "throughput of the largest batch / of 1", "a token at the largest batch"


@dataclass(frozen=True)
class Batching:
    """Decode steps by the number of requests in them.

    Attributes:
        seconds: of a step, median of each repetition, by batch.
        intensity: FLOP a byte, by batch.
        compute: seconds of a step's arithmetic at the peaks, by batch; None is unknown.
        memory: seconds of its bytes at the bandwidth, by batch; None is unknown.
    """

    seconds: dict[int, list[float]]
    intensity: dict[int, float]
    compute: dict[int, float | None]
    memory: dict[int, float | None]

    @property
    def batches(self) -> list[int]:
        """Rising."""
        return sorted(self.seconds)

    @property
    def step_cost(self) -> tuple[float, float]:
        """(a, b) of step = a + b batch, medians of the fits of each repetition."""
        rounds = min(map(len, self.seconds.values()))
        fits = [fitted(self.batches, [self.seconds[b][i] for b in self.batches], 1) for i in range(rounds)]
        return median_of([fit[0] for fit in fits]).value, median_of([fit[1] for fit in fits]).value

    @property
    def balance(self) -> int | None:
        """The first measured batch whose arithmetic takes longer than its bytes at the ceilings; None if none."""
        for batch in self.batches:
            compute, memory = self.compute[batch], self.memory[batch]
            if compute is not None and memory is not None and compute >= memory:
                return batch
        return None


def _measure(bench: Workbench) -> Batching:
    speed, workshop = bench.speed, bench.workshop
    room = min(workshop.config.max_num_seqs, workshop.capacity // (PROMPT + STEPS + 64))
    largest = bench.size(
        "largest batch",
        LARGEST,
        lambda n: sum(speed.decode(STEPS, b) + speed.prefill(PROMPT * b) / 4 for b in BATCHES if b <= n),
        room,
    )
    engine = bench.engine(enable_prefix_caching=True)  # so that repetitions need not read the prompts again
    prompts = [workshop.prompt(PROMPT) for _ in range(largest)]
    last: dict[int, StepRecord] = {}

    def decode(batch: int) -> float:
        records = engine.decode(prompts[:batch], STEPS)
        last[batch] = records[len(records) // 2]
        return percentile([record.seconds for record in records], 50)

    batches = [b for b in BATCHES if b <= largest]
    engine.decode(prompts, 1)
    seconds = bench.interleave({b: partial(decode, b) for b in batches})
    costs = {b: last[b].decode for b in batches}
    units, ceilings = workshop.units, bench.ceilings
    totals = {b: PhaseTotals(linear_flops=c.linear_flops, attention_flops=c.attention_flops) for b, c in costs.items()}
    return Batching(
        seconds,
        {b: cost.flops / cost.bytes for b, cost in costs.items()},
        {b: compute_seconds(flops_by_unit(totals[b], units), ceilings) for b in batches},
        {b: memory_seconds(cost.bytes, cost.bytes, ceilings) for b, cost in costs.items()},
    )


def _rates(found: Batching, batch: int) -> list[float]:
    return [batch / seconds for seconds in found.seconds[batch]]


def _estimates(found: Batching) -> Mapping[str, Estimate]:
    largest = found.batches[-1]
    return {
        TWO: ratio_of(_rates(found, 2), _rates(found, 1)),
        TOTAL: ratio_of(_rates(found, largest), _rates(found, 1)).at(largest),
        SLOWER: ratio_of(found.seconds[largest], found.seconds[1]).at(largest),
    }


def _why(found: Batching, judged: Sequence[Judged]) -> Sequence[str]:
    fixed, each = found.step_cost
    largest = found.batches[-1]
    sentences = [
        f"Fit: a step takes {fixed * 1e3:.3g} ms however many requests are in it (above all the weights, read once), "
        "plus "
        f"{each * 1e3:.3g} ms for each request."
    ]
    if fixed > 0 and each > 0:
        sentences.append(
            f"From about {fixed / each:.1f} requests on, the requests' own part is the larger one: there the curve "
            "bends, "
            "and more requests mostly share what there is."
        )
    balance = found.balance
    if any(one is not None for one in found.compute.values()):
        where = f"at a batch of {balance}" if balance else f"beyond a batch of {largest}"
        sentences.append(
            f"By the ceilings decode turns from memory-bound to compute-bound {where}. Arithmetic intensity rises from "
            f"{found.intensity[1]:.1f} FLOP a byte alone to {found.intensity[largest]:,.0f} with {largest} requests. "
            "With "
            "weights of 4 or 8 bits there are few bytes to share, so the bend comes early; on an accelerator with "
            "16-bit "
            "weights it comes at 150 requests and more."
        )
    return sentences


def _tables(found: Batching) -> Sequence[Table]:
    columns = (
        Column("batch", "requests that decode together"),
        Column("step, ms", "time of one token of each; median and interval"),
        Column("tokens/s each", "1 / step"),
        Column("tokens/s in all", "batch / step"),
        Column("FLOP a byte", "arithmetic intensity"),
        Column("arithmetic, ms", "FLOP at the measured peaks"),
        Column("memory, ms", "bytes at the measured bandwidth"),
    )
    rows = []
    for b in found.batches:
        ideal = ["unknown" if one is None else f"{one * 1e3:.3g}" for one in (found.compute[b], found.memory[b])]
        step = median_of(found.seconds[b]).value
        rates = [f"{1 / step:,.0f}", f"{b / step:,.0f}"]
        rows.append((str(b), shown(found.seconds[b], 1e3), *rates, f"{found.intensity[b]:.3g}", *ideal))
    return (Table("Decode by batch", columns, tuple(rows)),)


def _plots(found: Batching) -> Sequence[Plot]:
    one = point(_rates(found, 1), "rate")["rate"]
    total = [{"batch": b, **point(_rates(found, b), "rate"), "what": "decode, all requests"} for b in found.batches]
    each = [
        {"batch": b, **point([1 / s for s in found.seconds[b]], "rate"), "what": "decode, each request"}
        for b in found.batches
    ]
    rows = [*total, *each]
    ideal = [{"batch": b, "rate": b * one, "what": "ideal: batch x the rate alone"} for b in found.batches]
    return (
        lines(
            "batching",
            "Tokens a second by number of requests decoding together",
            rows,
            ("batch", "requests decoding together"),
            ("rate", "tokens a second"),
            series="what",
            fitted=[{key: row[key] for key in ("batch", "rate", "what")} for row in [*rows, *ideal]],
            log_x=True,
            log_y=True,
            caption="Points: medians with intervals. Both axes are logarithmic: a straight diagonal is the ideal.",
        ),
    )


def _metrics(found: Batching) -> Sequence[Metric]:
    return [
        Metric(f"decode_step_seconds[batch={b}]", "s", "lower", tuple(values), "median decode step of a repetition")
        for b, values in found.seconds.items()
    ]


EXPERIMENT = Experiment(
    name="batching",
    claim="Batching decodes multiplies throughput, nearly linearly at first, and makes each request slower.",
    method="1, 2, 4, ... requests with short prompts of their own decode together.",
    rules=(
        Rule(TWO, "tokens/s of two requests together / of one alone; 2 is linear", at_least=1.6),
        Rule(TOTAL, "tokens/s of the largest batch / of one alone", at_least=3, fails_from=16, sized_in="requests"),
        Rule(SLOWER, "time of a token there / of one alone", at_least=1.2, fails_from=32, sized_in="requests"),
    ),
    meaning="Serving several users at once costs far less than one after the other, but each of them gets a slower "
    "stream.",
    share=1.2,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
    metrics=_metrics,
)
