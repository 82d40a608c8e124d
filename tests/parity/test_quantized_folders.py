"""Quantized folders answer as transformers does with the weights of the published formulas."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.weights.test_packed import awq, formula, gptq
from tiny_families import logits_of, make_model

from steps import Steps
from twinphase.backends.reference import ReferenceBackend

pytestmark = pytest.mark.slow

TOKENS = list(np.random.default_rng(0).integers(3, 448, 70))
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32


def four_bits(
    name: str, weight: torch.Tensor, method: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The packed tensors, rounded to nearest, and the weights they stand for."""
    w = weight.float().numpy().T  # [inputs, outputs]
    groups = w.reshape(-1, GROUP, w.shape[1])
    low = np.minimum(groups.min(1), 0)
    high = np.maximum(groups.max(1), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.rint(-low / scales).clip(0, 15).astype(int)
    q = np.rint(groups / scales[:, None] + zeros[:, None]).clip(0, 15).astype(int).reshape(w.shape)
    packed = (awq if method == "awq" else gptq)(q, zeros, scales)
    tensors = {
        f"{name}.{key.rpartition('.')[2]}": torch.from_numpy(value.copy())
        for key, value in packed.items()
    }
    return tensors, torch.from_numpy(formula(q, zeros, scales)).float().contiguous()


def eight_bits(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """FP8 in blocks of 32 by 32, and its weights, which both sides round to bfloat16."""
    rows, columns = (size // GROUP for size in weight.shape)
    blocks = weight.float().reshape(rows, GROUP, columns, GROUP)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scales[:, None, :, None]).reshape(weight.shape).bfloat16().float()
    return {
        f"{name}.weight": codes.reshape(weight.shape),
        f"{name}.weight_scale_inv": scales,
    }, values


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_logits_are_those_of_the_weights_they_stand_for(tmp_path, family, method):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    kept = {}
    whole = {}
    for key, value in load_file(tmp_path / "model.safetensors").items():
        name = key.removesuffix(".weight")
        if name.endswith(PROJECTIONS) and key.endswith(".weight"):
            packed, meant = (
                eight_bits(name, value) if method == "fp8" else four_bits(name, value, method)
            )
            kept |= packed
            whole[key] = meant
        else:
            kept[key] = whole[key] = value
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    expected = logits_of(
        type(model).from_pretrained(tmp_path / "whole", dtype=torch.float32).eval(), TOKENS
    )
    settings = {
        "quant_method": method,
        "bits": 4,
        "group_size": GROUP,
        "weight_block_size": [GROUP, GROUP],
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    steps = Steps(tmp_path, ReferenceBackend(), num_blocks=32)
    found = steps.chunked(np.array(TOKENS, np.int32), [70])
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    # Of 4-bit weights, scale * zero is rounded to float16; a wrong code or zero costs a hundred
    # times as much. Near a tie that rounding chooses another expert for a row: one in ten may.
    most = np.quantile(error, 0.9) if family == "qwen3-moe" else error.max()
    assert most <= (1e-4 if method == "fp8" else 5e-3)
