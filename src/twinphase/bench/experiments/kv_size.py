"""Claim: the KV cache grows linearly with the tokens, and grouped-query attention makes it several times smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, exactly
from twinphase.bench.experiments.workbench import Workbench, fitted
from twinphase.bench.plots import lines
from twinphase.bench.report import Column, Plot, Table
from twinphase.phases.work import kv_bytes_per_token

__all__ = ["EXPERIMENT", "KVSize"]

TOKENS = (1024, 512, 256, 128)
OUTPUT = 24
REQUESTS = (1024, 8192, 131072)  # tokens of a request, for how many would fit
GROWTH, LEFT_OVER, GQA = "bytes a token, held / by formula", "farthest from a straight line", "all heads / stored heads"


@dataclass(frozen=True)
class KVSize:
    """What requests of growing length hold.

    Attributes:
        tokens: with KV, after each step since the prompt was read.
        blocks: held for them.
        block_size: tokens of a block.
        token_bytes: of one token, as the cache stores it.
        num_layers, num_heads, num_kv_heads, head_dim: of the model.
        capacity: bytes of the cache.
    """

    tokens: list[int]
    blocks: list[int]
    block_size: int
    token_bytes: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int

    @property
    def held(self) -> list[int]:
        """Bytes after each step."""
        return [count * self.block_size * self.token_bytes for count in self.blocks]

    def formula(self, heads: int, width: float = 2) -> float:
        """2 L heads d b: bytes of a token with `width` bytes a value."""
        return 2 * self.num_layers * heads * self.head_dim * width


def _measure(bench: Workbench) -> KVSize:
    workshop, shape = bench.workshop, bench.workshop.shape
    size = workshop.config.block_size
    length = bench.size(
        "tokens of the longest request",
        TOKENS,
        lambda n: (5 * bench.speed.prefill(n) + 8 * bench.speed.decode(OUTPUT)) / 8,
    )
    engine = bench.engine()
    pool = engine.engine.scheduler.kv_cache.pool
    before = pool.num_held
    tokens: list[int] = []
    blocks: list[int] = []
    for eighth in range(1, 9):
        bench.progress(bench.title, eighth - 1, 8)
        ticket = engine.submit(workshop.prompt(max(1, length * eighth // 8 - OUTPUT)), OUTPUT)
        while not engine.step().finished:  # a finished request gives its blocks back at once
            if ticket.times:
                tokens.append(ticket.request.num_computed_tokens)
                blocks.append(pool.num_held - before)
    return KVSize(
        tokens,
        blocks,
        size,
        kv_bytes_per_token(shape),
        shape.num_layers,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        workshop.capacity * kv_bytes_per_token(shape),
    )


def _estimates(found: KVSize) -> Mapping[str, Estimate]:
    # A block is taken as a whole: on a straight line, what is held is at most a block above what is needed.
    over = [count * found.block_size - tokens for count, tokens in zip(found.blocks, found.tokens, strict=True)]
    straight = fitted(found.tokens, [float(one) for one in found.held], 1)
    return {
        GROWTH: exactly(straight[1] / found.token_bytes),
        LEFT_OVER: exactly(max(map(abs, over)) / found.block_size),
        GQA: exactly(found.formula(found.num_heads) / found.formula(found.num_kv_heads)),
    }


def _why(found: KVSize, judged: Sequence[Judged]) -> Sequence[str]:
    group = found.num_heads // found.num_kv_heads
    sentences = [
        f"By the formula 2 L H_kv d b a token takes 2 x {found.num_layers} x {found.num_kv_heads} x {found.head_dim} "
        "x 2 = "
        f"{found.formula(found.num_kv_heads):,.0f} bytes with 16-bit values. This cache stores {found.token_bytes:,}: "
        "its keys, or keys and values, are int8 with a scale for each head.",
        f"Memory is handed out in blocks of {found.block_size} tokens, so the line is a staircase that is never a "
        "whole "
        "block above what is needed.",
    ]
    if group > 1:
        sentences.append(
            f"This model has {found.num_heads} query heads and stores {found.num_kv_heads} KV heads: {group} query "
            "heads "
            f"share each (GQA). With a KV head for every query head (MHA) a token would take {group} times as much, "
            "and "
            "decode would read as many times more for each earlier token. By the formula: there is no MHA twin of this "
            "model here to measure."
        )
    else:
        sentences.append("This model stores a KV head for every query head (MHA): it has no GQA to gain from.")
    return sentences


def _tables(found: KVSize) -> Sequence[Table]:
    columns = (
        Column("cache"),
        Column("bytes a token", "2 L heads d b; as stored: by the engine"),
        *(Column(f"requests of {n:,} tokens", "KV cache of this run / (bytes a token x tokens)") for n in REQUESTS),
    )
    kinds = (
        ("as stored here", found.token_bytes),
        ("GQA, 16-bit (formula)", found.formula(found.num_kv_heads)),
        ("GQA, int8 (formula, without scales)", found.formula(found.num_kv_heads, 1)),
        ("MHA, 16-bit (formula)", found.formula(found.num_heads)),
    )
    rows = tuple(
        (name, f"{size:,.0f}", *(f"{found.capacity / size / n:,.1f}" for n in REQUESTS)) for name, size in kinds
    )
    return (Table(f"How many requests fit into {found.capacity / 1e6:,.0f} MB of KV cache", columns, rows),)


def _plots(found: KVSize) -> Sequence[Plot]:
    held = "held, in blocks"
    rows = [
        {"tokens": n, "megabytes": size / 1e6, "cache": held} for n, size in zip(found.tokens, found.held, strict=True)
    ]
    curve = []
    for name, size in (
        (held, float(found.token_bytes)),
        ("GQA, 16-bit (formula)", found.formula(found.num_kv_heads)),
        ("MHA, 16-bit (formula)", found.formula(found.num_heads)),
    ):
        curve += [{"tokens": n, "megabytes": size * n / 1e6, "cache": name} for n in (0, found.tokens[-1])]
    return (
        lines(
            "kv_size",
            "Every token keeps its keys and values",
            rows,
            ("tokens", "tokens of the request, prompt and answer"),
            ("megabytes", "KV cache, MB"),
            series="cache",
            fitted=curve,
            caption="Points: what the engine held after each token. Lines: bytes a token times tokens.",
        ),
    )


EXPERIMENT = Experiment(
    name="kv-size",
    claim="The KV cache grows linearly with the tokens; grouped-query attention makes it several times smaller.",
    method="Blocks that a request holds after every step of its answer, for requests of eight lengths.",
    rules=(
        Rule(GROWTH, "slope of bytes held over tokens / bytes of a token as stored", 0.97, 1.03),
        Rule(LEFT_OVER, "most that is held beyond the tokens, in blocks", at_most=1, unit="blocks"),
        Rule(GQA, "2 L H d b / (2 L H_kv d b) = H / H_kv of this model", at_least=1.5),
    ),
    meaning="Memory for KV, and not the weights, limits how many long requests run at once; it is known beforehand.",
    share=0.3,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
)
