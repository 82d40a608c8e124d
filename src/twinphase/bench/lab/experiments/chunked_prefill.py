"""Claim: reading a long prompt in chunks protects the tokens of those who are decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, median_of, ratio_of
from twinphase.bench.lab.figures import metrics_by, point, shown
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.report.plots import lines
from twinphase.bench.report.report import Column, Metric, Plot, Table
from twinphase.bench.statistics import percentile
from twinphase.bench.targets.stepped import Stepped

__all__ = ["ChunkedPrefill", "Interruption"]

PROMPT = (2048, 1024, 512, 256, 128)
DECODES, OWN, BEFORE = 4, 16, 8
WORST = Rule(
    "worst gap, whole prompt / small chunks",
    "longest gap of a decode, whole prompt in one step / small chunks",
    at_least=3,
    fails_from=1024,
    sized_in="prompt tokens",
)
PRICE = Rule(
    "TTFT of the long prompt, small chunks / whole",
    "TTFT of the long prompt in small chunks / in one step",
    at_most=1.5,
)


@dataclass(frozen=True)
class Interruption:
    """Running decodes into which a long prompt came; seconds.

    Attributes:
        worst: the longest gap between two tokens of a decode while the prompt was read.
        before: the median gap before it came.
        ttft: of the long prompt.
        gaps: (time since the prompt came, gap) of one decode.
        steps: that computed a part of the prompt.
    """

    worst: float
    before: float
    ttft: float
    gaps: list[tuple[float, float]]
    steps: int


@dataclass(frozen=True)
class ChunkedPrefill(Experiment):
    """Interruptions of each repetition.

    Attributes:
        prompt: tokens of the long prompt.
        found: by largest step (`max_num_batched_tokens`), rising; the last one takes the whole prompt at once.
    """

    name = "chunked-prefill"
    claim = "Reading a long prompt in chunks protects the tokens of those who are decoding, at a small price."
    method = "A long prompt comes while others decode, with different limits on the tokens of a step."
    rules = (WORST, PRICE)
    meaning = "If streams stutter when others send long prompts, lower max_num_batched_tokens (or set itl_slo_ms)."
    share = 2.0

    prompt: int
    found: dict[int, list[Interruption]]

    @classmethod
    def measure(cls, bench: Workbench) -> ChunkedPrefill:
        """Interrupt decodes with a prompt of the same length, in small, larger and one step."""
        speed, workshop = bench.speed, bench.workshop
        length = bench.size(
            "long prompt, tokens",
            PROMPT,
            lambda n: 3 * (speed.prefill(n) + speed.prefill(DECODES * OWN) + speed.decode(BEFORE + 4)),
            room=min(workshop.config.max_num_batched_tokens - DECODES, workshop.max_model_len // 2),
        )
        small = max(32, length // 16)
        engines = {n: bench.engine(max_num_batched_tokens=n) for n in (small, 4 * small, length + DECODES)}
        return cls(length, bench.interleave({n: partial(_interrupt, bench, e, length) for n, e in engines.items()}))

    @property
    def ends(self) -> tuple[int, int]:
        """The smallest step, and the one that takes the whole prompt."""
        return min(self.found), max(self.found)

    @property
    def worst(self) -> dict[int, list[float]]:
        """Longest gaps by largest step."""
        return {chunk: [one.worst for one in many] for chunk, many in self.found.items()}

    @property
    def ttft(self) -> dict[int, list[float]]:
        """TTFT of the long prompt by largest step."""
        return {chunk: [one.ttft for one in many] for chunk, many in self.found.items()}

    def label(self, chunk: int) -> str:
        """A largest step in words."""
        return "whole prompt at once" if chunk == self.ends[1] else f"{chunk} tokens a step"

    def estimates(self) -> Mapping[Rule, Estimate]:
        """What small chunks gain for the decodes, and what they cost the prompt."""
        small, whole = self.ends
        return {
            WORST: ratio_of(self.worst[whole], self.worst[small]).at(self.prompt),
            PRICE: ratio_of(self.ttft[small], self.ttft[whole]),
        }

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """Who waits for whom."""
        small, whole = self.ends
        gaps = {chunk: median_of(self.worst[chunk]).value * 1e3 for chunk in self.ends}
        return [
            "Requests in one step all wait for its end, so a step that reads a whole prompt holds every decode up for "
            f"as long as the prompt takes: {gaps[whole]:,.0f} ms here. With at most {small} tokens a step the longest "
            f"gap is {gaps[small]:,.0f} ms.",
            "The prompt pays: each of its steps carries the decodes too, and small chunks read the weights, and the KV "
            "of what was read before, more often.",
        ]

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("largest step", "max_num_batched_tokens: prompt tokens and decodes together"),
            Column("usual gap, ms", "median gap of the decodes before the long prompt came"),
            Column("worst gap, ms", "longest gap of any decode while it was read; median and interval"),
            Column("TTFT of the long prompt, ms", "first token out - submitted"),
            Column("steps", "that computed a part of the prompt"),
        )
        rows = tuple(
            (
                self.label(chunk),
                shown([one.before for one in many], 1e3),
                shown(self.worst[chunk], 1e3),
                shown(self.ttft[chunk], 1e3),
                str(many[0].steps),
            )
            for chunk, many in self.found.items()
        )
        return (Table(f"{DECODES} decodes, and a prompt of {self.prompt:,} tokens comes", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        until = max(max(values) for values in self.ttft.values()) * 1.05
        rows, spans, trade = [], [], []
        for chunk, many in self.found.items():
            what = self.label(chunk)
            middle = sorted(many, key=lambda one: one.worst)[len(many) // 2]
            for at, gap in middle.gaps:
                if at <= until:
                    row = {"seconds": at, "gap": gap * 1e3, "what": what}
                    rows.append(row)
                    spans += [{**row, "seconds": at - gap}, row]  # a gap is drawn as long as it lasts
            worst = median_of(self.worst[chunk]).value * 1e3
            trade.append({"worst": worst, **point(self.ttft[chunk], "ttft", 1e3), "what": what})
        return (
            lines(
                "chunked_prefill",
                "What a decode feels while a long prompt is read",
                rows,
                ("seconds", "time since the long prompt came, s"),
                ("gap", "gap before a token, ms"),
                series="what",
                fitted=spans,
                log_y=True,
                caption="A line lasts as long as the gap: one running decode, in the repetition with the median worst "
                "gap.",
            ),
            lines(
                "chunked_prefill_price",
                "Worst gap of the decodes against the wait of the long prompt",
                trade,
                ("worst", "worst gap of the decodes, ms"),
                ("ttft", "TTFT of the long prompt, ms"),
                series="what",
                log_x=True,
                caption="Medians; bars are the intervals of the TTFT.",
            ),
        )

    def metrics(self) -> Sequence[Metric]:
        return metrics_by("worst_gap_seconds", "chunk", self.worst, "longest gap")


def _interrupt(bench: Workbench, engine: Stepped, length: int) -> Interruption:
    """Let some requests decode, and send a long prompt into them."""
    decodes = [engine.submit(bench.workshop.prompt(OWN), length // 8 + 160) for _ in range(DECODES)]
    engine.run_until(lambda: all(ticket.times for ticket in decodes))
    for _ in range(BEFORE):
        engine.step()
    prompt = engine.submit(bench.workshop.prompt(length), 4)
    engine.run_until(lambda: len(prompt.times) == 4)
    steps = {record.index for record in engine.records if prompt.request.request_id in record.prefill_ids}
    before, within = [], []
    for ticket in decodes:
        for gap, at, step in zip(ticket.gaps, ticket.times[1:], ticket.steps[1:], strict=True):
            if step in steps:
                within.append(gap)
            elif at <= prompt.submitted:
                before.append(gap)
    gaps = [(at - prompt.submitted, gap) for gap, at in zip(decodes[0].gaps, decodes[0].times[1:], strict=True)]
    engine.clear()
    return Interruption(max(within), percentile(before, 50), prompt.ttft, gaps, len(steps))
