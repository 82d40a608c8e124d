"""OLMoE (Muennighoff et al., 2024): small experts, and norms over all query and key heads."""

from twinphase.blueprint import Blueprint
from twinphase.errors import UnsupportedModelError
from twinphase.models.config import Config
from twinphase.models.family import experts, llama_like

HF = {"olmoe": "olmoe"}


def describe(config: Config) -> Blueprint:
    if config.fields.get("clip_qkv"):
        raise UnsupportedModelError(
            f"{config.name} clips queries, keys and values.", "Use a model without clip_qkv."
        )
    renormalize = config.flag("norm_topk_prob", False)
    mixture = experts(config, "intermediate_size", renormalize=renormalize)
    return llama_like(config, qk_norm="width", experts=mixture)
