"""OLMo 2 (Team OLMo, 2024): norms after each half, not before it, and over all heads."""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"olmo2": "olmo2"}


def describe(config: Config) -> Blueprint:
    return llama_like(config, norm_before=False, norm_after=True, qk_norm="width")
