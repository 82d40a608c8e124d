"""Granite 3 (IBM, 2024): scalars on the embedding, both halves, attention and the logits."""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"granite": "granite"}


def describe(config: Config) -> Blueprint:
    # llama.cpp takes a missing attention.scale for the usual one, transformers for 1.
    usual = config.is_gguf and "attention_multiplier" not in config.fields
    return llama_like(
        config,
        rope={"permuted_in_gguf": True},
        embedding_scale=config.real("embedding_multiplier", 1.0),
        residual_scale=config.real("residual_multiplier", 1.0),
        attention_scale=None if usual else config.real("attention_multiplier", 1.0),
        logit_scale=1.0 / config.real("logits_scaling", 1.0),
    )
