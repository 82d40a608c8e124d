"""EXAONE 4.0 (LG AI Research, 2025): norms behind each half instead of before it, and on query and key heads.

The larger model has a window on three of four layers, and the fourth rotates nothing; the smaller
has neither.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like, windows
from twinphase.models.rope import make_rope

HF = {"exaone4": "exaone4"}


def describe(config: Config) -> Blueprint:
    window = None if config.is_gguf else 4096
    with_window = windows(
        config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern", 4) != 0, window
    )
    head_dim = config.integer(
        "head_dim", config.integer("hidden_size") // config.integer("num_attention_heads")
    )
    rope = make_rope(config, head_dim)
    every = not config.fields.get("sliding_window", window)  # without a window, every layer rotates
    return llama_like(
        config,
        norm_before=False,
        norm_after=True,
        qk_norm="head",
        windows=with_window,
        ropes=tuple(rope if every or here else None for here in with_window),
    )
