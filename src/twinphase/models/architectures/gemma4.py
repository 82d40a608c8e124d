"""Gemma 4 (text; Google, 2026): Gemma 3 with other heads in full layers, and shared KV.

The smaller models add an embedding in every layer. In full layers, only the first pairs of a head
rotate, with the frequencies of the whole head.
"""

from dataclasses import replace
from typing import Any

from twinphase.blueprint import Blueprint, KVShape, Rope
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.architectures import gemma
from twinphase.models.config import FIX, Config

HF = {"gemma4": "gemma4", "gemma4_text": "gemma4", "gemma4_unified": "gemma4"}
HF["gemma4_unified_text"] = "gemma4"
WINDOWED = "sliding_attention"
FULL = "full_attention"
# Default share of the full layers' pairs that rotate.
ROTATED = 0.25


def describe(config: Config) -> Blueprint:
    _refuse(config)
    layers = config.integer("num_hidden_layers")
    shared = config.integer("num_kv_shared_layers", 0, least=0)
    types = config.sequence("layer_types", layers) or [
        FULL if (layer + 1) % 6 == 0 else WINDOWED for layer in range(layers)
    ]
    for kind in types:
        if kind not in (WINDOWED, FULL):
            raise UnsupportedModelError(
                f"{config.name} has layers of type {str(kind)[:80]} (layer_types).",
                f"Known are: {WINDOWED}, {FULL}.",
            )
    if not config.is_gguf:
        types[-1] = FULL  # The family's class does this too.
    if not set(types[layers - shared :]) <= set(types[: layers - shared]):
        raise CheckpointError(
            f"{config.name} has {shared} layers that share the keys and values of others "
            f"({config.called('num_kv_shared_layers')}), but none to share with.",
            FIX,
        )
    fields = dict(config.fields) | {"layer_types": types, "rotary_dim": None}
    # The heads of layers without a window, and whether their keys are also the values.
    full, equal = _gguf_heads(config, fields, types) if config.is_gguf else _heads(config, types)
    widths = _ffn_widths(config, layers, shared)
    fields["intermediate_size"] = widths[0]
    tensors = {k: v for k, v in config.tensors.items() if k != "rope_freqs.weight"}
    plain = replace(config, fields=fields, tensors=tensors)
    # These are the defaults of the family's class.
    small = config.fields.get("model_type") in ("gemma4", "gemma4_text")
    blueprint = gemma.describe(
        plain,
        norm_offset=0.0,
        norm_after=True,
        window=None if config.is_gguf else 512 if small else 1024,
        # The full layers' rotation is replaced below.
        window_rope={"theta_field": "rope_local_base_freq", "layer_type": WINDOWED},
        qk_norm="head",
        attention_scale=1.0,
        logit_softcap=config.fields.get("final_logit_softcapping"),
        full_kv=full,
        keys_as_values=equal,
        value_norm=True,
        shared_kv_layers=shared,
        ffn_sizes=widths if len(set(widths)) > 1 else (),
        layer_embedding_size=config.integer(
            "hidden_size_per_layer_input", 256 if small else 0, least=0
        ),
        layer_scales=True,
    )
    rope = _full_rope(config, full.head_dim)
    ropes = (
        rope if kind == FULL else own for kind, own in zip(types, blueprint.ropes, strict=True)
    )
    return replace(blueprint, ropes=tuple(ropes))


def _refuse(config: Config) -> None:
    experts = config.fields.get("num_experts") if config.is_gguf else None
    if experts or config.flag("enable_moe_block", False):
        raise UnsupportedModelError(
            f"{config.name} has experts beside a dense feed-forward layer, which are not computed "
            "here.",
            "Use a dense Gemma 4: E2B, E4B, 12B or 31B.",
        )
    if config.fields.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(f"{config.name} attends to later tokens, too.", FIX)
    if config.flag("attention_bias", False):
        raise UnsupportedModelError(f"{config.name} has biases in attention.", FIX)


def _heads(config: Config, types: list[str]) -> tuple[KVShape, bool]:
    usual = config.integer("num_key_value_heads", 4)
    equal = config.flag("attention_k_eq_v", False)
    own = config.table("per_layer_config")  # Newer versions of transformers save it like this.
    if not own:
        heads = config.integer("num_global_key_value_heads", usual) if equal else usual
        return KVShape(heads, config.integer("global_head_dim", 512)), equal
    full = replace(config, fields=own).table(str(types.index(FULL)))
    if own != {str(i): full for i, kind in enumerate(types) if kind == FULL}:
        raise UnsupportedModelError(
            f"{config.name} has layers of one kind with different heads (per_layer_config).", FIX
        )
    given = replace(config, fields=full, part="per_layer_config")
    size = given.integer("head_dim", config.integer("head_dim", 256))
    return KVShape(given.integer("num_key_value_heads", usual), size), equal


def _gguf_heads(config: Config, fields: dict[str, Any], types: list[str]) -> tuple[KVShape, bool]:
    """The heads of full layers; writes the heads of layers with a window into `fields`."""
    size = config.integer("head_dim")
    usual = config.integer("num_key_value_heads")
    counts = config.sequence("kv_heads_by_layer", len(types)) or [usual] * len(types)
    by_type = dict(zip(types, counts, strict=True))
    if counts != [by_type[kind] for kind in types]:
        raise CheckpointError(
            f"{config.name} has layers of one kind with different numbers of KV heads.", FIX
        )
    fields["num_key_value_heads"] = by_type.get(WINDOWED, usual)
    fields["head_dim"] = config.integer("window_head_dim", size)
    return KVShape(by_type.get(FULL, usual), size), config.flag("attention_k_eq_v", False)


def _ffn_widths(config: Config, layers: int, shared: int) -> tuple[int, ...]:
    if isinstance(config.fields.get("intermediate_size"), list):
        widths = config.sequence("intermediate_size", layers) or []
        if not all(type(width) is int and width > 0 for width in widths):
            raise CheckpointError(f"{config.name} has widths that are not numbers.", FIX)
        return tuple(widths)
    width = config.integer("intermediate_size", None if config.is_gguf else 9216)
    times = 1 + config.flag("use_double_wide_mlp", False)
    return (width,) * (layers - shared) + (times * width,) * shared


def _full_rope(config: Config, head_dim: int) -> Rope:
    """Proportional rotation of pairs (i, i + head_dim / 2), where the later pairs do not rotate."""
    parameters = config.table("rope_parameters").get(FULL)
    parameters = parameters if isinstance(parameters, dict) else {}
    given = replace(config, fields={**config.fields, **parameters})
    kind = parameters.get("rope_type", "proportional")
    if kind != "proportional":
        raise UnsupportedModelError(
            f"{config.name} has RoPE of type {str(kind)[:80]!r} in its full layers.",
            "Known is: proportional.",
        )
    theta = given.real("rope_theta", 1e6)
    pairs = head_dim // 2
    rotated = int(given.real("partial_rotary_factor", ROTATED) * head_dim // 2)
    if rotated > pairs:
        raise CheckpointError(
            f"{config.name} rotates more than a head (partial_rotary_factor).", FIX
        )
    divisors = config.tensors.get("rope_freqs.weight")
    if divisors is not None:  # The divisors of pairs that do not rotate are 1e30.
        if len(divisors) != pairs or not all(divisor > 0 for divisor in divisors):
            raise CheckpointError(
                f"{config.name} needs {pairs} positive RoPE factors (rope_freqs.weight).", FIX
            )
        scaled = [theta ** (-2 * i / head_dim) / d for i, d in enumerate(divisors)]
        return Rope(tuple(0.0 if d >= 1e12 else f for f, d in zip(scaled, divisors, strict=True)))
    factor = given.real("factor", 1.0)
    turned = [theta ** (-2 * i / head_dim) / factor for i in range(rotated)]
    return Rope((*turned, *[0.0] * (pairs - rotated)))
