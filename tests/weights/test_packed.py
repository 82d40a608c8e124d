"""Quantized folders give the weights of their methods' published formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from tests.weights.test_safetensors import HIDDEN, entry, header, random, values, write

from twinphase.errors import CheckpointError, TwinphaseError, UnsupportedModelError
from twinphase.weights.safetensors import open_safetensors

NAME = "model.layers.0.mlp.down_proj"
OURS = "blk.0.ffn_down.weight"
INPUTS = 256
OUTPUTS = 24
Tensors = dict[str, np.ndarray]


# AWQ and GPTQ
# ------------------------------------------------------------------------------------------------


def codes(group: int, symmetric: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers 0..15 [inputs, outputs], zeros and float16 scales [groups, outputs]."""
    rng = np.random.default_rng(group)
    zeros = rng.integers(0, 16, (INPUTS // group, OUTPUTS))
    scales = rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16)
    return (
        rng.integers(0, 16, (INPUTS, OUTPUTS)),
        np.full_like(zeros, 8) if symmetric else zeros,
        scales,
    )


def formula(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """W[output, input] = scale * (q - zero)."""
    group = len(q) // len(zeros)
    rows = [
        (q[k] - zeros[k // group]) * scales[k // group].astype(np.float64) for k in range(len(q))
    ]
    return np.stack(rows).T


def words(values: np.ndarray, axis: int, order: tuple[int, ...]) -> np.ndarray:
    """Packs eight neighbours along an axis into an int32, the `order[i]`-th into nibble i."""
    moved = np.moveaxis(values.astype(np.uint32), axis, -1)
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), np.uint32)
    for i, place in enumerate(order):
        packed |= moved[..., place::8] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def awq(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, WQLinear_GEMM.from_linear: order_map
    return {
        f"{NAME}.qweight": words(q, 1, order),
        f"{NAME}.qzeros": words(zeros, 1, order),
        f"{NAME}.scales": scales,
    }


def gptq(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, less: int = 1) -> Tensors:
    group = len(q) // len(zeros)
    return {
        f"{NAME}.qweight": words(q, 0, tuple(range(8))),
        f"{NAME}.qzeros": words(
            (zeros - less) & 15, 1, tuple(range(8))
        ),  # AutoGPTQ, QuantLinear.pack: zeros -= 1
        f"{NAME}.scales": scales,
        f"{NAME}.g_idx": (np.arange(len(q)) // group).astype(np.int32),
    }


def settings(method: str, group: int, **more: object) -> dict[str, object]:
    return {"quantization_config": {"quant_method": method, "bits": 4, "group_size": group, **more}}


METHODS: dict[str, Callable[..., Tensors]] = {"awq": awq, "gptq": gptq}


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("method", METHODS)
def test_four_bits_with_zeros(folder, method, group):
    q, zeros, scales = codes(group)
    checkpoint = open_safetensors(
        write(folder, METHODS[method](q, zeros, scales), settings(method, group)), "llama"
    )
    assert (checkpoint.tensors[OURS].type, checkpoint.tensors[OURS].shape) == (
        "Q4_1",
        (OUTPUTS, INPUTS),
    )
    # Only scale * zero is rounded, to float16: by less than 2 ** -11 of it.
    bound = np.repeat((scales * zeros.astype(np.float64)).T, group, axis=1) * 2**-11 + 1e-7
    assert (np.abs(values(checkpoint, OURS) - formula(q, zeros, scales)) <= bound).all()


@pytest.mark.parametrize("method", METHODS)
def test_symmetric_weights_are_exact(folder, method):
    q, zeros, scales = codes(64, symmetric=True)
    checkpoint = open_safetensors(
        write(folder, METHODS[method](q, zeros, scales), settings(method, 64)), "llama"
    )
    assert checkpoint.tensors[OURS].type == "Q4_0"
    np.testing.assert_array_equal(
        values(checkpoint, OURS), formula(q, zeros, scales).astype(np.float32)
    )


def test_the_second_version_of_gptq_and_tensors_left_whole(folder):
    q, zeros, scales = codes(128)
    tensors = gptq(q, zeros, scales, less=0) | {
        "model.layers.0.mlp.up_proj.weight": random(8, HIDDEN)
    }
    tensors[f"{NAME}.bias"] = random(OUTPUTS)
    config = settings("gptq", 128, checkpoint_format="gptq_v2")
    checkpoint = open_safetensors(write(folder, tensors, config), "llama")
    np.testing.assert_allclose(values(checkpoint, OURS), formula(q, zeros, scales), atol=2e-4)
    assert checkpoint.tensors["blk.0.ffn_up.weight"].type == "F32"
    np.testing.assert_array_equal(
        values(checkpoint, "blk.0.ffn_down.bias"), tensors[f"{NAME}.bias"]
    )


def test_gptq_biases_of_zeros_are_left_out(folder):
    tensors = gptq(*codes(64)) | {f"{NAME}.bias": np.zeros(OUTPUTS, np.float16)}
    attention = "model.layers.0.self_attn.q_proj"
    tensors |= {name.replace(NAME, attention): value for name, value in tensors.items()}
    checkpoint = open_safetensors(write(folder, tensors, settings("gptq", 64)), "qwen2")
    assert checkpoint.tensors.keys() == {OURS, "blk.0.attn_q.weight", "blk.0.attn_q.bias"}


def test_awq_experts_are_stacked(folder):
    expected = []
    tensors = {}
    for i in range(3):
        q, zeros, scales = (np.roll(part, i, axis=0) for part in codes(64))
        prefix = f"model.layers.0.mlp.experts.{i}.down_proj"
        tensors |= {
            key.replace(NAME, prefix): value for key, value in awq(q, zeros, scales).items()
        }
        expected.append(formula(q, zeros, scales))
    checkpoint = open_safetensors(write(folder, tensors, settings("awq", 64)), "qwen3moe")
    np.testing.assert_allclose(
        values(checkpoint, "blk.0.ffn_down_exps.weight"), expected, atol=2e-4
    )


ODD = st.sampled_from(
    [None, True, -1, 0, 1, 4, 32, 2**70, 1.5, "", "awq", "x" * 300, [], [0, 0], [-1, 2], {}, [{}]]
)


@settings_of_hypothesis(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_any_configuration_opens_or_fails_cleanly(folder, data):
    method = data.draw(st.sampled_from(["awq", "gptq", "fp8", "compressed-tensors", "mxfp4"]))
    config = settings(method, 64)
    inner = config["quantization_config"]
    assert isinstance(inner, dict)
    keys = [
        "quant_method",
        "bits",
        "group_size",
        "desc_act",
        "version",
        "checkpoint_format",
        "format",
    ]
    for key in data.draw(
        st.lists(st.sampled_from([*keys, "weight_block_size", "w_bit"]), max_size=3)
    ):
        inner[key] = data.draw(ODD)
    for key in data.draw(
        st.lists(
            st.sampled_from(["num_hidden_layers", "text_config", "tie_word_embeddings"]), max_size=1
        )
    ):
        config[key] = data.draw(ODD)
    tensors = awq(*codes(64)) if method == "awq" else gptq(*codes(64))
    odd = st.sampled_from(
        [
            np.zeros((), np.int32),
            np.zeros((0, 8), np.float16),
            np.zeros((8, 8), np.int32),
            random(4),
        ]
    )
    for name in data.draw(st.lists(st.sampled_from(list(tensors)), max_size=1)):
        tensors[name] = data.draw(odd)
    try:
        open_safetensors(write(folder, tensors, config), "llama", mark_used=False)
    except TwinphaseError as error:
        assert error.cause and error.fix and "\n" not in str(error) and len(str(error)) < 600


def test_what_would_be_read_wrongly_is_refused(folder):
    good = gptq(*codes(64))
    shuffled = good | {
        f"{NAME}.g_idx": np.random.default_rng(0).permutation(INPUTS).astype(np.int32) // 64
    }
    no_order = {key: value for key, value in good.items() if not key.endswith("g_idx")}
    cases: list[tuple[Tensors, dict[str, object], type[TwinphaseError], str]] = [
        (shuffled, settings("gptq", 64, desc_act=True), UnsupportedModelError, "activation order"),
        (no_order, settings("gptq", 64, desc_act=True), UnsupportedModelError, "activation order"),
        (good, settings("gptq", 64) | {}, UnsupportedModelError, "8 bits"),
        (
            good,
            settings("gptq", 64, checkpoint_format="marlin"),
            UnsupportedModelError,
            "checkpoint_format 'marlin'",
        ),
        (
            awq(*codes(64)),
            settings("awq", 64, version="gemv"),
            UnsupportedModelError,
            "version 'gemv'",
        ),
        (
            good,
            settings("bitsandbytes", 64),
            UnsupportedModelError,
            "'bitsandbytes' is not supported",
        ),
        (good, settings("gptq", 32), CheckpointError, "in groups of 32"),
        (gptq(*codes(16)), settings("gptq", 16), UnsupportedModelError, "groups of 16"),
        (
            {k: v for k, v in good.items() if "scales" not in k},
            settings("gptq", 64),
            CheckpointError,
            "lacks its",
        ),
        (
            good | {f"{NAME}.qzeros": random(4, 3)},
            settings("gptq", 64),
            CheckpointError,
            "I32, F32, F16",
        ),
        (
            good | {f"{NAME}.scales": random(4, 3)},
            settings("gptq", 64),
            CheckpointError,
            "do not fit",
        ),
        (good, {"quantization_config": 3}, CheckpointError, "not an object"),
    ]
    for tensors, config, error, match in cases:
        if match == "8 bits":
            config["quantization_config"]["bits"] = 8  # type: ignore[index]
        with pytest.raises(error, match=match) as raised:
            open_safetensors(write(folder, tensors, config), "llama")
        assert raised.value.fix and "\n" not in str(raised.value)


# FP8
# ------------------------------------------------------------------------------------------------


def write_fp8(
    folder: Path, weight: np.ndarray, scale: np.ndarray, name: str, config: dict[str, object]
) -> Path:
    """A file with E4M3 codes, which NumPy has no type for."""
    write(folder, {}, config)
    data = scale.tobytes() + weight.tobytes()
    tensors = {
        f"{NAME}.{name}": entry("F32", scale.shape, [0, scale.nbytes]),
        f"{NAME}.weight": entry("F8_E4M3", weight.shape, [scale.nbytes, len(data)]),
    }
    (folder / "model.safetensors").write_bytes(header(tensors, data))
    return folder


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_fp8(folder, kind):
    weight = np.random.default_rng(0).integers(0, 256, (200, 300), dtype=np.uint8)
    shape = {"tensor": (), "row": (200, 1), "block": (2, 3)}[kind]
    scale = np.asarray(np.abs(random(*shape)) + 0.1, np.float32)
    config: dict[str, object] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128] if kind == "block" else None,
    }
    name = "weight_scale_inv" if kind == "block" else "weight_scale"
    checkpoint = open_safetensors(
        write_fp8(folder, weight, scale, name, {"quantization_config": config}), "llama"
    )
    assert checkpoint.tensors[OURS].type == "BF16"
    numbers = torch.from_numpy(weight).view(torch.float8_e4m3fn).float().numpy()
    if kind == "block":
        scale = scale.repeat(128, axis=0).repeat(128, axis=1)[:200, :300]
    # By half a step of bfloat16.
    np.testing.assert_allclose(values(checkpoint, OURS), numbers * scale, rtol=2**-8)


def test_fp8_without_fitting_scales(folder):
    weight = np.zeros((200, 300), np.uint8)
    config: dict[str, object] = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    with pytest.raises(CheckpointError, match="without scales"):
        open_safetensors(write_fp8(folder, weight, random(2, 3), "other", config), "llama")
    with pytest.raises(CheckpointError, match=r"shape \(3, 2\)"):
        open_safetensors(
            write_fp8(folder, weight, random(3, 2), "weight_scale_inv", config), "llama"
        )
    with pytest.raises(UnsupportedModelError, match="F8_E4M3"):
        open_safetensors(write_fp8(folder, weight, random(2, 3), "weight_scale_inv", {}), "llama")


# MXFP4
# ------------------------------------------------------------------------------------------------


def test_mxfp4_experts(folder):
    experts = 2
    ffn = 4
    hidden = 64
    rng = np.random.default_rng(0)
    prefix = "model.layers.0.mlp.experts."
    tensors = {}
    expected = {}
    numbers = np.array(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    )  # E2M1, OCP MX 1.0
    for name, rows, columns in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, 32)):
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = rng.integers(110, 130, (experts, rows, columns // 32), dtype=np.uint8)
        tensors |= {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": scales}
        tensors[f"{prefix}{name}_bias"] = random(experts, rows)
        both = np.stack([numbers[blocks & 15], numbers[blocks >> 4]], axis=-1).reshape(
            experts, rows, -1, 32
        )
        expected[name] = (both * 2.0 ** (scales[..., None].astype(int) - 127)).reshape(
            experts, rows, columns
        )
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    checkpoint = open_safetensors(write(folder, tensors, config), "gpt-oss")
    gate_up = expected["gate_up_proj"]
    for name, matrices in (
        ("gate", gate_up[:, ::2]),
        ("up", gate_up[:, 1::2]),
        ("down", expected["down_proj"]),
    ):
        info = checkpoint.tensors[f"blk.0.ffn_{name}_exps.weight"]
        assert (info.type, info.shape) == ("MXFP4", matrices.shape)
        np.testing.assert_array_equal(values(checkpoint, info.name), matrices)
        blocks = checkpoint.raw(info.name).reshape(-1, 17)
        by_gguf = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
        np.testing.assert_array_equal(by_gguf.reshape(matrices.shape), matrices)
    assert checkpoint.tensors["blk.0.ffn_up_exps.bias"].shape == (experts, ffn)
    del tensors[f"{prefix}down_proj_scales"]
    with pytest.raises(CheckpointError, match="down_proj_scales"):
        open_safetensors(write(folder, tensors, config), "gpt-oss")
