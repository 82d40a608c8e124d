"""The Triton kernels in Triton's interpreter, beside plain torch and the reference, bit for bit
beside themselves in other batches, chunks and phases.

The interpreter computes bfloat16 wrongly and without a word, so that type waits for a GPU. Its
products are those of NumPy, whose BLAS adds in another order where a transposed operand meets many
rows; here they add one after another, so that what is proven is the order of our tiles, for any
unit that computes each element from its own row and column.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_families import make_model

from recorded_graph import Recorder, record_kernels
from steps import Piece, Steps
from tiny_gguf import random_raw, write_tiny_gguf
from triton_device import (
    CAPABILITY,
    DEVICE,
    DTYPES,
    INTERPRETED,
    MAX_ERROR,
    TOLERANCES,
    WEIGHT_TOLERANCES,
    WIDEST,
    errors_of,
    normal,
    product,
    same_bits,
)
from twinphase.backends.reference import ReferenceBackend
from twinphase.weights.block_formats import FORMATS
from twinphase.weights.quant import dequantize

pytest.importorskip("triton")
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "without a GPU, TRITON_INTERPRET=1 has to be set before Triton is imported",
        allow_module_level=True,
    )

from triton.runtime import interpreter  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from twinphase.backends.torch.experts import mixture  # noqa: E402
from twinphase.backends.torch.kernel_backend import KernelBackend  # noqa: E402
from twinphase.backends.torch.kernels import attention as attention_kernels  # noqa: E402
from twinphase.backends.torch.kernels import linear as linear_kernels  # noqa: E402
from twinphase.backends.torch.kernels import tiles  # noqa: E402
from twinphase.backends.torch.kernels.attention import (  # noqa: E402
    Shape,
    Tiles,
    attention,
    rows_of_tile,
)
from twinphase.backends.torch.kernels.experts import route  # noqa: E402
from twinphase.backends.torch.kernels.linear import linear  # noqa: E402
from twinphase.backends.torch.kernels.tiles import FEW, Tile  # noqa: E402
from twinphase.backends.torch.tune import candidates, tune  # noqa: E402
from twinphase.backends.torch.weights import Matrix, pack  # noqa: E402
from twinphase.blueprint import Experts  # noqa: E402

F32 = NDArray[np.float32]
TOKENS = np.random.default_rng(0).integers(3, 320, 24, dtype=np.int32)
# Caps, windows and norms behind; norms over the width; sinks and experts with biases; norms of
# heads; a part rotated; queries scaled by position.
ONE_OF_EACH = ("gemma2", "olmo2", "gpt-oss", "qwen3-moe", "glm4", "ministral3")
FORMATS_HERE = [name for name, fmt in FORMATS.items() if fmt.quantized or name == "F16"]
few_shapes = settings(max_examples=8, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def orderly(monkeypatch) -> Iterator[None]:
    """Products whose order is known, and spans of which short contexts have several."""
    if INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    monkeypatch.setattr(linear_kernels, "CHUNK", 64)
    monkeypatch.setattr(attention_kernels, "SPAN", 32)
    monkeypatch.setattr(attention_kernels, "KEYS", 16)
    before = torch.get_default_device()
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_architectures(tmp_path, family):
    """Float32 logits are the reference's, with the same bits alone and beside other sequences.

    A program of a kernel takes the interpreter about a millisecond, and a step has thousands.
    """
    make_model(family, num_hidden_layers=2).save_pretrained(tmp_path)
    expected = Steps(tmp_path, ReferenceBackend(), num_blocks=32).chunked(TOKENS, [24])
    steps = Steps(tmp_path, KernelBackend(str(DEVICE), WIDEST), num_blocks=32)
    found = steps.chunked(TOKENS, [24])
    assert errors_of(found, expected).max() <= MAX_ERROR
    other = steps.blocks[5:10]
    steps.run([Piece(TOKENS[:13], 0, other)])
    decode = Piece(TOKENS[23:], 23, steps.blocks[:5])
    chunk = Piece(TOKENS[13:], 13, other)
    same_bits(steps.run([decode, chunk]), np.concatenate([found[23:], found[13:]]))


@pytest.mark.parametrize("experts", [None, (5, 2)], ids=["dense", "experts"])
def test_a_captured_step_has_the_bits_of_the_step(tmp_path, monkeypatch, experts):
    """Two sequences in a step captured for four with longer contexts, without the host."""
    monkeypatch.setattr("twinphase.backends.torch.graphs.MIN_CONTEXT_TOKENS", 48)
    if INTERPRETED:
        record_kernels(monkeypatch)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", layers=1, experts=experts)
    results = []
    for capture in (True, False):
        backend = KernelBackend(str(DEVICE), WIDEST)
        steps = Steps(path, backend, num_blocks=4)
        if capture:
            if INTERPRETED:
                backend.make_graph = Recorder
            monkeypatch.setattr(
                "twinphase.backends.torch.graphs._doubling", lambda _, last: [last]
            )  # one size
            backend.capture(steps.model.forward, 4, 48, None)
        pieces = [Piece(TOKENS[:5], 0, steps.blocks[:2]), Piece(TOKENS[:17], 0, steps.blocks[2:])]
        steps.run(pieces)
        results.append(
            steps.run(
                [Piece(TOKENS[17:18], one.start + len(one.tokens), one.blocks) for one in pieces]
            )
        )
        assert (
            not capture
            or not INTERPRETED
            or [size.graph.replays for size in backend.graphs.sizes] == [1]
        )
    same_bits(*results)


def test_weights_dequantized_while_loading(tmp_path, monkeypatch):
    """The same bits; some rows, or some experts, after others."""
    monkeypatch.setattr("twinphase.backends.torch.weights.DEQUANTIZED_CHUNK_BYTES", 9000)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", layers=1, experts=(5, 2))
    results = []
    for whole in (False, True):
        backend = KernelBackend(str(DEVICE), "float16", dequantize=whole)
        steps = Steps(path, backend, num_blocks=4)
        results.append(steps.run([Piece(TOKENS[:3], 0, steps.blocks)]))
        assert {part.bits for matrix in backend.matrices for part in matrix.parts} == (
            {0} if whole else {0, 4}
        )
    same_bits(*results)


@pytest.mark.parametrize("kind", FORMATS_HERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_format(kind, dtype):
    """Few rows and many, beside a product of the dequantized weights; and the same bits."""
    groups = 8 if FORMATS[kind].block_size == 256 else 3  # not a whole number of pairs
    check_linear(FEW + 1, 65, groups, kind, dtype, "", 0)


def test_scales_of_mxfp4_that_float16_has_not_stay_float32():
    raw = random_raw(np.random.default_rng(0), (2, 64), "MXFP4")
    for exponent, dtype in ((127, torch.float16), (60, torch.float32)):
        raw[0, 0] = exponent
        weight = pack(raw.reshape(-1), (2, 64), "MXFP4", torch.float16, DEVICE)
        assert (
            weight.scale is not None
            and weight.scale.dtype == dtype
            and weight.scale[0, 0] == 2.0 ** (exponent - 128)
        )


@few_shapes
@given(
    rows=st.sampled_from([1, 2, 16, 17, FEW, FEW + 1]),
    outputs=st.sampled_from([1, 63, 64, 65, 129]),
    groups=st.integers(1, 5),
    kind=st.sampled_from(["Q4_0", "Q8_0", "Q4_1", "Q5_0", "F32"]),
    dtype=st.sampled_from(DTYPES),
    added=st.sampled_from(["", "bias", "residual"]),
    seed=st.integers(0, 999),
)
def test_linear(rows, outputs, groups, kind, dtype, added, seed):
    check_linear(rows, outputs, groups, kind, dtype, added, seed)


def check_linear(
    rows: int, outputs: int, groups: int, kind: str, dtype: torch.dtype, added: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    inputs = 32 * groups
    raw = random_raw(rng, (outputs, inputs), kind).reshape(-1)
    weight = pack(raw, (outputs, inputs), kind, dtype, DEVICE)
    values = dequantize(raw, (outputs, inputs), kind)
    torch.testing.assert_close(
        weight.values().float().cpu(), torch.from_numpy(values), **WEIGHT_TOLERANCES[dtype]
    )
    x = normal(rng, rows, inputs).to(dtype)
    shapes = {"bias": (outputs,), "residual": (rows, outputs)}
    term = normal(rng, *shapes[added]) if added else None
    terms = {added: term} if added else {}
    found = linear(x, weight, **terms, capability=CAPABILITY)
    expected = x.double() @ weight.values().double().T + (0 if term is None else term)
    torch.testing.assert_close(found.double(), expected, **TOLERANCES[dtype])
    which = int(rng.integers(rows))  # alone it is one of few rows
    own = {
        name: one[which : which + 1] if name == "residual" else one for name, one in terms.items()
    }
    same_bits(
        linear(x[which : which + 1], weight, **own, capability=CAPABILITY), found[which : which + 1]
    )


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has one unit, which takes minutes")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_its_bits_in_every_tile(monkeypatch, kind, dtype):
    """Few rows with a program for each chunk, many, and most, which have tiles of their own."""
    monkeypatch.setattr(linear_kernels, "CHUNK", 2048)
    rng = np.random.default_rng(0)
    shape = 4096, 4096 + 96
    weight = pack(random_raw(rng, shape, kind).reshape(-1), shape, kind, dtype, DEVICE)
    x = normal(rng, 2048, shape[1]).to(dtype)
    whole = linear(x, weight, capability=CAPABILITY)
    for rows in (1, 16, FEW, FEW + 1, 512):
        same_bits(linear(x[-rows:], weight, capability=CAPABILITY), whole[-rows:])


@few_shapes
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (7, 1), (20, 1)]),
    head_dim=st.sampled_from([8, 24, 64]),
    block_size=st.sampled_from([1, 5, 16]),
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=3),
    window=st.sampled_from([0, 0, 1, 17, 40]),
    softcap=st.sampled_from([0.0, 5.0]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_attention(
    heads,
    head_dim,
    block_size,
    lengths,
    window,
    softcap,
    with_sinks,
    dtype,
    seed,
):
    """Sequences of (tokens before, rows) as prefills and decodes: near torch, equal bits twice."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    blocks = [-(-sum(length) // block_size) for length in lengths]
    order = torch.randperm(sum(blocks), generator=generator)
    tables = torch.zeros(len(lengths), max(blocks)).long()
    for i, own in enumerate(order.split(blocks)):
        tables[i, : len(own)] = own
    shape = Shape(*heads, head_dim, block_size, head_dim**-0.5, softcap, window)
    q = torch.randn(sum(n for _, n in lengths), heads[0], head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(
        2, sum(blocks) * block_size, heads[1], head_dim, generator=generator
    ).to(dtype)
    sinks = torch.randn(heads[0], generator=generator) if with_sinks else None
    positions = torch.cat([torch.arange(before, before + n) for before, n in lengths])
    results = []
    for decode in (False, True):
        tiles = tiles_of(lengths, heads[0] // heads[1], head_dim, decode)
        out = torch.full_like(q, torch.nan)
        attention(q, keys, values, out, shape, sinks, positions, tables, tiles, decode)
        results.append(out)
    same_bits(*results)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else TOLERANCES[torch.bfloat16]
    expected = plain_attention(q, keys, values, shape, sinks, lengths, tables)
    torch.testing.assert_close(results[0].double(), expected, **near)


@pytest.mark.parametrize(
    ("rows", "count", "used", "kinds", "dtype", "biased"),
    [
        (1, 5, 4, ("Q4_0", "Q8_0"), torch.float32, ""),
        (1, 3, 1, ("F32", "Q4_1"), torch.float16, "all"),
        (9, 4, 2, ("MXFP4", "MXFP4"), torch.float16, "all"),
        (
            17,
            8,
            2,
            ("Q4_0", "Q4_0"),
            torch.float32,
            "one",
        ),  # an expert has a row more than a tile, others few
        (2 * FEW + 2, 2, 1, ("Q5_0", "Q5_0"), torch.float32, "all"),  # many
        (33, 20, 2, ("Q4_0", "Q4_1"), torch.float16, ""),
    ],
)
def test_experts(rows, count, used, kinds, dtype, biased):
    """Few pairs of an expert, many, none, or all: as expert by expert, with the same bits."""
    rng = np.random.default_rng(rows)
    hidden = 32
    ffn = 64

    def matrix(outputs: int, inputs: int, *kinds: str) -> Matrix:
        raws = [random_raw(rng, (count * outputs, inputs), kind).reshape(-1) for kind in kinds]
        shape = count, outputs, inputs
        return Matrix(
            [pack(raw, shape, kind, dtype, DEVICE) for raw, kind in zip(raws, kinds, strict=True)]
        )

    backend = KernelBackend(str(DEVICE), str(dtype).removeprefix("torch."))
    backend.blueprint = cast(
        "Any", SimpleNamespace(share=None, span=lambda columns: None, activation="silu")
    )
    gate_up = matrix(ffn, hidden, *kinds)
    down = matrix(hidden, ffn, kinds[1])
    raw = rng.standard_normal((count, hidden), dtype=np.float32).view(np.uint8).reshape(-1)
    router = Matrix([pack(raw, (count, hidden), "F32", dtype, DEVICE)])
    biases = {
        "router_bias": normal(rng, count),
        "gate_up_bias": normal(rng, count, 2 * ffn),
        "down_bias": normal(rng, count, hidden),
    }
    if biased == "one":
        biases = {"router_bias": 100 * torch.eye(count)[count // 2]}
    weights = (router, gate_up, down)
    biases = biases if biased else {}
    x = normal(rng, rows, hidden).to(dtype)
    config = Experts(count, used, ffn, renormalize=rows % 2 > 0)
    found = backend.moe(x, *weights, config, **biases)
    torch.testing.assert_close(
        found, mixture(backend, x, *weights, config, **biases), **TOLERANCES[dtype]
    )
    same_bits(backend.moe(x[-1:], *weights, config, **biases), found[-1:])
    # The products themselves are those of each expert alone, bit for bit.
    routed = route(backend.linear(x, router, bias=biases.get("router_bias")), config, 0)
    products = backend.linear(x, gate_up, bias=biases.get("gate_up_bias"), routed=routed)
    seen = torch.zeros(rows * used, dtype=torch.bool)
    for expert, first, end in (tile for tile in routed.tiles.T.tolist() if tile[1] < tile[2]):
        pairs = routed.pairs[first : min(end, first + routed.rows)].long()
        own = biases.get("gate_up_bias")
        alone = backend.linear(
            x[pairs // used], gate_up[expert], bias=None if own is None else own[expert]
        )
        same_bits(products[pairs], alone)
        assert not seen[pairs].any()
        seen[pairs] = True
    assert seen.all()


def test_a_router_whose_logits_are_not_finite_chooses_experts_that_exist():
    logits = torch.tensor(
        [[torch.nan] * 3, [torch.nan, 1.0, 2.0], [torch.inf, torch.inf, -torch.inf]]
    )
    with np.errstate(invalid="ignore"):
        routed = route(logits, Experts(3, 2, 8, renormalize=True), 0)
    assert sorted(routed.pairs.tolist()) == list(range(6)) and set(routed.tiles[0].tolist()) <= {
        0,
        1,
        2,
    }
    assert routed.weights.isnan().any(dim=1).all()


def tiles_of(lengths: list[tuple[int, int]], group: int, head_dim: int, decode: bool) -> Tiles:
    rows = rows_of_tile(group, head_dim, decode, CAPABILITY)
    start = 0
    found = []
    for i, (_, count) in enumerate(lengths):
        end = start + count
        step = rows // group
        found += [(i, first, min(first + step, end)) for first in range(start, end, step)]
        start = end
    return Tiles(*torch.tensor(found).T.contiguous(), rows, max(sum(length) for length in lengths))


def plain_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shape: Shape,
    sinks: torch.Tensor | None,
    lengths: list[tuple[int, int]],
    tables: torch.Tensor,
) -> torch.Tensor:
    """In float64, row by row and head by head."""
    group = shape.num_heads // shape.num_kv_heads
    out = torch.empty_like(q).double()
    row = 0
    for table, (before, count) in zip(tables, lengths, strict=True):
        for position in range(before, before + count):
            at = torch.arange(
                max(0, position - shape.window + 1) if shape.window else 0, position + 1
            )
            slots = table[at // shape.block_size] * shape.block_size + at % shape.block_size
            for head in range(shape.num_heads):
                scores = keys[slots, head // group].double() @ q[row, head].double() * shape.scale
                if shape.softcap:
                    scores = shape.softcap * torch.tanh(scores / shape.softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                p = torch.softmax(scores, 0)[: len(at)]
                out[row, head] = p @ values[slots, head // group].double()
            row += 1
    return out


@pytest.mark.slow
def test_what_the_compiler_makes_of_them():
    """For compute capabilities 8.0, 9.0 and 12.0, as the tables configure them; without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        str(Path(__file__).parents[2] / "benchmarks/torch_kernels.py"),
        "--json",
    ]
    kernels = json.loads(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    )
    assert {one["capability"] for one in kernels} == {80, 90, 120} and len(kernels) == 99
    for one in kernels:
        assert (
            one["spilled"] == 0 and one["shared"] <= one["shared_limit"] and one["blocks"] >= 1
        ), one
        if one["phase"] == "prefill":
            assert one["tensor_cores"] == ("wgmma" if one["capability"] == 90 else "mma.sync"), one


def test_tuned_tiles_use_the_unit_of_all_others():
    """Programs of fewer than 64 outputs or four warps multiply in another unit on 9.0."""
    for few in (True, False):
        assert len(candidates(few, 80)) >= len(candidates(few, 90)) > 5
        assert all(tile.outputs >= 64 and tile.num_warps >= 4 for tile in candidates(few, 90))


def test_tuned_tiles_are_kept_used_and_change_no_bit(tmp_path, monkeypatch, caplog):
    """With made-up times: for few rows 32 outputs per program are fastest, for many none is."""
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path))
    monkeypatch.setattr(tiles, "tuned", {})
    fastest = Tile(16, 32, 4, 2)
    raw = random_raw(np.random.default_rng(0), (70, 64), "Q4_0").reshape(-1)
    weight = pack(raw, (70, 64), "Q4_0", torch.float32, DEVICE)
    x = torch.randn(3, 64)
    told = []
    before = linear(x, weight)

    def made_up(x: torch.Tensor, weight: Any, tile: Tile) -> float:
        if tile.num_stages == 5:
            raise OutOfResources(1, 0, "shared memory")
        return 0.5 if tile == fastest else 0.99

    monkeypatch.setattr("twinphase.backends.torch.tune._seconds", made_up)
    found = tune([Matrix([weight, weight])], torch.float32, 0, lambda *step: told.append(step))
    assert found == {"few 4 140x64": fastest} and told == [(0, 2), (1, 2), (2, 2)]
    path = tiles.keep_tuned("NVIDIA A100-SXM", {**found, "few 4 70x64": fastest})
    assert tiles.keep_tuned("NVIDIA A100-SXM", {}) == path and tiles.read_tuned("another") == {}
    tiles.tuned = tiles.read_tuned("NVIDIA A100-SXM")
    assert tiles.tile_for(True, 4, 70, 64, 90) == fastest != tiles.tile_for(False, 4, 70, 64, 90)
    same_bits(linear(x, weight), before)
    path.write_text('{"few 4 70x64": 3}')
    with caplog.at_level(logging.WARNING):
        assert tiles.read_tuned("NVIDIA A100-SXM") == {}
    assert "not readable: the shipped tiles are used. Run `twinphase tune` again" in caplog.text
    assert (
        tiles.keep_tuned("NVIDIA A100-SXM", found) == path
        and tiles.read_tuned("NVIDIA A100-SXM") == found
    )
