"""Llama 2 and 3 (Touvron et al., 2023), Mistral (Jiang et al., 2023), SmolLM2, and all that share their layout.

RMSNorm before each half, rotary embedding, grouped-query attention, SwiGLU. Mistral may add a
window on every layer.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"llama": "llama", "mistral": "llama"}


def describe(config: Config) -> Blueprint:
    bias = config.flag("attention_bias", False)
    has_window = config.is_gguf or config.fields.get("model_type") == "mistral"
    return llama_like(
        config,
        permuted_in_gguf=True,
        windowed=lambda layer: has_window,
        qkv_bias=bias,
        output_bias=bias,
    )
