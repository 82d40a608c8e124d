"""Claim: batching decodes multiplies throughput at first, and makes each request slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, median_of, ratio_of
from twinphase.bench.lab.figures import coefficients, metrics_by, milliseconds, points, shown
from twinphase.bench.lab.workbench import Workbench, median_step
from twinphase.bench.report.plots import lines
from twinphase.bench.report.report import Column, Metric, Plot, Table
from twinphase.phases.hardware import compute_seconds, memory_seconds
from twinphase.phases.report import flops_by_unit
from twinphase.phases.timeline import PhaseTotals, StepRecord

__all__ = ["Batching"]

BATCHES = (1, 2, 4, 8, 16, 32)
LARGEST = (32, 16, 8, 4)
PROMPT, STEPS = 48, 12
TWO = Rule("throughput of two / of one", "tokens/s of two requests together / of one alone; 2 is linear", at_least=1.6)
TOTAL = Rule(
    "throughput of the largest batch / of one",
    "tokens/s of the largest batch / of one alone",
    at_least=3,
    fails_from=16,
    sized_in="requests",
)
SLOWER = Rule(
    "time of a token, largest batch / alone",
    "time of a token there / of one alone",
    at_least=1.2,
    fails_from=32,
    sized_in="requests",
)


@dataclass(frozen=True)
class Batching(Experiment):
    """Decode steps by the number of requests in them.

    Attributes:
        seconds: of a step, median of each repetition, by batch, rising.
        intensity: FLOP a byte, by batch.
        compute: seconds of a step's arithmetic at the peaks, by batch; None is unknown.
        memory: seconds of its bytes at the bandwidth, by batch; None is unknown.
    """

    name = "batching"
    claim = "Batching decodes multiplies throughput, nearly linearly at first, and makes each request slower."
    method = "1, 2, 4, ... requests with short prompts of their own decode together."
    rules = (TWO, TOTAL, SLOWER)
    meaning = (
        "Serving several users at once costs far less than one after the other, but each of them gets a slower stream."
    )
    share = 1.2

    seconds: dict[int, list[float]]
    intensity: dict[int, float]
    compute: dict[int, float | None]
    memory: dict[int, float | None]

    @classmethod
    def measure(cls, bench: Workbench) -> Batching:
        """Decode in batches; the prefix cache spares repetitions from reading the prompts again."""
        speed, workshop = bench.speed, bench.workshop
        largest = bench.size(
            "largest batch",
            LARGEST,
            lambda n: sum(speed.decode(STEPS, b) + speed.prefill(PROMPT * b) / 4 for b in BATCHES if b <= n),
            room=min(workshop.config.max_num_seqs, workshop.capacity // (PROMPT + STEPS + 64)),
        )
        engine = bench.engine(enable_prefix_caching=True)
        prompts = [workshop.prompt(PROMPT) for _ in range(largest)]
        middle: dict[int, StepRecord] = {}

        def decode(batch: int) -> float:
            records = engine.decode(prompts[:batch], STEPS)
            middle[batch] = records[len(records) // 2]
            return median_step(records)

        engine.decode(prompts, 1)
        seconds = bench.interleave({b: partial(decode, b) for b in BATCHES if b <= largest})
        costs = {b: middle[b].decode for b in seconds}
        flops = {
            b: flops_by_unit(
                PhaseTotals(linear_flops=c.linear_flops, attention_flops=c.attention_flops), workshop.units
            )
            for b, c in costs.items()
        }
        return cls(
            seconds,
            {b: cost.flops / cost.bytes for b, cost in costs.items()},
            {b: compute_seconds(one, bench.ceilings) for b, one in flops.items()},
            {b: memory_seconds(cost.bytes, cost.bytes, bench.ceilings) for b, cost in costs.items()},
        )

    @property
    def largest(self) -> int:
        """Requests in the largest batch."""
        return max(self.seconds)

    @property
    def rates(self) -> dict[int, list[float]]:
        """Tokens a second of all requests together, each repetition, by batch."""
        return {b: [b / one for one in seconds] for b, seconds in self.seconds.items()}

    @property
    def balance(self) -> int | None:
        """The first measured batch whose arithmetic takes longer than its bytes at the ceilings; None if none."""
        for batch, compute in self.compute.items():
            memory = self.memory[batch]
            if compute is not None and memory is not None and compute >= memory:
                return batch
        return None

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Against one request alone, measured moments apart."""
        rates, largest = self.rates, self.largest
        return {
            TWO: ratio_of(rates[2], rates[1]),
            TOTAL: ratio_of(rates[largest], rates[1]).at(largest),
            SLOWER: ratio_of(self.seconds[largest], self.seconds[1]).at(largest),
        }

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What is shared in a step, what is not, and where the ceilings change places."""
        fixed, each = coefficients(self.seconds, 1)
        sentences = [
            f"Fit: a step takes {fixed * 1e3:.3g} ms however many requests are in it (above all the weights, read "
            f"once), plus {each * 1e3:.3g} ms for each request."
        ]
        if fixed > 0 and each > 0:
            sentences.append(
                f"From about {fixed / each:.1f} requests on, the requests' own part is the larger one: there the curve "
                "bends, and more requests mostly share what there is."
            )
        if any(one is not None for one in self.compute.values()):
            where = f"at a batch of {self.balance}" if self.balance else f"beyond a batch of {self.largest}"
            sentences.append(
                f"By the ceilings decode turns from memory-bound to compute-bound {where}. Arithmetic intensity rises "
                f"from {self.intensity[1]:.1f} FLOP a byte alone to {self.intensity[self.largest]:,.0f} with "
                f"{self.largest} requests. With weights of 4 or 8 bits there are few bytes to share, so the bend comes "
                "early; on an accelerator with 16-bit weights it comes at 150 requests and more."
            )
        return sentences

    def tables(self) -> Sequence[Table]:
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
        for b, seconds in self.seconds.items():
            step = median_of(seconds).value
            rates = (f"{1 / step:,.0f}", f"{b / step:,.0f}", f"{self.intensity[b]:.3g}")
            rows.append((str(b), shown(seconds, 1e3), *rates, *map(milliseconds, (self.compute[b], self.memory[b]))))
        return (Table("Decode by batch", columns, tuple(rows)),)

    def plots(self) -> Sequence[Plot]:
        each = {b: [1 / one for one in seconds] for b, seconds in self.seconds.items()}
        rows = [
            *points(self.rates, "batch", "rate", what="decode, all requests"),
            *points(each, "batch", "rate", what="decode, each request"),
        ]
        alone, ideal = median_of(each[1]).value, "ideal: batch x the rate alone"
        through = [{key: row[key] for key in ("batch", "rate", "what")} for row in rows]
        through += [{"batch": b, "rate": b * alone, "what": ideal} for b in self.seconds]
        return (
            lines(
                "batching",
                "Tokens a second by number of requests decoding together",
                rows,
                ("batch", "requests decoding together"),
                ("rate", "tokens a second"),
                series="what",
                fitted=through,
                log_x=True,
                log_y=True,
                caption="Points: medians with intervals. Both axes are logarithmic: a straight diagonal is the ideal.",
            ),
        )

    def metrics(self) -> Sequence[Metric]:
        return metrics_by("decode_step_seconds", "batch", self.seconds, "median decode step of a repetition")
