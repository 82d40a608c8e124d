"""Claim: an int8 KV cache makes a context's memory smaller and decode behind it faster, both against the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.lab.experiment import (
    Estimate,
    Experiment,
    Judged,
    Rule,
    exactly,
    median_of,
    ratio_of,
)
from twinphase.bench.lab.figures import points, shown
from twinphase.bench.lab.workbench import Workbench, median_step
from twinphase.bench.report.plots import bars
from twinphase.bench.report.report import Column, Plot, Table
from twinphase.phases.work import kv_bytes_per_token

__all__ = ["KVInt8"]

CONTEXT = (2048, 1024, 512, 256, 128)
STEPS = 16
AUTO, INT8, FORMULA = "auto: int8 keys, 16-bit values", "int8: keys and values", "16-bit (formula)"
SMALLER = Rule(
    "memory, int8 / default",
    "bytes of a token as stored, int8 / default format (int8 keys, 16-bit values)",
    at_most=0.75,
)
FASTER = Rule(
    "decode time, default / int8",
    "time of a token with the default format / with int8",
    at_least=1.03,
    fails_from=CONTEXT[0],
)


@dataclass(frozen=True)
class KVInt8(Experiment):
    """Decode behind a long context with two formats of the KV cache.

    Attributes:
        context: tokens before the decoded ones.
        token_bytes: of a token in the cache, by format.
        formula: 2 L H_kv d b with b = 2, for comparison: no cache of this engine is like that.
        seconds: of a token, median of each repetition, by format.
    """

    name = "kv-int8"
    claim = "An int8 KV cache makes a context's memory smaller by a quarter or more, and decode behind it faster."
    method = "The same decode behind the same long context, with this engine's default KV format and with int8."
    rules = (SMALLER, FASTER)
    meaning = "Choose the KV format by the memory that long contexts need; measure before expecting speed."
    share = 1.0

    context: int
    token_bytes: dict[str, int]
    formula: int
    seconds: dict[str, list[float]]

    @classmethod
    def measure(cls, bench: Workbench) -> KVInt8:
        """Read the same context into both caches, and decode behind it in turn."""
        speed, shape = bench.speed, bench.workshop.shape
        context = bench.size("context, tokens", CONTEXT, lambda n: speed.prefill(n) / 3 + 3 * speed.decode(STEPS))
        workshops = {AUTO: bench.workshop, INT8: bench.open(kv_cache_dtype="int8")}
        prompt = bench.workshop.prompt(context)
        engines = {name: workshop.engine(enable_prefix_caching=True) for name, workshop in workshops.items()}
        for engine in engines.values():
            engine.prefill(prompt)

        def decode(name: str) -> float:
            return median_step(engines[name].decode([prompt], STEPS))

        seconds = bench.interleave({name: partial(decode, name) for name in engines})
        sizes = {name: kv_bytes_per_token(workshop.shape) for name, workshop in workshops.items()}
        return cls(context, sizes, 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim, seconds)

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Of int8 against the default."""
        return {
            SMALLER: exactly(self.token_bytes[INT8] / self.token_bytes[AUTO]),
            FASTER: ratio_of(self.seconds[AUTO], self.seconds[INT8]).at(self.context),
        }

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What the bytes are, and what reading fewer of them gains."""
        auto, int8 = self.token_bytes[AUTO], self.token_bytes[INT8]
        megabytes = (auto - int8) * self.context / 1e6
        pairs = zip(self.seconds[AUTO], self.seconds[INT8], strict=True)
        gained = median_of([before - after for before, after in pairs])
        if gained.low > 0 or gained.high < 0:
            change = f"one took {abs(gained.value) * 1e3:.2g} ms {'less' if gained.low > 0 else 'more'}"
        else:
            change = "no difference stood out from the noise"
        return [
            f"A token takes {auto:,} bytes in this engine's default format, which has int8 keys already, and {int8:,} "
            "with int8 values too; the scales of each head come on top of one byte a value. Beside that: 16-bit keys "
            f"and values would take {self.formula:,} bytes by the formula 2 L H_kv d b, {self.formula / int8:.2f} "
            "times as many as int8; this engine has no such format to measure.",
            f"Behind {self.context:,} tokens, int8 spares reading {megabytes:.3g} MB for each token: {change}. Values "
            "must be scaled back to be summed, which costs arithmetic: reading less helps only where reading was the "
            "limit.",
        ]

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("KV cache"),
            Column("bytes a token", "as stored"),
            Column("ms a token", f"decode alone behind {self.context:,} tokens; median and interval"),
        )
        rows = tuple((name, f"{self.token_bytes[name]:,}", shown(self.seconds[name], 1e3)) for name in (AUTO, INT8))
        return (Table("Two formats of the KV cache", columns, (*rows, (FORMULA, f"{self.formula:,}", ""))),)

    def plots(self) -> Sequence[Plot]:
        sizes = {FORMULA: self.formula, **self.token_bytes}
        return (
            bars(
                "kv_int8_bytes",
                "Bytes of a token in the KV cache",
                [{"cache": name, "bytes": size} for name, size in sizes.items()],
                ("cache", ""),
                ("bytes", "bytes a token, all layers"),
                order=list(sizes),
                caption="As stored by this engine; the formula is 2 L H_kv d b with 2 bytes a value.",
            ),
            bars(
                "kv_int8_time",
                f"A decode token behind {self.context:,} tokens",
                points(self.seconds, "cache", "milliseconds", 1e3),
                ("cache", ""),
                ("milliseconds", "time of one token, ms"),
                order=list(self.seconds),
                caption="Medians with intervals; one request alone.",
            ),
        )
