"""Falcon-H1 (TII, 2025): each layer applies attention and Mamba-2 to the same rows.

It was trained under muP, whose multipliers GGUF's converter has folded into the weights.
"""

from typing import Any

from twinphase.blueprint import Blueprint, Multipliers
from twinphase.models.config import Config
from twinphase.models.family import llama_like, mamba2, refuse_biases

HF = {"falcon_h1": "falcon-h1"}


def describe(config: Config) -> Blueprint:
    refuse_biases(config, "attention_bias", "mlp_bias", "projectors_bias")
    every_layer = tuple(range(config.integer("num_hidden_layers")))
    hidden = config.integer("hidden_size")
    values = config.integer("mamba_d_ssm", config.integer("mamba_expand", 2) * hidden)
    # llama.cpp has no norm before the gate, and its files have no field for it.
    early = not config.is_gguf and config.flag("mamba_norm_before_gate", True)
    normed = config.flag("mamba_rms_norm", False)
    norm = "none" if not normed else "before_gate" if early else "after_gate"
    return llama_like(
        config,
        recurrence=mamba2(config, values, norm=norm),
        recurrent_layers=every_layer,
        attention_layers=every_layer,
        **({} if config.is_gguf else _multipliers(config)),
    )


def _multipliers(config: Config) -> dict[str, Any]:
    """Fields of the blueprint; the norm's rows include the factor of Mamba-2's gate."""
    gate, values, keys, queries, steps = config.reals("ssm_multipliers", 5)
    names = "attention_in", "attention_out", "key", "ssm_in", "ssm_out"
    read, added, key, state_in, state_out = (config.real(f"{n}_multiplier", 1.0) for n in names)
    ffn_gate, ffn_down = config.reals("mlp_multipliers", 2)
    rows = state_in * gate
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // heads)
    return {
        "embedding_scale": config.real("embedding_multiplier", 1.0),
        "logit_scale": config.real("lm_head_multiplier", 1.0),
        "attention_scale": head_dim**-0.5 * key * (read / rows) ** 2,
        "multipliers": Multipliers(
            attn_norm=rows,
            ffn_norm=ffn_gate,
            values=values / gate,
            keys=keys / gate,
            queries=queries / gate,
            steps=steps / gate,
            attention=read * added / rows,
            states=state_out,
            ffn=ffn_down / ffn_gate,
        ),
    }
