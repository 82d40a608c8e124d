"""Qwen3-MoE: Qwen3 with experts, which have their own width, in every layer."""

from twinphase.blueprint import Blueprint
from twinphase.models.architectures import qwen3
from twinphase.models.config import Config
from twinphase.models.family import experts

HF = {"qwen3_moe": "qwen3moe"}


def describe(config: Config) -> Blueprint:
    # GGUF has no field for it; every published model renormalizes, and so does llama.cpp.
    renormalize = config.flag("norm_topk_prob", config.is_gguf)
    mixture = experts(config, "moe_intermediate_size", renormalize=renormalize)
    return qwen3.describe(config, experts=mixture)
