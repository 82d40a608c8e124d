"""SmolLM3 (Hugging Face, 2025): every fourth layer has no RoPE."""

from twinphase.blueprint import Blueprint
from twinphase.models.architectures.qwen2 import window_rule
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"smollm3": "smollm3"}


def describe(config: Config) -> Blueprint:
    layers = config.integer("num_hidden_layers")
    interval = config.integer("no_rope_layer_interval", 4)
    # Despite the name, 0 marks a layer without RoPE.
    flags = config.sequence("no_rope_layers", layers)
    rotated = flags or [(layer + 1) % interval for layer in range(layers)]
    return llama_like(
        config,
        tied=True,
        rope={"theta": 2e6, "permuted_in_gguf": True},
        rotates=lambda layer, window: bool(rotated[layer]),
        windowed=window_rule(config),
    )
