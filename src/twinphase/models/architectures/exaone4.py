"""EXAONE 4.0 (LG AI Research, 2025): norms after each half instead of before, and on heads.

The larger model has a window in three of four layers, and no RoPE in the fourth; the smaller model
has neither.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"exaone4": "exaone4"}


def describe(config: Config) -> Blueprint:
    default_window = None if config.is_gguf else 4096
    has_windows = config.fields.get("sliding_window", default_window)
    return llama_like(
        config,
        norm_before=False,
        norm_after=True,
        qk_norm="head",
        # This is called only if there is a window: the smaller model's pattern is 0.
        windowed=lambda layer: (layer + 1) % config.integer("sliding_window_pattern", 4) != 0,
        window=default_window,
        rotates=lambda layer, window: window is not None or not has_windows,
    )
