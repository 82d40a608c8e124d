"""Qwen3 (Yang et al., 2025): an RMSNorm on each query and key head, and no biases."""

from typing import Any

from twinphase.blueprint import Blueprint
from twinphase.models.architectures.qwen2 import window_rule
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"qwen3": "qwen3"}


def describe(config: Config, **differences: Any) -> Blueprint:
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        head_dim=128,
        windowed=window_rule(config),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        **differences,
    )
