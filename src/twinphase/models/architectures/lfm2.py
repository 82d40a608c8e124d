"""LFM2 (Liquid AI, 2025): most layers are gated short convolutions, the others attention.

Both formats call the norm before the head the embedding's norm. LFM2-MoE has experts in all but its
first layers, chosen by sigmoids and a bias.
"""

from dataclasses import replace
from typing import Any

from twinphase.blueprint import Blueprint, ShortConv
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.config import FIX, Config
from twinphase.models.family import experts, llama_like

MIXTURE = "lfm2moe"
HF = {"lfm2": "lfm2", "lfm2_moe": MIXTURE}


def describe(config: Config) -> Blueprint:
    if config.flag("conv_bias", False):
        raise UnsupportedModelError(f"{config.name} has biases in its convolutions.", FIX)
    fields = dict(config.fields)
    layers = config.integer("num_hidden_layers")
    attention = fields.get("full_attn_idxs")
    types = config.sequence("layer_types", layers)
    if types is None and isinstance(attention, list):
        types = ["full_attention" if layer in attention else "conv" for layer in range(layers)]
    recurrent = [layer for layer, kind in enumerate(types or ()) if kind == "conv"]
    # The remaining types must be types of attention.
    fields["layer_types"] = types and ["full_attention" if t == "conv" else t for t in types]
    mixture = config.architecture == MIXTURE
    if not mixture:
        fields["intermediate_size"] = _ffn_size(config)
    plain = replace(config, fields=fields)
    return llama_like(
        plain,
        tied=True,
        rope={"theta": 1e6},
        norm_eps=config.real("rms_norm_eps" if config.is_gguf else "norm_eps", 1e-5),
        qk_norm="head",
        recurrence=ShortConv(config.integer("conv_L_cache", 3), config.integer("hidden_size")),
        recurrent_layers=tuple(recurrent),
        output_norm="token_embd_norm",
        **(_mixture(config, layers) if mixture else {}),
    )


def _mixture(config: Config, layers: int) -> dict[str, Any]:
    dense = config.integer("num_dense_layers", 2, least=0)
    if dense >= layers:
        raise CheckpointError(
            f"{config.name} has {layers} layers, and {dense} of them without experts "
            f"({config.called('num_dense_layers')}).",
            FIX,
        )
    mixture = experts(
        config,
        "moe_intermediate_size",
        renormalize=config.flag("norm_topk_prob", True),
        scores="sigmoid",
        choice_bias=config.flag("use_expert_bias", True),
        scale=config.real("routed_scaling_factor", 1.0),
    )
    return {"experts": mixture, "dense_layers": dense}


def _ffn_size(config: Config) -> int:
    """The width that `Lfm2MLP` computes from the stored one; GGUF stores the result."""
    size = config.integer("block_ff_dim", config.integer("intermediate_size"))
    if config.is_gguf or not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(config.real("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = config.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple
