"""Llama (Touvron et al., 2023), Mistral and Mixtral (Jiang et al., 2023, 2024), and SmolLM2.

RMSNorm before each half, rotary embedding, grouped-query attention, SwiGLU. Mistral may add a
window in every layer, and Mixtral adds experts; GGUF calls both `llama`.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import experts, llama_like

HF = {"llama": "llama", "mistral": "llama", "mixtral": "llama"}


def describe(config: Config) -> Blueprint:
    bias = config.flag("attention_bias", False)
    model_type = config.fields.get("model_type")
    has_window = config.is_gguf or model_type in ("mistral", "mixtral")
    has_experts = model_type == "mixtral" or config.fields.get("num_experts")
    return llama_like(
        config,
        rope={"permuted_in_gguf": True},
        windowed=lambda layer: has_window,
        qkv_bias=bias,
        output_bias=bias,
        experts=experts(config, "intermediate_size", renormalize=True) if has_experts else None,
    )
