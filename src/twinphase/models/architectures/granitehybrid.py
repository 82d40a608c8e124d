"""Granite 4.0 (IBM, 2025): Granite 3, where most layers of the models named -H are Mamba-2.

The feed-forward layer of a dense model is the shared expert of a mixture. GGUF calls models whose
layers all have attention `granite`.
"""

from dataclasses import replace
from typing import Any

from twinphase.blueprint import Blueprint
from twinphase.errors import UnsupportedModelError
from twinphase.models.architectures import granite
from twinphase.models.config import Config
from twinphase.models.family import experts, mamba2

HF = {"granitemoehybrid": "granitehybrid"}
ATTENTION = ("attention", "full_attention")
RECURRENT = ("mamba", "linear_attention", "conv")


def describe(config: Config) -> Blueprint:
    layers = config.integer("num_hidden_layers")
    named = "layers_block_type" if config.fields.get("layers_block_type") else "layer_types"
    types = config.sequence(named, layers) or ["mamba"] * layers
    for kind in types:
        if kind not in (*ATTENTION, *RECURRENT):
            raise UnsupportedModelError(
                f"{config.name} has layers of type {str(kind)[:80]} ({named}).",
                f"Known are: {ATTENTION[0]}, {RECURRENT[0]}.",
            )
    recurrent = tuple(layer for layer, kind in enumerate(types) if kind in RECURRENT)
    fields = {name: value for name, value in config.fields.items() if name != "layer_types"}
    count = "num_experts" if config.is_gguf else "num_local_experts"
    mixture = config.integer(count, 0 if config.is_gguf else 8, least=0)
    if not mixture:
        fields["intermediate_size"] = _shared_size(config)
        fields[count] = None
    values = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    differences: dict[str, Any] = {
        "fused_gate_up": not config.is_gguf,
        "norm_eps": config.real("rms_norm_eps", 1e-6),
        "recurrence": mamba2(config, values) if recurrent else None,
        "recurrent_layers": recurrent,
    }
    if not config.is_gguf:
        differences["rotates"] = lambda layer, window: (
            config.fields.get("position_embedding_type") == "rope"
        )
    plain = replace(config, fields=fields)
    if mixture:
        differences["experts"] = experts(
            plain,
            "moe_intermediate_size" if config.is_gguf else "intermediate_size",
            renormalize=True,
            shared_size=_shared_size(config),
            shared_gate=False,
            fused_shared=not config.is_gguf,
        )
    return granite.describe(plain, **differences)


def _shared_size(config: Config) -> int:
    if config.is_gguf:
        default = config.integer("intermediate_size")
        return config.integer("shared_expert_intermediate_size", default)
    return config.integer("shared_intermediate_size", 1024)
