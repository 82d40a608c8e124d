"""GPT-OSS (OpenAI, 2025): sinks, biases everywhere, experts with a clamped SwiGLU, a window on every other layer."""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import experts, llama_like
from twinphase.models.rope import make_rope

HF = {"gpt_oss": "gpt-oss"}


def describe(config: Config) -> Blueprint:
    head_dim = config.integer("head_dim", 64)
    rope = make_rope(config, head_dim, theta=150000.0, truncate=False)
    size = "moe_intermediate_size" if config.is_gguf else "intermediate_size"
    return llama_like(
        config,
        head_dim=head_dim,
        ropes=(rope,) * config.integer("num_hidden_layers"),
        windowed=lambda layer: layer % 2 == 0,
        window=128,
        qkv_bias=True,
        output_bias=True,
        activation="swiglu_oai",
        sinks=True,
        # The softmax over the chosen experts' logits is that over all of them, renormalized.
        experts=experts(config, size, renormalize=True, bias=True),
    )
