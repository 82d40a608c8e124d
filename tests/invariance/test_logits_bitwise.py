"""The logits of a position are the same bits however its step was made up.

One pass, chunks of any size and single tokens; any number of threads; alone or with other requests;
in any physical blocks. For every instruction-set path of this processor, weight format and head
shape. Paths are not compared with each other: they add in different orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from steps import (
    ISAS_OF_ATTENTION,
    Piece,
    Steps,
    compile_together,
    differs_in_dot_alone,
    own_cache,
    per_isa,
)
from tiny_gguf import write_tiny_gguf
from twinphase.backends.cpu.attention_units import AttentionUnits
from twinphase.backends.cpu.backend import CpuBackend

pytestmark = pytest.mark.timeout(900)  # the first test of a path compiles all its kernels

Tokens = NDArray[np.int32]
Logits = NDArray[np.float32]

VOCAB = 330  # not a multiple of the 32 outputs that a strip holds
LENGTH = 530  # four whole tiles of 128 KV tokens and a part; more rows than two chunks of 192
SIZES = (1, 7, 64, 512)


@dataclass(frozen=True)
class Case:
    """Tiny models that cover every format and every head; shapes recur to save compiling."""

    tensor_type: str
    hidden: int
    heads: int
    kv_heads: int
    embedding_type: str | None = None
    tied: bool = True
    kv_cache_dtype: str = "auto"
    window: int | None = None
    experts: tuple[int, int] | None = None

    @property
    def layers(self) -> tuple[object, ...]:
        """The properties that distinguish it from cases with weights in another format."""
        heads = self.hidden // self.heads, self.heads, self.kv_heads
        return *heads, self.kv_cache_dtype, self.window, self.experts

    @property
    def id(self) -> str:
        heads = f"d{self.hidden // self.heads}-g{self.heads // self.kv_heads}x{self.kv_heads}"
        more = f"-window{self.window}" if self.window else ""
        more += f"-experts{self.experts[0]}" if self.experts else ""
        return f"{self.tensor_type}-{heads}-{self.kv_cache_dtype}{more}"


CASES = (
    Case("Q4_0", 192, 3, 1, embedding_type="Q8_0"),
    Case("Q4_0", 192, 3, 1, embedding_type="Q8_0", window=140),
    Case("Q4_0", 192, 3, 1, embedding_type="Q8_0", window=20, experts=(6, 2)),
    Case("Q4_1", 128, 2, 2, tied=False),
    Case("Q8_0", 448, 7, 1),
    Case("Q4_0", 192, 3, 1, embedding_type="Q8_0", kv_cache_dtype="int8"),
    Case("Q8_0", 448, 7, 1, kv_cache_dtype="int8"),
    Case("BF16", 64, 4, 2, kv_cache_dtype="int8"),
    Case("Q5_0", 256, 16, 8),
    Case("Q5_1", 64, 4, 2),
    Case("F32", 192, 3, 1),
    Case("F16", 128, 2, 2),
    Case("BF16", 64, 4, 2),
    Case("Q4_K", 256, 2, 1, embedding_type="Q6_K"),
    Case("Q5_K", 256, 16, 8),
    Case("Q6_K", 256, 2, 1),
    Case("Q2_K", 256, 16, 8),
    Case("Q3_K", 256, 16, 8),
    Case("IQ4_NL", 64, 4, 2),
    Case("IQ4_XS", 256, 16, 8),
    Case("MXFP4", 64, 4, 2, embedding_type="Q8_0", experts=(5, 3)),
)
FIRST = CASES[0]
# Windows, experts, a group larger than a tile, and the other cache.
ELSEWHERE = [CASES[at] for at in (0, 1, 2, 4, 5)]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[Path]:
    """Where the models of this module are; nothing of them stays in memory behind it."""
    path = tmp_path_factory.mktemp("models")
    with own_cache(path / "cache"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionUnits, "sharing", "always")
        yield path
    compiled.cache_clear()
    model.cache_clear()
    one_pass.cache_clear()


@cache
def compiled(folder: Path, isa: str) -> None:
    """Compile the kernels of all cases."""
    compile_together(isa, [partial(load, folder, case, isa) for case in cases_on(isa)])


def cases_on(isa: str) -> Sequence[Case]:
    """The cases to test on a path."""
    if isa == ISAS_OF_ATTENTION[0]:
        return CASES
    return ELSEWHERE[:1] if differs_in_dot_alone(isa) else ELSEWHERE


@lru_cache(maxsize=8)
def model(folder: Path, case: Case, isa: str, threads: int = 2, block_size: int = 16) -> Steps:
    """The case's model, ready to step."""
    compiled(folder, isa)
    return load(folder, case, isa, threads, block_size)


def load(folder: Path, case: Case, isa: str, threads: int = 2, block_size: int = 16) -> Steps:
    """The same model if its kernels may have to be compiled."""
    path = folder / f"{case.id}.gguf"
    if not path.exists():
        write_tiny_gguf(
            path,
            hidden=case.hidden,
            heads=case.heads,
            kv_heads=case.kv_heads,
            tied=case.tied,
            ffn=256 if case.hidden == 256 else 160,
            vocab=VOCAB,
            context=1024,
            tensor_type=case.tensor_type,
            embedding_type=case.embedding_type,
            window=case.window,
            experts=case.experts,
        )
    backend = CpuBackend(
        threads=threads,
        isa=isa,
        max_num_batched_tokens=640,
        max_num_seqs=64,
        kv_cache_dtype=case.kv_cache_dtype,
    )
    return Steps(path, backend, num_blocks=1600 // block_size, block_size=block_size)


@lru_cache(maxsize=4)
def one_pass(folder: Path, case: Case, isa: str) -> Logits:
    """The logits that all others are compared with."""
    logits = model(folder, case, isa).chunked(tokens(), [LENGTH])
    # Equal bits mean nothing if they are all the same, or not numbers.
    assert np.isfinite(logits).all() and len(np.unique(logits, axis=0)) > LENGTH // 2
    return logits


def tokens(seed: int = 0, length: int = LENGTH) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32)


def assert_same_bits(logits: Logits, expected: Logits) -> None:
    """Compare integers, so that -0.0 is not 0.0; name the first position that differs."""
    differs = (logits.view(np.int32) != expected.view(np.int32)).any(axis=1)
    error = np.abs(logits - expected).max()
    assert not differs.any(), (
        f"{differs.sum()} rows differ, the first is {differs.argmax()}; by up to {error:.2e}"
    )


def per_case(cases: Sequence[Case], elsewhere: Sequence[Case], quick: int) -> pytest.MarkDecorator:
    """Runs `cases` on the path that users get, and those of `elsewhere` that the others try.

    All but the first `quick` of `cases` are marked slow.
    """
    best, *others = ISAS_OF_ATTENTION
    chosen = [(case, best, () if at < quick else pytest.mark.slow) for at, case in enumerate(cases)]
    chosen += [
        (case, isa, pytest.mark.slow)
        for isa in others
        for case in cases_on(isa)
        if case in elsewhere
    ]
    return pytest.mark.parametrize(
        ("case", "isa"),
        [
            pytest.param(case, isa, marks=marks, id=f"{isa}-{case.id}")
            for case, isa, marks in chosen
        ],
    )


# Formats differ in their linear layers, whose rows test_linear.py computes among any number of
# others on every path; elsewhere the first case of each kind of layer and cache stands for all
# formats.
KINDS: dict[tuple[object, ...], Case] = {}
for one in CASES:
    KINDS.setdefault(one.layers, one)
per_format = per_case(CASES, ELSEWHERE, len(CASES))
# Quick: every form of the cache and kind of layer.
per_cache = per_case(list(KINDS.values()), ELSEWHERE, 8)


@per_format
def test_chunks(folder, case, isa):
    for size in SIZES:
        assert_same_bits(
            model(folder, case, isa).chunked(tokens(), [size]), one_pass(folder, case, isa)
        )


@per_cache
def test_threads(folder, case, isa):
    for threads in (1, 3):
        for sizes in ([LENGTH], [130, 1, 1, 5]):
            logits = model(folder, case, isa, threads).chunked(tokens(), sizes)
            assert_same_bits(logits, one_pass(folder, case, isa))


@per_case(CASES[:5], CASES[:1], 4)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(sizes=st.lists(st.integers(1, 512), min_size=1, max_size=12))
@example(sizes=[127, 1, 1, 128])
@example(sizes=[191, 193])
def test_random_chunks(folder, case, isa, sizes):
    assert_same_bits(model(folder, case, isa).chunked(tokens(), sizes), one_pass(folder, case, isa))


def pieces(tokens: Tokens, blocks: NDArray[np.int32], sizes: Sequence[int]) -> Iterator[Piece]:
    """A sequence's rows, step by step, by a plan of row counts that repeats."""
    start = 0
    for size in cycle(sizes):
        if start >= len(tokens):
            return
        yield Piece(tokens[start : start + size], start, blocks)
        start += size


def run_crowd(steps: Steps, seed: int, sizes: Sequence[int]) -> Logits:
    """All positions' logits of a sequence, stepped with four others, in a new order every step.

    Blocks are shuffled, so that no two of a sequence adjoin.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.permutation(steps.blocks).astype(np.int32)
    plans = {LENGTH: sizes, 200: [131, *[1] * 200], 300: [60, 100, 20], 40: [1], 129: [128, 1]}
    crowd = []
    for index, (length, plan) in enumerate(plans.items()):
        count = -(-length // steps.block_size)
        mine = blocks[:count]
        blocks = blocks[count:]
        crowd.append(pieces(tokens(index, length), mine, plan))
    logits = []
    while (ours := next(crowd[0], None)) is not None:
        batch = [ours, *filter(None, (next(other, None) for other in crowd[1:]))]
        order = rng.permutation(len(batch)).tolist()
        order.sort(
            key=lambda index: len(batch[index].tokens) > 1
        )  # decodes come first; the sort keeps their order
        starts = np.cumsum([0, *(len(batch[index].tokens) for index in order)])
        at = order.index(0)
        logits.append(steps.run([batch[index] for index in order])[starts[at] : starts[at + 1]])
    return np.concatenate(logits)


@per_cache
def test_with_other_requests(folder, case, isa):
    for seed, sizes in enumerate(([300, 1, 1, 1], [50, 3, 1])):
        assert_same_bits(
            run_crowd(model(folder, case, isa), seed, sizes), one_pass(folder, case, isa)
        )


@per_cache
def test_many_decodes(folder, case, isa):
    """Steps of 2 to 64 decodes that share blocks, as requests with a common prefix do."""
    steps = model(folder, case, isa)
    expected = one_pass(folder, case, isa)
    steps.chunked(tokens(), [LENGTH])
    rng = np.random.default_rng(4)
    for count in (2, 3, 5, 8, 11, 13, 16, 17, 24, 31, 64):
        positions = rng.integers(1, LENGTH, count)
        logits = steps.run(
            [Piece(tokens()[at : at + 1], int(at), steps.blocks) for at in positions]
        )
        assert_same_bits(logits, expected[positions])


@per_cache
def test_prefixes_that_sequences_share(folder, case, isa, monkeypatch):
    """Uneven ones, of 2, 4 and 64 sequences and of several groups, in prefill and in decode.

    The same step again, with every sequence computed apart, gives the same bits.
    """
    steps = model(folder, case, isa)
    rng = np.random.default_rng(6)
    base = tokens(9, 544)
    steps.chunked(base, [544])
    for count, most in ((2, 40), (4, 90), (64, 1), (64, 9), (31, 3)):
        free = rng.permutation(np.arange(34, len(steps.blocks), dtype=np.int32))
        group = []
        for number in range(count):
            shared = (33, 24, 33, 8, 15, 0)[number % 6]  # blocks
            size = int(rng.integers(1, most + 1))
            needed = -(-size // 16)
            blocks = np.concatenate([steps.blocks[:shared], free[:needed]])
            free = free[needed:]
            group.append(Piece(rng.integers(0, VOCAB, size, dtype=np.int32), 16 * shared, blocks))
        group.sort(key=lambda piece: len(piece.tokens) > 1)
        together = steps.run(group)
        shares = any(n for name, n in steps.backend._counts.items() if "rest:sharing" in name)
        assert shares == (case.window is None)
        with monkeypatch.context() as patch:
            patch.setattr(AttentionUnits, "sharing", "never")
            assert np.isfinite(together).all()
            assert_same_bits(together, steps.run(group))


@per_cache
def test_few_rows_of_a_sequence(folder, case, isa):
    """Steps with 1 to 8 rows per sequence or a few more, as in the verification of drafts."""
    steps = model(folder, case, isa)
    expected = one_pass(folder, case, isa)
    steps.chunked(tokens(), [LENGTH])
    rng = np.random.default_rng(5)
    for rows in (*range(1, 9), 13, 22, 65):
        for end in (rows, 128 - rows // 2, 128, 129, 257 + rows // 2, LENGTH):
            start = max(0, end - rows)
            logits = steps.run([Piece(tokens()[start : start + rows], start, steps.blocks)])
            assert_same_bits(logits, expected[start : start + rows])
    for count in (2, 5, 17, 60):
        sizes = rng.choice([1, 1, 1, 2, 3, 4, 5, 8, 11], count)
        starts = rng.integers(0, LENGTH - 11, count)
        rows = [np.arange(start, start + n) for start, n in zip(starts, sizes, strict=True)]
        logits = steps.run([Piece(tokens()[at], int(at[0]), steps.blocks) for at in rows])
        assert_same_bits(logits, expected[np.concatenate(rows)])


@per_isa
def test_block_size(folder, isa):
    logits = run_crowd(model(folder, FIRST, isa, 1, block_size=32), 3, [150, 1])
    assert_same_bits(logits, one_pass(folder, FIRST, isa))


@per_isa
def test_rows_that_are_asked_for(folder, isa):
    steps = model(folder, FIRST, isa)
    expected = one_pass(folder, FIRST, isa)
    piece = Piece(tokens(), 0, steps.blocks)
    for rows in ([LENGTH - 1], [0], [5, 191, 192, 529], list(range(100, 117))):
        assert_same_bits(steps.run([piece], rows), expected[rows])
