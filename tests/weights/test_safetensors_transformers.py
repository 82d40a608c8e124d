"""Folders that transformers saves open under GGUF's names, with the values in memory."""

from __future__ import annotations

import numpy as np
import pytest

from twinphase.weights.quant import dequantize
from twinphase.weights.safetensors import open_safetensors

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2}
LAYER = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_norm",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
Q_K_NORM = ("attn_q_norm", "attn_k_norm")
BEHIND = ("post_attention_norm", "post_ffw_norm")
EXPERTS = (*LAYER[:6], "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
BIASED = tuple(f"{name}.bias" for name in ("attn_q", "attn_k", "attn_v"))
# GGUF's name of the architecture, transformers' class, its own settings, and llama.cpp's names of a
# layer's tensors.
MODELS = {
    "llama": ("Llama", {}, LAYER),
    "qwen2": ("Qwen2", {}, LAYER + BIASED),
    "qwen3": ("Qwen3", {}, LAYER + Q_K_NORM),
    "phi3": (
        "Phi3",
        {},
        ("attn_qkv", "attn_output", "attn_norm", "ffn_norm", "ffn_up", "ffn_down"),
    ),
    "gemma2": ("Gemma2", {}, LAYER + BEHIND),
    "gemma3": ("Gemma3", {}, LAYER + BEHIND + Q_K_NORM),
    "olmo2": ("Olmo2", {}, (*LAYER[:4], *LAYER[6:], *BEHIND, *Q_K_NORM)),
    "exaone4": ("Exaone4", {}, (*LAYER[:4], *LAYER[6:], *BEHIND, *Q_K_NORM)),
    "glm4": ("Glm4", {}, (*LAYER[:6], *BIASED, *BEHIND, "ffn_up", "ffn_down")),
    "granite": ("Granite", {}, LAYER),
    "smollm3": ("SmolLM3", {}, LAYER),
    "qwen3moe": ("Qwen3Moe", {**MOE, "moe_intermediate_size": 32}, EXPERTS + Q_K_NORM),
    "olmoe": ("Olmoe", MOE, EXPERTS + Q_K_NORM),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, EXPERTS),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        (
            *(name for name in EXPERTS if name != "ffn_norm"),
            "post_attention_norm",
            "attn_sinks",
            *BIASED,
            "attn_output.bias",
            *(f"{name}.bias" for name in EXPERTS[-4:]),
        ),
    ),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_each_architecture(tmp_path, monkeypatch, architecture):
    import torch
    import transformers

    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "cache"))
    name, settings, layer_names = MODELS[architecture]
    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**COMMON, **settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    checkpoint = open_safetensors(
        tmp_path / "model", "llama" if architecture == "mixtral" else architecture
    )
    assert len(checkpoint.files) > 1
    layers = [
        f"blk.{i}.{layer_name}" if layer_name.endswith(".bias") else f"blk.{i}.{layer_name}.weight"
        for i in range(2)
        for layer_name in layer_names
    ]
    rest = ["token_embd.weight", "output_norm.weight"] + ["output.weight"] * (
        not config.tie_word_embeddings
    )
    assert sorted(checkpoint.tensors) == sorted(layers + rest)

    def values(tensor: str) -> np.ndarray:
        info = checkpoint.tensors[tensor]
        return dequantize(checkpoint.raw(tensor), info.shape, info.type)

    block = model.model.layers[1]
    np.testing.assert_array_equal(
        values("blk.1.attn_output.weight"), block.self_attn.o_proj.weight.detach().numpy()
    )
    if "ffn_gate_exps" in layer_names:
        experts = block.mlp.experts
        both = experts.gate_up_proj.detach().numpy()
        down = experts.down_proj.detach().numpy()
        if architecture == "gpt-oss":
            gate = both[..., ::2].swapaxes(1, 2)
            up = both[..., 1::2].swapaxes(1, 2)
            down = down.swapaxes(1, 2)
        else:
            gate, up = np.split(both, 2, axis=1)
        for part, expected in (("gate", gate), ("up", up), ("down", down)):
            np.testing.assert_array_equal(values(f"blk.1.ffn_{part}_exps.weight"), expected)


def test_fp8_numbers_are_torch_s():
    import torch

    from twinphase.weights.packed import _e4m3_values

    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(_e4m3_values(), codes.view(torch.float8_e4m3fn).float().numpy())
