"""Granite 3 (IBM, 2024): four scalars, on the embedding, on what each half adds, on attention and on the logits."""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"granite": "granite"}


def describe(config: Config) -> Blueprint:
    return llama_like(
        config,
        permuted_in_gguf=True,
        embedding_scale=config.real("embedding_multiplier", 1.0),
        residual_scale=config.real("residual_multiplier", 1.0),
        attention_scale=config.real("attention_multiplier", 1.0)
        if not config.is_gguf
        else _gguf_scale(config),
        logit_scale=1.0 / config.real("logits_scaling", 1.0),
    )


def _gguf_scale(config: Config) -> float | None:
    """llama.cpp takes a missing attention.scale for the usual one."""
    return config.real("attention_multiplier") if "attention_multiplier" in config.fields else None
