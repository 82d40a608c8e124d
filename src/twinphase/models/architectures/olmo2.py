"""OLMo 2 (Team OLMo, 2024): norms after each half instead of before, and over all heads.

OLMo 3 (2025) has a window in three of four layers, and RoPE scaling only in the fourth.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"olmo2": "olmo2", "olmo3": "olmo2"}


def describe(config: Config) -> Blueprint:
    is_olmo3 = config.fields.get("model_type") == "olmo3"
    base = config.real("rope_theta", 5e5)
    return llama_like(
        config,
        norm_before=False,
        norm_after=True,
        qk_norm="width",
        windowed=lambda layer: (layer + 1) % 4 != 0,
        window=4096 if is_olmo3 else None,
        rope={"theta": base, "layer_type": "full_attention"},
        window_rope={
            "theta": base,
            "theta_field": "rope_local_base_freq",
            "layer_type": "sliding_attention",
        },
    )
