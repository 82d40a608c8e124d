"""GPT-OSS (OpenAI, 2025): sinks, biases, clamped SwiGLU experts, windows on half the layers."""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import experts, llama_like

HF = {"gpt_oss": "gpt-oss"}


def describe(config: Config) -> Blueprint:
    size = "moe_intermediate_size" if config.is_gguf else "intermediate_size"
    return llama_like(
        config,
        head_dim=64,
        rope={"theta": 150000.0, "truncate": False},
        windowed=lambda layer: layer % 2 == 0,
        window=128,
        ffn_norm="post_attention_norm",
        qkv_bias=True,
        output_bias=True,
        activation="swiglu_oai",
        sinks=True,
        # A softmax over the chosen experts' logits equals the renormalized softmax over all of
        # them.
        experts=experts(config, size, renormalize=True, bias=True),
    )
