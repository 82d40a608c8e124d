"""GLM-4 (0414) and GLM-Z1 (Z.ai, 2025): norms around both halves, and RoPE on half of each head."""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"glm4": "glm4"}


def describe(config: Config) -> Blueprint:
    rotated = config.real("partial_rotary_factor", 0.5)
    return llama_like(
        config,
        head_dim=128,
        norm_after=True,
        fused_gate_up=True,
        norm_eps=config.real("rms_norm_eps", 1.5625e-7),
        qkv_bias=config.flag("qkv_bias" if config.is_gguf else "attention_bias", True),
        rope={"interleaved": True, "partial_rotary_factor": rotated},
    )
