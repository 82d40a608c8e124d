"""Gemma (Mesnard et al., 2024): wide heads, GELU, and a scaled embedding that is also the head.

Norms use 1 + w and are stored as w; GGUF's converter adds the 1.
"""

from typing import Any

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"gemma": "gemma"}


def describe(config: Config, **differences: Any) -> Blueprint:
    differences.setdefault("norm_offset", 0.0 if config.is_gguf else 1.0)
    return llama_like(
        config,
        head_dim=256,
        tied=True,
        activation="gelu",
        embedding_scale=config.integer("hidden_size") ** 0.5,
        **differences,
    )
