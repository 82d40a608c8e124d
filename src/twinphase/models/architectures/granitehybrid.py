"""Granite 4.0 (IBM, 2025): Granite 3 with its feed-forward matrices under other names.

Only models whose layers all have attention are computed; GGUF calls these `granite`.
"""

from dataclasses import replace

from twinphase.blueprint import Blueprint
from twinphase.errors import UnsupportedModelError
from twinphase.models.architectures import granite
from twinphase.models.config import Config

HF = {"granitemoehybrid": "granitehybrid"}


def describe(config: Config) -> Blueprint:
    types = config.fields.get("layer_types") or config.fields.get("layers_block_type") or ["mamba"]
    if config.is_gguf or not set(types) <= {"attention", "full_attention"}:
        raise UnsupportedModelError(
            f"{config.name} has layers of Mamba-2, which are not computed here.",
            "Use a Granite whose layers all have attention: 4.0 without -h, 4.1 or 4.2.",
        )
    if config.integer("num_local_experts", 8, least=0):
        raise UnsupportedModelError(
            f"{config.name} has experts beside a shared one (num_local_experts), which are not "
            "computed here.",
            "Use a dense Granite.",
        )
    fields = {name: value for name, value in config.fields.items() if name != "layer_types"}
    fields["intermediate_size"] = config.integer("shared_intermediate_size", 1024)
    return granite.describe(
        replace(config, fields=fields),
        fused_gate_up=True,
        norm_eps=config.real("rms_norm_eps", 1e-6),
        rotates=lambda layer, window: config.fields.get("position_embedding_type") == "rope",
    )
