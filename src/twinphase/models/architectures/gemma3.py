"""Gemma 3 (text; Kamath et al., 2025): Gemma 2 with norms on query and key heads in place of the scores' softcap.

Five of six layers have a window and a RoPE base of their own.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.architectures import gemma
from twinphase.models.architectures.gemma2 import attention_scale
from twinphase.models.config import Config
from twinphase.models.family import windows
from twinphase.models.rope import make_rope

HF = {"gemma3_text": "gemma3", "gemma3": "gemma3"}
LAYERS_OF_27B = 62


def describe(config: Config) -> Blueprint:
    every = config.integer("sliding_window_pattern", 6)
    with_window = windows(
        config, lambda layer: (layer + 1) % every != 0, None if config.is_gguf else 4096
    )
    head_dim = config.integer("head_dim", 256)
    local = make_rope(
        config, head_dim, theta_field="rope_local_base_freq", layer_type="sliding_attention"
    )
    whole = make_rope(config, head_dim, theta=1e6, layer_type="full_attention")
    return gemma.describe(
        config,
        norm_after=True,
        windows=with_window,
        ropes=tuple(local if window else whole for window in with_window),
        qk_norm="head",
        attention_scale=attention_scale(config, LAYERS_OF_27B),
        logit_softcap=config.fields.get("final_logit_softcapping"),
    )
