"""Attention of the cpu backend compared with the reference's float32, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from steps import (
    ISAS_OF_ATTENTION,
    Piece,
    Steps,
    compile_together,
    differs_in_dot_alone,
    own_cache,
    per_isa,
    step_inputs,
)
from tiny_gguf import write_tiny_gguf
from twinphase.backends.base import Array, Backend, StepInputs
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.cpu.kernels.attention_fetch import FETCH_STEPS, fetch
from twinphase.backends.cpu.kv_layout import (
    CELLS_PER_TILE,
    KV_CACHE_DTYPES,
    key_bytes,
    value_bytes,
)
from twinphase.backends.reference import ReferenceBackend
from twinphase.errors import InvalidRequestError

pytestmark = pytest.mark.timeout(900)  # the first test of a path compiles all its kernels

F32 = NDArray[np.float32]

CONTEXTS = (1, 127, 128, 129, 300)
BLOCKS = 96
# Relative norm of the attention's output. Queries and keys are int8 with a scale for each token and
# head, which is what is seen here: an error of up to 1/254 of the largest number in every factor.
# Measured: up to 0.019, paths alike.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Heads:
    """The attention of a model whose matrices are float32, so that linear layers add no error."""

    heads: int
    kv_heads: int
    head_dim: int

    def on(self, backend: Backend, folder: Path) -> Attention:
        path = folder / f"{self.heads}-{self.kv_heads}-{self.head_dim}.gguf"
        if not path.exists():
            hidden = self.heads * self.head_dim
            write_tiny_gguf(
                path,
                hidden=hidden,
                heads=self.heads,
                kv_heads=self.kv_heads,
                layers=1,
                tensor_type="F32",
                context=512,
            )
        return Attention(path, backend, num_blocks=BLOCKS)


class Attention(Steps):
    """The attention of layer 0 alone, between its norm of the embeddings and its output matrix."""

    def forward(self, backend: Backend) -> Array:
        model = self.model
        layer = self.model.layers[0]
        (mixer,) = layer.mixers
        x = backend.rms_norm(backend.embed(model.embedding), layer.attn_norm, 1e-5)
        q = backend.rope_kv_write(backend.linear(x, mixer.qkv), model.ropes[0], 0)
        return backend.linear(backend.attention(q, 0), mixer.output)

    def __call__(self, inputs: StepInputs) -> F32:
        return self.backend.execute(self.forward, inputs).copy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("attention")
    with own_cache(path / "cache"):
        yield path
    compiled.cache_clear()


SHAPES = (Heads(3, 1, 64), Heads(4, 4, 64), Heads(14, 2, 64), Heads(4, 2, 16), Heads(4, 2, 128))
# Other paths than the one that users get, and their caches: what their code depends on. They are
# those of test_logits_bitwise.py, whose kernels are compiled once.
FEW_SHAPES = [(SHAPES[0], "auto"), (SHAPES[0], "int8"), (SHAPES[2], "auto"), (SHAPES[4], "auto")]


def shapes_on(isa: str) -> list[tuple[Heads, str]]:
    """Heads and type of the KV cache that are tried on a path."""
    if isa == ISAS_OF_ATTENTION[0]:
        return list(product(SHAPES, KV_CACHE_DTYPES))
    return FEW_SHAPES[:1] if differs_in_dot_alone(isa) else FEW_SHAPES


per_isa_and_shape = pytest.mark.parametrize(
    ("heads", "isa", "dtype"),
    [
        pytest.param(
            heads,
            isa,
            dtype,
            id=f"d{heads.head_dim}-g{heads.heads // heads.kv_heads}-{isa}-{dtype}",
            marks=() if isa == ISAS_OF_ATTENTION[0] else pytest.mark.slow,
        )
        for isa in ISAS_OF_ATTENTION
        for heads, dtype in shapes_on(isa)
    ],
)


def pair(folder: Path, heads: Heads, isa: str, dtype: str = "auto") -> tuple[Attention, Attention]:
    """The cpu's attention and the reference's."""
    compiled(folder, isa)
    return cpu_attention(folder, heads, isa, dtype), heads.on(ReferenceBackend(), folder)


def cpu_attention(folder: Path, heads: Heads, isa: str, dtype: str) -> Attention:
    backend = CpuBackend(
        threads=2, isa=isa, max_num_batched_tokens=512, max_num_seqs=8, kv_cache_dtype=dtype
    )
    return heads.on(backend, folder)


@cache
def compiled(folder: Path, isa: str) -> None:
    """Compile the kernels of all shapes and cache types."""
    every = [partial(cpu_attention, folder, heads, isa, dtype) for heads, dtype in shapes_on(isa)]
    compile_together(isa, every)


def sequences(seed: int) -> list[Piece]:
    """A sequence of every context length, in shuffled blocks that no other sequence uses."""
    rng = np.random.default_rng(seed)
    blocks = rng.permutation(BLOCKS).astype(np.int32)
    pieces = []
    for length in CONTEXTS:
        count = -(-length // 16)
        mine = blocks[:count]
        blocks = blocks[count:]
        pieces.append(Piece(rng.integers(0, 320, length, dtype=np.int32), 0, mine))
    return pieces


def assert_close(actual: F32, expected: F32) -> None:
    """Compare row by row, so that one wrong row does not hide among the others."""
    errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < TOLERANCE, (
        f"row {errors.argmax()}: {errors.max():.4f}, mean {errors.mean():.4f}"
    )


@per_isa_and_shape
def test_prefill_and_decode(folder, heads, isa, dtype):
    cpu, reference = pair(folder, heads, isa, dtype)
    pieces = sequences(0)
    for piece in pieces:  # each prefilled in one chunk but for its last token ...
        head = Piece(piece.tokens[:-1], 0, piece.blocks)
        if len(head.tokens):
            inputs = step_inputs([head])
            assert_close(cpu(inputs), reference(inputs))
    # ... which all decode together.
    last = [Piece(piece.tokens[-1:], len(piece.tokens) - 1, piece.blocks) for piece in pieces]
    inputs = step_inputs(last)
    assert_close(cpu(inputs), reference(inputs))


@per_isa
def test_both_phases_in_a_step(folder, isa):
    cpu, reference = pair(folder, SHAPES[0], isa)
    pieces = sequences(1)
    for size, start in ((100, 0), (20, 100), (1, 120)):
        long = [
            Piece(p.tokens[start : start + size], start, p.blocks)
            for p in pieces
            if len(p.tokens) >= 127
        ]
        inputs = step_inputs(long)
        assert_close(cpu(inputs), reference(inputs))
    decodes = [Piece(p.tokens[121:122], 121, p.blocks) for p in pieces[1:3]]
    prefills = [Piece(p.tokens[121:127], 121, p.blocks) for p in pieces[3:]]
    inputs = step_inputs(decodes + prefills)
    assert inputs.num_decodes == 2
    assert_close(cpu(inputs), reference(inputs))


@per_isa_and_shape
def test_few_rows_of_a_sequence(folder, heads, isa, dtype):
    """Several rows of a sequence, as in verifying drafts, equal the reference's single rows."""
    cpu, reference = pair(folder, heads, isa, dtype)
    pieces = [piece for piece in sequences(2) if len(piece.tokens) >= 127]
    for piece in pieces:
        for backend in (cpu, reference):
            backend(step_inputs([piece]))
    rows = [
        np.arange(len(p.tokens) - n, len(p.tokens))
        for p, n in zip(pieces, (8, 1, 5, 2), strict=True)
    ]
    inputs = step_inputs(
        [Piece(p.tokens[at], int(at[0]), p.blocks) for p, at in zip(pieces, rows, strict=True)]
    )
    alone = [
        [Piece(p.tokens[i : i + 1], i, p.blocks)]
        for p, at in zip(pieces, rows, strict=True)
        for i in at.tolist()
    ]
    expected = np.concatenate([reference(step_inputs(piece)) for piece in alone])
    assert_close(cpu(inputs), expected)
    np.testing.assert_allclose(reference(inputs), expected, rtol=1e-4, atol=1e-5)


class Lines:
    """An `Emit` on plain numbers that notes what is asked for; a place is `PLACE_BYTES` long."""

    PLACE_BYTES = 1 << 20

    def __init__(self) -> None:
        self.b = self
        self.asked: list[int] = []

    def i64(self, value: int) -> int:
        return value

    def ashr(self, value: int, bits: int) -> int:
        return value >> bits

    def and_(self, left: int, right: int) -> int:
        return left & right

    def mul(self, left: int, right: int) -> int:
        return left * right

    def load(self, _: object, *offsets: int) -> int:
        return sum(offsets) // 8 * self.PLACE_BYTES

    def prefetch(self, *offsets: int) -> None:
        self.asked.append(sum(offsets))


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("dim", (16, 64, 80, 128))
def test_each_line_of_the_next_tile_is_asked_for_once(dim, dtype):
    lines: Any = Lines()
    for step in range(FETCH_STEPS):
        fetch(lines, 0, step, dim, dtype)
    wanted = [
        place * Lines.PLACE_BYTES + line
        for first, size in ((0, key_bytes(dim)), (2 * CELLS_PER_TILE, value_bytes(dim, dtype)))
        for place in range(first, first + CELLS_PER_TILE)
        for line in range(0, size, 64)
    ]
    assert sorted(lines.asked) == wanted


def test_bytes_of_a_token(folder):
    for dtype, expected in (("auto", 64 + 4 + 128), ("int8", 64 + 4 + 64 + 4)):
        cpu, _ = pair(folder, SHAPES[0], ISAS_OF_ATTENTION[0], dtype)
        assert cpu.backend.kv_bytes_per_token() == expected


def test_unknown_dtype_is_refused():
    with pytest.raises(InvalidRequestError, match=r"fp4.*auto, int8"):
        CpuBackend(kv_cache_dtype="fp4")
