"""Describes a Llama from a configuration; files of `architectures/` add their differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from twinphase.blueprint import Blueprint, Experts, Mamba2
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.config import FIX, Config
from twinphase.models.rope import make_rope

# GGUF's number for a sigmoid of the router's logits (gguf.ExpertGatingFuncType).
SIGMOID = 2
LAYER_TYPES = ("full_attention", "sliding_attention")
# Model types whose configuration class uses num_attention_heads if num_key_value_heads is missing.
KV_HEADS_LIKE_HEADS = ("llama", "phi3", "olmo2", "olmo3", "olmoe", "granite", "granitemoehybrid")


def llama_like(
    config: Config,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    rope: Mapping[str, Any] = MappingProxyType({}),
    window_rope: Mapping[str, Any] | None = None,
    rotates: Callable[[int, int | None], bool] = lambda layer, window: True,
    windowed: Callable[[int], bool] = lambda layer: False,
    window: int | None = None,
    **differences: Any,
) -> Blueprint:
    """The blueprint of a Llama with the configuration's sizes and with `differences`.

    Args:
        config: configuration of the model.
        head_dim: default of the family's configuration class; None is hidden_size /
            num_attention_heads.
        tied: default of `tie_word_embeddings`.
        rope: arguments of `make_rope`.
        window_rope: arguments of `make_rope` for layers with a window, if they differ.
        rotates: returns whether a layer has RoPE, given its index and its window.
        windowed: returns whether a layer has the window, unless the configuration has
            `layer_types`.
        window: default of the family's configuration class for `sliding_window`.
        differences: other fields of `Blueprint`.

    Raises:
        CheckpointError: a field is missing or has an impossible value; the message names it.
        UnsupportedModelError: a feature is not supported; the message names it.
    """
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    counted = config.is_gguf or config.fields.get("model_type") in KV_HEADS_LIKE_HEADS
    kv_heads = config.integer("num_key_value_heads", heads if counted else None)
    size = config.integer("head_dim", head_dim or hidden // heads)
    if heads % kv_heads:
        field = config.called("num_key_value_heads")
        raise CheckpointError(
            f"{config.name}: {heads} heads do not divide by {kv_heads} KV heads ({field}).", FIX
        )
    windows = _windows(config, windowed, window)
    whole = make_rope(config, size, **rope)
    local = whole if window_rope is None else make_rope(config, size, **window_rope)
    differences.setdefault("norm_eps", config.real("rms_norm_eps", 1e-5))
    _check_activation(config, differences.get("activation", "silu"))
    mixture = differences.get("experts")
    if mixture is None and config.integer("num_experts", 0, least=0):
        raise UnsupportedModelError(
            f"{config.name} has experts, which {config.architecture} has not.", FIX
        )
    return Blueprint(
        architecture=config.architecture,
        hidden_size=hidden,
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        ffn_size=mixture.ffn_size
        if mixture and not differences.get("dense_layers")
        else config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        context_length=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", tied),
        windows=windows,
        ropes=tuple(
            (local if width else whole) if rotates(layer, width) else None
            for layer, width in enumerate(windows)
        ),
        **differences,
    )


def _check_activation(config: Config, activation: str) -> None:
    """Refuse another activation; GGUF has no field for it, so the architecture determines it."""
    named = config.fields.get("hidden_activation") or config.fields.get("hidden_act")
    # Gemma's first files say gelu and mean the tanh form, as their class does.
    known = ("gelu", "gelu_pytorch_tanh", "gelu_new") if activation == "gelu" else ("silu", "swish")
    if named is not None and named not in known:
        raise UnsupportedModelError(
            f"{config.name} has the activation {str(named)[:40]!r}.",
            f"With {config.architecture} use {known[0]}.",
        )


def _windows(
    config: Config, windowed: Callable[[int], bool], default: int | None
) -> tuple[int | None, ...]:
    """Each layer's window, from `layer_types` if present, or from the family's rule.

    `default` replaces a missing `sliding_window`; null and 0 mean no window.
    """
    layers = config.integer("num_hidden_layers")
    types = config.sequence("layer_types", layers)
    for layer_type in types or ():
        if layer_type not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"{config.name} has layers of type {str(layer_type)[:80]} (layer_types).",
                f"Known are: {', '.join(LAYER_TYPES)}.",
            )
    if config.fields.get("sliding_window", default) in (None, 0):
        return (None,) * layers
    window = config.integer("sliding_window", default)
    has_window = (
        [t == "sliding_attention" for t in types] if types else map(windowed, range(layers))
    )
    return tuple(window if has else None for has in has_window)


def experts(config: Config, size: str, *, renormalize: bool, **differences: Any) -> Experts:
    """The mixture in a configuration; `size` is the family's field for the experts' width.

    `differences` are other fields of `Experts`.

    Raises:
        UnsupportedModelError: only some layers have experts, or their scores are of another kind.
    """
    # A GGUF file may name the kind of scores; 0 means none.
    scored = config.fields.get("expert_gating_func") or None
    if scored is not None and (scored == SIGMOID) != (differences.get("scores") == "sigmoid"):
        raise UnsupportedModelError(
            f"{config.name} scores its experts in another way than {config.architecture} "
            f"({config.called('expert_gating_func')} is {scored!r}).",
            FIX,
        )
    if config.integer("decoder_sparse_step", 1) != 1 or config.fields.get("mlp_only_layers"):
        raise UnsupportedModelError(
            f"{config.name} has experts in only some layers (decoder_sparse_step, "
            "mlp_only_layers).",
            "Use a model with experts in every layer.",
        )
    # transformers has two names for the number of experts, and has changed the one that it saves
    # for a family.
    counted = "num_experts" if config.fields.get("num_experts") is not None else "num_local_experts"
    mixture = Experts(
        count=config.integer(counted),
        used=config.integer("num_experts_per_tok"),
        ffn_size=config.integer(
            size, config.integer("intermediate_size") if config.is_gguf else None
        ),
        renormalize=renormalize,
        **differences,
    )
    if mixture.used > mixture.count:
        raise CheckpointError(
            f"{config.name} uses {mixture.used} of {mixture.count} experts "
            f"({config.called('num_experts_per_tok')}).",
            FIX,
        )
    return mixture


def refuse_biases(config: Config, *names: str) -> None:
    """Raise UnsupportedModelError if one of these fields adds biases to linear layers."""
    for name in names:
        if config.flag(name, False):
            raise UnsupportedModelError(
                f"{config.name} has biases in its linear layers ({name}).",
                "Use a model without them.",
            )


def mamba2(config: Config, values: int, **differences: Any) -> Mamba2:
    """The state space in a configuration; a folder's has `values` columns in its result.

    `differences` are other fields of `Mamba2`.

    Raises:
        CheckpointError: sizes are missing or not divisible.
        UnsupportedModelError: the biases are unusual, or the steps have limits.
    """
    if config.flag("mamba_proj_bias", False) or not config.flag("mamba_conv_bias", True):
        raise UnsupportedModelError(
            f"{config.name} has unusual biases in its Mamba-2 layers "
            "(mamba_proj_bias, mamba_conv_bias).",
            FIX,
        )
    least, most = config.sequence("time_step_limit", 2) or (0.0, None)
    # Files spell infinity in several ways, and JSON has no number for it.
    if least or (isinstance(most, int | float) and math.isfinite(most)):
        raise UnsupportedModelError(
            f"{config.name} limits the steps of Mamba-2 (time_step_limit).",
            "Use a model without limits: ignoring them would change the answers.",
        )
    if config.is_gguf:
        names = "linear_num_value_heads", "linear_num_values", "linear_num_key_heads"
        heads, values, groups = (config.integer(name) for name in names)
        taps = config.integer("linear_conv_kernel_dim")
        key_dim = config.integer("linear_key_head_dim")
    else:
        heads = config.integer("mamba_n_heads", 128)
        groups = config.integer("mamba_n_groups", 1)
        taps = config.integer("mamba_d_conv", 4)
        key_dim = config.integer("mamba_d_state", 256)
    if values % heads or heads % groups:
        raise CheckpointError(
            f"{config.name}: {values} columns, {heads} heads and {groups} groups of Mamba-2 do not "
            "divide.",
            FIX,
        )
    return Mamba2(
        taps=taps,
        key_heads=groups,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=values // heads,
        log_decay=not config.is_gguf,
        **differences,
    )
