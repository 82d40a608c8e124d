"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values; optional windows."""

from collections.abc import Callable

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"qwen2": "qwen2"}


def describe(config: Config) -> Blueprint:
    return llama_like(config, qkv_bias=True, windowed=window_rule(config))


def window_rule(config: Config) -> Callable[[int], bool]:
    """The rule for layers with a window in Qwen's configuration classes."""
    first = config.integer("max_window_layers", 28, least=0)
    on = config.flag("use_sliding_window", False)
    return lambda layer: on and layer >= first
