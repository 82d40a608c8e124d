"""Nemotron-H (NVIDIA, 2025): each layer is Mamba-2, attention without RoPE, or feed-forward.

The feed-forward layer has no gate; its activation is ReLU squared.
"""

from dataclasses import replace

from twinphase.blueprint import Blueprint
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.config import FIX, Config
from twinphase.models.family import llama_like, mamba2, refuse_biases

HF = {"nemotron_h": "nemotron_h"}
# Letters of `hybrid_override_pattern` for the names in `layers_block_type`.
MAMBA, ATTENTION, FFN, EXPERTS = "M*-E"
LETTERS = {
    **dict.fromkeys(("mamba", "linear_attention"), MAMBA),
    **dict.fromkeys(("attention", "full_attention"), ATTENTION),
    "mlp": FFN,
    "moe": EXPERTS,
}
# Fields with other names than in other models with Mamba-2.
FIELDS = {
    "mamba_num_heads": "mamba_n_heads",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "ssm_state_size": "mamba_d_state",
    "use_conv_bias": "mamba_conv_bias",
    "layer_norm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",  # A GGUF file uses LayerNorm's key for it.
    "attention_head_dim": "head_dim",
}


def describe(config: Config) -> Blueprint:
    refuse_biases(config, "attention_bias", "mlp_bias", "use_bias")
    if config.fields.get("mlp_hidden_act", "relu2") != "relu2":
        raise UnsupportedModelError(
            f"{config.name} has another activation than relu2 (mlp_hidden_act).", FIX
        )
    pattern = _pattern(config)
    found = {kind: tuple(i for i, k in enumerate(pattern) if k == kind) for kind in set(pattern)}
    fields = {key: value for key, value in config.fields.items() if key != "layer_types"}
    fields |= {FIELDS[key]: value for key, value in fields.items() if key in FIELDS}
    if config.is_gguf:
        fields["intermediate_size"] = max(_widths(config))
    plain = replace(config, fields=fields)
    values = plain.integer("mamba_n_heads", 128) * plain.integer("mamba_head_dim", 64)
    return llama_like(
        plain,
        rotates=lambda layer, window: False,
        activation="relu",
        ffn_gate=False,
        ffn_norm="attn_norm",
        ffn_layers=found.get(FFN, ()),
        attention_layers=found.get(ATTENTION, ()),
        recurrent_layers=found.get(MAMBA, ()),
        recurrence=mamba2(plain, values),
    )


def _widths(config: Config) -> list[int]:
    """The width of each layer's feed-forward layer in a GGUF file; 0 for a layer without one."""
    widths = config.sequence("intermediate_size", config.integer("num_hidden_layers")) or []
    if not all(type(width) is int and width >= 0 for width in widths) or not any(widths):
        raise CheckpointError(
            f"{config.name} has no widths of feed-forward layers "
            f"({config.called('intermediate_size')}).",
            FIX,
        )
    return widths


def _pattern(config: Config) -> str:
    """The pattern of layers, with one letter per layer."""
    layers = config.integer("num_hidden_layers")
    given = config.fields.get("hybrid_override_pattern")
    if config.is_gguf:
        heads = config.sequence("kv_heads_by_layer", layers) or [0] * layers
        kinds = zip(heads, _widths(config), strict=True)
        pattern = "".join(ATTENTION if kv else FFN if width else MAMBA for kv, width in kinds)
    elif isinstance(given, str):
        pattern = given
    else:
        types = config.sequence("layers_block_type", layers) or []
        pattern = "".join(LETTERS.get(str(kind), "?") for kind in types)
    if EXPERTS in pattern:
        raise UnsupportedModelError(
            f"{config.name} has layers of experts without a gate (Nemotron 3).",
            "Use a dense model, such as Nemotron Nano 2.",
        )
    if len(pattern) != layers or not {MAMBA, ATTENTION} <= {*pattern} <= {MAMBA, ATTENTION, FFN}:
        raise CheckpointError(
            f"{config.name} has {pattern[:80]!r} as hybrid_override_pattern, for {layers} layers.",
            FIX,
        )
    return pattern
