"""SmolLM3 (Hugging Face, 2025): every fourth layer rotates nothing."""

from twinphase.blueprint import Blueprint
from twinphase.models.architectures.qwen2 import window_rule
from twinphase.models.config import Config
from twinphase.models.family import llama_like
from twinphase.models.rope import make_rope

HF = {"smollm3": "smollm3"}


def describe(config: Config) -> Blueprint:
    layers = config.integer("num_hidden_layers")
    head_dim = config.integer(
        "head_dim", config.integer("hidden_size") // config.integer("num_attention_heads")
    )
    rope = make_rope(config, head_dim, theta=2e6, permuted_in_gguf=True)
    every = config.integer("no_rope_layer_interval", 4)
    rotates = config.sequence("no_rope_layers", layers) or [
        (i + 1) % every for i in range(layers)
    ]  # 0: it does not
    return llama_like(
        config,
        tied=True,
        ropes=tuple(rope if turns else None for turns in rotates),
        windowed=window_rule(config),
    )
