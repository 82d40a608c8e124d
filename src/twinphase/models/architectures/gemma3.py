"""Gemma 3 (text; Kamath et al., 2025): Gemma 2 with norms on heads instead of a softcap on scores.

Five of six layers have a window and their own RoPE base.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.architectures import gemma
from twinphase.models.architectures.gemma2 import attention_scale
from twinphase.models.config import Config

HF = {"gemma3_text": "gemma3", "gemma3": "gemma3"}
LAYERS_OF_27B = 62


def describe(config: Config) -> Blueprint:
    interval = config.integer("sliding_window_pattern", 6)
    return gemma.describe(
        config,
        norm_after=True,
        windowed=lambda layer: (layer + 1) % interval != 0,
        window=None if config.is_gguf else 4096,
        rope={"theta": 1e6, "layer_type": "full_attention"},
        window_rope={"theta_field": "rope_local_base_freq", "layer_type": "sliding_attention"},
        qk_norm="head",
        attention_scale=attention_scale(config, LAYERS_OF_27B),
        logit_softcap=config.fields.get("final_logit_softcapping"),
    )
