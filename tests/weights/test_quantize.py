"""Matrices quantized while loading: which ones, how well, and that they are kept."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from tests.weights.test_safetensors import random, values, write

from twinphase.errors import InvalidRequestError
from twinphase.weights import made
from twinphase.weights.gguf import quantization_name
from twinphase.weights.quantize import quantize
from twinphase.weights.safetensors import open_safetensors

HIDDEN = 256


def weights(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = {
        "normal": rng.standard_normal((64, 1024)),
        "outliers": rng.standard_t(3, (64, 1024)),
        "positive": rng.uniform(1, 2, (64, 1024)),
    }[kind]
    return x.astype(np.float32)


def error(x: np.ndarray, type: str) -> float:
    blocks = quantize(x, type)
    back = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type])
    return float(np.sqrt(np.mean((back - x) ** 2) / np.mean(x**2)))


@pytest.mark.parametrize("kind", ["normal", "outliers", "positive"])
def test_q4_k_is_better_than_q4_0_at_the_same_size(kind):
    x = weights(kind)
    assert quantize(x, "Q4_K").shape == quantize(x, "Q4_0").shape
    assert error(x, "Q4_K") < 0.9 * error(x, "Q4_0")


def test_llama_cpp_s_own_q4_k_is_hardly_better():
    # Of ggml_quantize_chunk (ggml 0.25.3) on these very numbers.
    for kind, of_llama_cpp in (("normal", 0.07147), ("outliers", 0.09334), ("positive", 0.02207)):
        assert error(weights(kind), "Q4_K") < 1.02 * of_llama_cpp


@pytest.mark.parametrize("type", ["Q4_K", "Q4_0", "Q8_0"])
def test_constant_and_empty_blocks(type):
    x = np.zeros((4, 256), np.float32)
    x[1] = 1
    x[2] = -1
    x[3, ::2] = 1e-30
    back = gguf.quants.dequantize(quantize(x, type), gguf.GGMLQuantizationType[type])
    np.testing.assert_allclose(back, x, atol=0.01)


@pytest.mark.parametrize(
    ("quantization", "type"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("q4_k", "Q4_K")]
)
def test_matrices_are_quantized_and_kept(folder, cache, monkeypatch, quantization, type):
    monkeypatch.setattr(made, "_SMALL_BYTES", 0)
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": random(300, HIDDEN),
        "lm_head.weight": random(300, HIDDEN),
        f"{layer}self_attn.q_proj.weight": random(HIDDEN, HIDDEN).astype(np.float16),
        f"{layer}self_attn.o_proj.weight": random(HIDDEN, 96),
        f"{layer}self_attn.k_proj.weight": random(HIDDEN, 100),
        f"{layer}mlp.gate.weight": random(2, HIDDEN),
        f"{layer}input_layernorm.weight": random(HIDDEN),
        f"{layer}mlp.experts.0.up_proj.weight": random(64, HIDDEN, seed=1),
        f"{layer}mlp.experts.1.up_proj.weight": random(64, HIDDEN, seed=2),
    }
    write(folder, tensors)
    reports: list[int] = []
    for _ in range(2):
        checkpoint = open_safetensors(
            folder,
            "qwen3moe",
            quantization=quantization,
            progress=lambda what, done, total: reports.append(done),
        )
        assert {
            name.removeprefix("blk.0."): info.type for name, info in checkpoint.tensors.items()
        } == {
            "token_embd.weight": "Q8_0",
            "output.weight": "Q8_0",
            "attn_q.weight": type,
            "attn_output.weight": "Q5_0" if type == "Q4_K" else type,
            "attn_k.weight": "F32",
            "ffn_gate_inp.weight": "F32",
            "attn_norm.weight": "F32",
            "ffn_up_exps.weight": type,
        }
        experts = np.stack([tensors[f"{layer}mlp.experts.{i}.up_proj.weight"] for i in (0, 1)])
        bound = 0.01 if type == "Q8_0" else 0.1
        assert np.abs(values(checkpoint, "blk.0.ffn_up_exps.weight") - experts).mean() < bound
        assert (
            np.abs(
                values(checkpoint, "token_embd.weight") - tensors["model.embed_tokens.weight"]
            ).mean()
            < 0.01
        )
    assert len(reports) == 6  # five tensors and the end, once
    assert [path.name for path in cache.rglob("tensors*")] == [f"tensors-{quantization}.gguf"]
    plain = open_safetensors(folder, "qwen3moe")
    assert plain.fingerprint != checkpoint.fingerprint
    assert quantization_name(checkpoint) == (
        "Q8_0" if type == "Q8_0" else quantization_name(checkpoint)
    )


def test_an_unknown_name_is_refused(folder):
    with pytest.raises(InvalidRequestError, match="quantization is 'q3'.*q4_k"):
        open_safetensors(write(folder, {}), "llama", quantization="q3")
