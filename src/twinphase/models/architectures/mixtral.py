"""Mixtral (Jiang et al., 2024): a Mistral with experts.

In GGUF it is a llama with an `expert_count`.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import experts, llama_like

HF = {"mixtral": "llama"}


def describe(config: Config) -> Blueprint:
    mixture = experts(config, "intermediate_size", renormalize=True)
    return llama_like(config, permuted_in_gguf=True, windowed=lambda layer: True, experts=mixture)
