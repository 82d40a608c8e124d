"""Gemma 2 (Riviere et al., 2024): norms around both halves, softcaps, and windows."""

from twinphase.blueprint import Blueprint
from twinphase.models.architectures import gemma
from twinphase.models.config import Config

HF = {"gemma2": "gemma2"}
LAYERS_OF_27B = 46


def describe(config: Config) -> Blueprint:
    # GGUF files always cap. In a folder, a missing field means the default, and null means no cap.
    capped = config.is_gguf or "attn_logit_softcapping" not in config.fields
    return gemma.describe(
        config,
        norm_after=True,
        windowed=lambda layer: layer % 2 == 0,
        window=4096,
        attention_scale=attention_scale(config, LAYERS_OF_27B),
        attention_softcap=config.fields.get("attn_logit_softcapping") or (50.0 if capped else None),
        logit_softcap=config.fields.get("final_logit_softcapping") or (30.0 if capped else None),
    )


def attention_scale(config: Config, layers_of_largest: int) -> float:
    """1 / sqrt(query_pre_attn_scalar).

    GGUF does not store query_pre_attn_scalar, which is the head size except in the largest model.
    """
    if config.is_gguf and config.integer("num_hidden_layers") == layers_of_largest:
        scalar = config.integer("hidden_size") / config.integer("num_attention_heads")
    else:
        head_dim = config.integer("head_dim", 256) if config.is_gguf else 256
        scalar = config.real("query_pre_attn_scalar", head_dim)
    return float(scalar**-0.5)
