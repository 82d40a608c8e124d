"""Unpacked weights equal the gguf package's dequantization."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from tests.tiny_gguf import random_raw

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.weights.block_formats import FORMATS
from twinphase.weights.quant import dequantize, tensor_nbytes, unpack

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.quantized]
SHAPE = (24, 768)


def raw_and_expected(type: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    raw = random_raw(np.random.default_rng(seed), SHAPE, type)
    # The gguf package views F32 and F16 through the last axis, so bytes serve for every type.
    return raw, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type]).reshape(SHAPE)


@pytest.mark.parametrize("type", FORMATS)
def test_dequantize_equals_gguf_exactly(type):
    raw, expected = raw_and_expected(type)
    actual = dequantize(raw.reshape(-1), SHAPE, type)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(
        dequantize(raw[5:7].reshape(-1), (2, SHAPE[1]), type), expected[5:7]
    )  # rows alone
    assert tensor_nbytes(SHAPE, type) == raw.nbytes
    experts = np.concatenate([raw, raw[::-1]]).reshape(-1)  # a stack of matrices
    assert tensor_nbytes((2, *SHAPE), type) == experts.nbytes
    np.testing.assert_array_equal(
        dequantize(experts, (2, *SHAPE), type), np.stack([expected, expected[::-1]])
    )


@pytest.mark.parametrize("type", QUANTIZED)
def test_random_bytes_dequantize_as_gguf(type):
    # Every bit pattern of the integers and the packed scales, with finite float16 parameters.
    fmt = FORMATS[type]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (64, fmt.block_bytes), dtype=np.uint8)
    halves = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "MXFP4": []}.get(
        type, [0, 2] if fmt.has_minimum else [0]
    )
    for start in halves:
        parameter = rng.standard_normal((64, 1)).astype(np.float16)
        blocks[:, start : start + 2] = parameter.view(np.uint8)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type])
    actual = dequantize(blocks.reshape(-1), (64, fmt.block_size), type)
    np.testing.assert_array_equal(actual, expected.reshape(64, -1))


@pytest.mark.parametrize("type", QUANTIZED)
def test_unpack_is_affine_and_within_its_bits(type):
    raw, expected = raw_and_expected(type, seed=3)
    tensor = unpack(raw.reshape(-1), SHAPE, type)
    fmt = FORMATS[type]
    groups = SHAPE[1] // fmt.group_size
    assert tensor.q.shape == SHAPE
    assert tensor.scale.shape == (SHAPE[0], groups)
    assert tensor.q.dtype == (np.int8 if fmt.bits == 8 else np.uint8)
    assert (tensor.minimum is not None) == fmt.has_minimum
    if fmt.bits != 8:
        assert tensor.q.max() == (1 << fmt.bits) - 1
    scale = np.repeat(tensor.scale, fmt.group_size, axis=1)
    minimum = 0 if tensor.minimum is None else np.repeat(tensor.minimum, fmt.group_size, axis=1)
    values = scale * (tensor.q.astype(np.float32) - tensor.offset) + minimum
    np.testing.assert_array_equal(values, expected)


def test_vectors_and_stacks_keep_their_shape():
    values = np.arange(64, dtype=np.float32)
    raw = values.view(np.uint8)
    np.testing.assert_array_equal(dequantize(raw, (64,), "F32"), values)
    assert dequantize(raw, (2, 2, 16), "F32").shape == (2, 2, 16)
    assert dequantize(raw, (64,), "F32").flags.writeable


def test_wrong_sizes_and_types_are_named():
    with pytest.raises(CheckpointError, match="33 values.*Q4_0"):
        tensor_nbytes((2, 33), "Q4_0")
    with pytest.raises(CheckpointError, match="18 bytes, here are 17"):
        unpack(np.zeros(17, np.uint8), (1, 32), "Q4_0")
    with pytest.raises(UnsupportedModelError, match="IQ1_S"):
        dequantize(np.zeros(1, np.uint8), (1, 1), "IQ1_S")
    with pytest.raises(UnsupportedModelError, match="not a quantized"):
        unpack(np.zeros(4, np.uint8), (1, 1), "F32")
