"""GLM-4 (0414) and GLM-Z1 (Z.ai, 2025): norms around both halves; half of a head's dimensions rotate, side by side."""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like
from twinphase.models.rope import make_rope

HF = {"glm4": "glm4"}


def describe(config: Config) -> Blueprint:
    head_dim = config.integer("head_dim", 128)
    rotated = config.real("partial_rotary_factor", 0.5)
    rope = make_rope(config, head_dim, interleaved=True, partial_rotary_factor=rotated)
    return llama_like(
        config,
        head_dim=head_dim,
        norm_after=True,
        fused_gate_up=True,
        norm_eps=config.real("rms_norm_eps", 1.5625e-7),
        qkv_bias=config.flag("qkv_bias" if config.is_gguf else "attention_bias", True),
        ropes=(rope,) * config.integer("num_hidden_layers"),
    )
