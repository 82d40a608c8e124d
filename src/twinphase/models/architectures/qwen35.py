"""Qwen3.5, 3.6 and 3.8: a gated delta rule in three of four layers, and gated attention.

Only a quarter of a head rotates. The MoE models have experts and a shared expert. `models/mtp.py`
has the multi-token prediction layer (MTP).
"""

from dataclasses import replace

from twinphase.blueprint import Blueprint, DeltaNet, Experts
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.config import FIX, Config
from twinphase.models.family import experts, llama_like

MIXTURE = "qwen35moe"
HF = {
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe": MIXTURE,
    "qwen3_5_moe_text": MIXTURE,
}
ATTENTION = "full_attention"
RECURRENT = ("linear_attention", "conv")


def describe(config: Config) -> Blueprint:
    # A folder counts MTP layers separately, a GGUF file counts them with the others.
    drafting = config.integer("nextn_predict_layers", 0, least=0)
    layers = config.integer("num_hidden_layers") - (drafting if config.is_gguf else 0)
    if layers < 1:
        raise CheckpointError(f"{config.name} has no layers beside those for further tokens.", FIX)
    interval = config.integer("full_attention_interval", 4)
    types = config.sequence("layer_types", layers) or [
        RECURRENT[0] if (layer + 1) % interval else ATTENTION for layer in range(layers)
    ]
    for kind in types:
        if kind not in (ATTENTION, *RECURRENT):
            raise UnsupportedModelError(
                f"{config.name} has layers of type {str(kind)[:80]}.",
                f"Known are: {ATTENTION}, {RECURRENT[0]}.",
            )
    if config.flag("attention_bias", False):
        raise UnsupportedModelError(f"{config.name} has biases in attention.", FIX)
    plain = {"num_hidden_layers": layers, "layer_types": [ATTENTION] * layers}
    return llama_like(
        replace(config, fields={**config.fields, **plain}),
        head_dim=256,
        rope={"theta": 1e7, "partial_rotary_factor": 0.25},
        norm_eps=config.real("rms_norm_eps", 1e-6),
        norm_offset=0.0 if config.is_gguf else 1.0,
        ffn_norm="post_attention_norm",
        qk_norm="head",
        attention_gate=True,
        recurrence=_delta_net(config),
        recurrent_layers=tuple(i for i, kind in enumerate(types) if kind != ATTENTION),
        draft_layers=drafting,
        experts=_mixture(config) if config.architecture == MIXTURE else None,
    )


def _mixture(config: Config) -> Experts:
    return experts(
        config,
        "moe_intermediate_size",
        renormalize=True,
        shared_size=config.integer(
            "shared_expert_intermediate_size", None if config.is_gguf else 512
        ),
        fused_gate_up=config.flag("fused_experts", False),
    )


def _delta_net(config: Config) -> DeltaNet:
    """The delta rule; GGUF's converter reorders value heads and precomputes the decays."""
    key_heads = config.integer("linear_num_key_heads", 16)
    value_heads = config.integer("linear_num_value_heads", 32)
    value_dim = config.integer("linear_value_head_dim", 128)
    if config.is_gguf:
        value_dim = config.integer("linear_num_values") // value_heads
    if value_heads % key_heads:
        raise CheckpointError(
            f"{config.name}: {value_heads} value heads do not divide by {key_heads} key heads.", FIX
        )
    return DeltaNet(
        taps=config.integer("linear_conv_kernel_dim", 4),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=value_dim,
        tiled=config.is_gguf,
        log_decay=not config.is_gguf,
    )
