"""Claim: the KV cache grows linearly with the tokens, by a number of bytes that is known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, exactly, unknown
from twinphase.bench.lab.workbench import Workbench, fitted
from twinphase.bench.report.plots import lines
from twinphase.bench.report.report import Column, Plot, Table
from twinphase.bench.targets.stepped import Workshop
from twinphase.phases.work import kv_bytes_per_token

__all__ = ["KVSize"]

TOKENS = (1024, 512, 256, 128)
OUTPUT = 24
REQUESTS = (1024, 8192, 131072)  # tokens of a request, for how many would fit
PIECES = 8  # in which the prompt is read, so that its cache is seen to grow
LINE = 64  # bytes that are looked at together; what one holds is written in fewer
GROWTH = Rule(
    "bytes a token, written / expected",
    "slope of the bytes written in memory over tokens / bytes of a token reckoned before",
    0.97,
    1.03,
)
LEFT_OVER = Rule("most blocks held beyond the tokens", "blocks held - tokens / tokens of a block", at_most=1, unit="")


@dataclass(frozen=True)
class KVSize(Experiment):
    """What a growing request holds.

    Attributes:
        tokens: with KV, after each step since the prompt was read.
        blocks: held for them.
        written: (tokens, bytes of the cache's memory that were no longer as they had been allocated) where the tokens
            filled whole blocks; empty where it cannot be looked at.
        block_size: tokens of a block.
        token_bytes: of one token, as the backend reckons before anything is computed.
        num_layers, num_heads, num_kv_heads, head_dim: of the model.
        capacity: bytes of the cache.
    """

    name = "kv-size"
    claim = "The KV cache grows linearly with the tokens, by a number of bytes that is known beforehand."
    method = "A request grows in a fresh cache; its blocks are counted, and the bytes of memory that changed."
    rules = (GROWTH, LEFT_OVER)
    meaning = "Memory for KV, and not the weights, limits how many long requests run at once; it is known beforehand."
    share = 0.3

    tokens: list[int]
    blocks: list[int]
    written: list[tuple[int, int]]
    block_size: int
    token_bytes: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int

    @classmethod
    def measure(cls, bench: Workbench) -> KVSize:
        """Let one request grow in a cache of its own, into which nothing was written yet."""
        speed = bench.speed
        length = bench.size(
            "tokens of the longest request", TOKENS, lambda n: (speed.prefill(n) + speed.decode(OUTPUT)) / 8
        )
        workshop = bench.open()
        shape, size, memory = workshop.shape, workshop.config.block_size, _written(workshop)
        engine = workshop.engine(max_num_batched_tokens=max(1, length // PIECES))
        pool = engine.engine.scheduler.kv_cache.pool
        before = pool.num_held
        tokens: list[int] = []
        blocks: list[int] = []
        written: list[tuple[int, int]] = []
        ticket = engine.submit(workshop.prompt(max(1, length - OUTPUT)), OUTPUT)
        while not engine.step().finished:  # a finished request gives its blocks back at once
            computed = ticket.request.num_computed_tokens
            bench.progress(bench.title, min(99, 100 * computed // length), 100)
            if ticket.times:  # a prompt gets its blocks before it is read
                tokens.append(computed)
                blocks.append(pool.num_held - before)
            if memory is not None and computed % size == 0:
                written.append((computed, (_written(workshop) or 0) - memory))
        return cls(
            tokens,
            blocks,
            written,
            size,
            kv_bytes_per_token(shape),
            shape.num_layers,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            bench.workshop.capacity * kv_bytes_per_token(shape),
        )

    def formula(self, heads: int, width: float = 2) -> float:
        """2 L heads d b: bytes of a token with `width` bytes a value."""
        return 2 * self.num_layers * heads * self.head_dim * width

    def estimates(self) -> Mapping[Rule, Estimate]:
        """A block is taken as a whole: on a straight line, what is held is at most a block above what is needed."""
        over = [count * self.block_size - tokens for count, tokens in zip(self.blocks, self.tokens, strict=True)]
        growth = unknown("The memory of this cache cannot be looked at.")
        if len(self.written) > 2:
            tokens, held = zip(*self.written, strict=True)
            growth = exactly(fitted(tokens, held, 1)[1] / self.token_bytes)
        return {GROWTH: growth, LEFT_OVER: exactly(max(map(abs, over)) / self.block_size)}

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What a token's bytes are made of, and what GQA spares."""
        group = self.num_heads // self.num_kv_heads
        sentences = [
            f"By the formula 2 L H_kv d b a token takes 2 x {self.num_layers} x {self.num_kv_heads} x {self.head_dim} "
            f"x 2 = {self.formula(self.num_kv_heads):,.0f} bytes with 16-bit values. This cache stores "
            f"{self.token_bytes:,}: its keys, or keys and values, are int8 with a scale for each head.",
            f"Memory is handed out in blocks of {self.block_size} tokens, so a request holds less than a block more "
            "than it needs.",
        ]
        if group > 1:
            sentences.append(
                f"Beside that, by arithmetic and not measured: {self.num_heads} query heads share {self.num_kv_heads} "
                f"KV heads (GQA), so a KV head for every query head (MHA) would take {group} times as many bytes a "
                "token, and decode would read as many times more for each earlier token. No MHA twin of this model is "
                "here to measure."
            )
        else:
            sentences.append("This model stores a KV head for every query head (MHA): it has no GQA to gain from.")
        return sentences

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("cache"),
            Column("bytes a token", "2 L heads d b; as stored: by the engine"),
            *(Column(f"requests of {n:,} tokens", "KV cache of this run / (bytes a token x tokens)") for n in REQUESTS),
        )
        kinds = {
            "as stored here": self.token_bytes,
            "GQA, 16-bit (formula)": self.formula(self.num_kv_heads),
            "GQA, int8 (formula, without scales)": self.formula(self.num_kv_heads, 1),
            "MHA, 16-bit (formula)": self.formula(self.num_heads),
        }
        rows = tuple(
            (name, f"{size:,.0f}", *(f"{self.capacity / size / n:,.1f}" for n in REQUESTS))
            for name, size in kinds.items()
        )
        return (Table(f"How many requests fit into {self.capacity / 1e6:,.0f} MB of KV cache", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        kinds = {
            "written": self.token_bytes,
            "GQA, 16-bit (formula)": self.formula(self.num_kv_heads),
            "MHA, 16-bit (formula)": self.formula(self.num_heads),
        }
        return (
            lines(
                "kv_size",
                "Every token keeps its keys and values",
                [{"tokens": n, "megabytes": size / 1e6, "cache": "written"} for n, size in self.written],
                ("tokens", "tokens of the request, prompt and answer"),
                ("megabytes", "KV cache, MB"),
                series="cache",
                fitted=[
                    {"tokens": n, "megabytes": size * n / 1e6, "cache": name}
                    for name, size in kinds.items()
                    for n in (0, self.tokens[-1])
                ],
                caption="Points: bytes of the cache that were written, in its memory. Lines: bytes a token times "
                "tokens.",
            ),
        )


def _written(workshop: Workshop) -> int | None:
    """Bytes of the KV cache that are not zero any more, in lines of 64; None if it cannot be looked at."""
    if not workshop.kv_memory:
        return None
    total = 0
    for array in workshop.kv_memory:
        lines = array.reshape(-1).view(np.uint64).reshape(-1, LINE // 8)
        total += LINE * int(np.count_nonzero(lines.any(axis=1)))
    return total
