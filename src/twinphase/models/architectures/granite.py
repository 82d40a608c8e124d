"""Granite 3, 4.1 and 4.2 (IBM, 2024): scalars on embedding, both halves, attention, and logits."""

from typing import Any

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"granite": "granite"}


def describe(config: Config, **differences: Any) -> Blueprint:
    # llama.cpp replaces a missing attention.scale by the usual one, transformers by 1.
    usual = config.is_gguf and "attention_multiplier" not in config.fields
    # GGUF has no other field for the absence of RoPE.
    rotated = config.table("rope_scaling").get("finetuned", True)
    differences.setdefault("rotates", lambda layer, window: rotated)
    return llama_like(
        config,
        rope={"permuted_in_gguf": True},
        embedding_scale=config.real("embedding_multiplier", 1.0),
        residual_scale=config.real("residual_multiplier", 1.0),
        attention_scale=None if usual else config.real("attention_multiplier", 1.0),
        logit_scale=1.0 / config.real("logits_scaling", 1.0),
        **differences,
    )
