"""Ministral 3 (Mistral AI, 2025): a Llama with YaRN, whose queries are scaled by position.

Mistral Small 3 has the same outer model type, `mistral3`, but its text model is a `mistral`.
"""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"ministral3": "mistral3"}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def describe(config: Config) -> Blueprint:
    if config.is_gguf:
        temperature = config.fields.get("temperature_scale") or 0.0
        yarn = {"mscale": 1.0, "llama_4_scaling_beta": temperature}
    else:
        given = config.fields.get("rope_parameters") or config.fields.get("rope_scaling")
        yarn = {} if given else YARN
    return llama_like(
        config,
        head_dim=128,
        rope={"theta": 1e6, "permuted_in_gguf": True, **yarn},
        windowed=lambda layer: True,
    )
