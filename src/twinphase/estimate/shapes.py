"""The shape of a decoder, and how a Hugging Face config.json gives one.

Reads only what the formulas of `estimate.py` need, for more architectures than the engine runs. A missing field is an
error that names it, never a guess, unless the model's published configuration class itself has a default for it. Not
for GGUF headers (`gguf_shapes.py`), names (`known_models.py`) or running a model (`models/config.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinphase.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "CONFIG_FIX",
    "DecoderShape",
    "Fields",
    "StoredBytes",
    "alternating_windows",
    "from_hf_config",
    "read_config",
]

CONFIG_FIX = "Give the config.json of a model of this family as it was published."
LARGEST_NUMBER = 10**9  # of any field; more is a damaged file
HF_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of the weights in a file, by what reads them."""

    layers: int  # the matrices that every row goes through
    experts: int  # of all layers
    head: int  # the embedding where they are tied
    total: int


@dataclass(frozen=True)
class DecoderShape:
    """What the formulas need of a decoder.

    In the formulas: h hidden_size, L num_layers, H num_heads, H_kv num_kv_heads, d head_dim, V vocab_size.
    """

    name: str  # as the user gave it
    source: str  # where its numbers come from
    architecture: str  # its family, as the file names it
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_parameters: int  # weights of the matrices in all layers that every row uses, with routers and shared experts
    expert_parameters: int  # weights of all experts of all layers; 0 in a dense model
    num_experts: int  # per layer; 0 in a dense model
    experts_per_token: int
    other_parameters: int  # norms and biases
    tied: bool  # whether the output head is the embedding
    windows: tuple[int | None, ...]  # for each layer, how many tokens it attends to at most; None is all
    context_length: int | None  # longest sequence that the model was made for; None if the file does not say
    dtype: str  # how its weights are stored: "fp16", "bf16", "fp32", a GGUF type; "" if the file does not say
    stored: StoredBytes | None = None  # bytes in the file; None for a configuration without weights

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def linear_parameters(self) -> int:
        """P: weights of the layers' matrices that one row uses, of the experts only its own."""
        if not self.num_experts:
            return self.layer_parameters
        return self.layer_parameters + self.expert_parameters * self.experts_per_token // self.num_experts

    @property
    def total_parameters(self) -> int:
        """All weights, as model cards count them."""
        embeddings = self.head_parameters if self.tied else 2 * self.head_parameters
        return self.layer_parameters + self.expert_parameters + self.other_parameters + embeddings

    @property
    def active_parameters(self) -> int:
        """Weights that one token uses, the whole embedding matrix included, as model cards count."""
        return self.total_parameters - (self.layer_parameters + self.expert_parameters - self.linear_parameters)


@dataclass(frozen=True)
class _Family:
    """The defaults of a family's configuration class, and what its layers have."""

    tied: bool = False  # default of tie_word_embeddings
    derived_head: bool = True  # head_dim defaults to hidden_size / num_attention_heads
    all_heads: bool = False  # num_key_value_heads defaults to num_attention_heads
    norms: int = 2  # vectors of the hidden size per layer
    head_norms: int = 0  # vectors of the head size per layer
    qkv_bias: bool = False  # whether queries, keys and values always have a bias
    windows: str = "none"  # which layers have one: "none", "all", "qwen", "alternate", "pattern"


_QWEN3 = _Family(derived_head=False, head_norms=2, windows="qwen")
FAMILIES = {
    "llama": _Family(all_heads=True),
    "mistral": _Family(windows="all"),
    "mixtral": _Family(windows="all"),
    "qwen2": _Family(qkv_bias=True, windows="qwen"),
    "qwen2_moe": _Family(qkv_bias=True, windows="qwen"),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "gemma": _Family(tied=True, derived_head=False),
    "gemma2": _Family(tied=True, derived_head=False, norms=4, windows="alternate"),
    "gemma3_text": _Family(tied=True, derived_head=False, norms=4, head_norms=2, windows="pattern"),
    "phi3": _Family(all_heads=True, windows="all"),
}


def read_config(path: Path, name: str) -> DecoderShape:
    """The shape that a config.json file gives; raises as `from_hf_config` does."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}.", CONFIG_FIX) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object.", CONFIG_FIX)
    if isinstance(config.get("text_config"), dict):  # of a model that also sees
        config = {**config["text_config"], **{k: config[k] for k in ("torch_dtype", "dtype") if k in config}}
    return from_hf_config(config, name, str(path))


class Fields:
    """Typed reads of a configuration; each failure names the field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`; `default`, if there is one, where the field is missing or null."""
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_NUMBER:
            what = "has no" if value is None else f"has {value!r} as"
            raise CheckpointError(f"The configuration of {self._name} {what} {key}.", CONFIG_FIX)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"The configuration of {self._name} has {value!r} as {key}.", CONFIG_FIX)
        return value

    def get(self, key: str) -> Any:
        return self._config.get(key)


def from_hf_config(config: Mapping[str, Any], name: str, source: str) -> DecoderShape:
    """The shape that the fields of a config.json give.

    Raises:
        CheckpointError: a field is missing or absurd; the message names it.
        UnsupportedModelError: another family, or a layout of experts that is not known here.
    """
    fields, model_type = Fields(config, name), config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"The architecture {model_type!r} (model_type) of {name} is not known here.",
            f"Known are: {', '.join(FAMILIES)}.",
        )
    hidden, layers = fields.number("hidden_size"), fields.number("num_hidden_layers")
    heads = fields.number("num_attention_heads")
    kv_heads = fields.number("num_key_value_heads", heads if family.all_heads else None)
    head_dim = fields.number("head_dim", hidden // heads if family.derived_head else None)
    if heads % kv_heads:
        raise CheckpointError(f"{name}: {heads} heads are not divisible by {kv_heads} num_key_value_heads.", CONFIG_FIX)
    dense, experts, count, chosen = _feed_forward(fields, str(model_type), hidden, name)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    biases = (heads + 2 * kv_heads) * head_dim if family.qkv_bias or fields.flag("attention_bias", False) else 0
    if not family.qkv_bias and biases:
        biases += hidden  # attention_bias is of the output projection too
    vectors = layers * (family.norms * hidden + family.head_norms * head_dim + biases) + hidden
    return DecoderShape(
        name=name,
        source=source,
        architecture=str(model_type),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.number("vocab_size"),
        layer_parameters=layers * (attention + dense),
        expert_parameters=layers * experts,
        num_experts=count,
        experts_per_token=chosen,
        other_parameters=vectors,
        tied=fields.flag("tie_word_embeddings", family.tied),
        windows=_hf_windows(fields, family, layers, name),
        context_length=fields.number("max_position_embeddings", 0) or None,
        dtype="" if fields.get("quantization_config") else _dtype(fields),
    )


def _dtype(fields: Fields) -> str:
    name = fields.get("dtype") or fields.get("torch_dtype")
    return HF_DTYPES.get(name, "") if isinstance(name, str) else ""


def _feed_forward(fields: Fields, model_type: str, hidden: int, name: str) -> tuple[int, int, int, int]:
    """Per layer: weights that every row uses, weights of all experts, number of experts, experts that a row uses."""
    if model_type == "mixtral":
        count, size = fields.number("num_local_experts"), fields.number("intermediate_size")
        shared = 0
    elif model_type in ("qwen2_moe", "qwen3_moe"):
        if fields.number("decoder_sparse_step") != 1 or fields.get("mlp_only_layers"):
            raise UnsupportedModelError(
                f"{name} has experts in only some layers (decoder_sparse_step, mlp_only_layers).",
                "Use a model with experts in every layer.",
            )
        count, size = fields.number("num_experts"), fields.number("moe_intermediate_size")
        shared = fields.number("shared_expert_intermediate_size") if model_type == "qwen2_moe" else 0
    else:
        return 3 * hidden * fields.number("intermediate_size"), 0, 0, 0
    chosen = fields.number("num_experts_per_tok")
    if chosen > count:
        raise CheckpointError(f"{name}: num_experts_per_tok is {chosen}, but there are {count} experts.", CONFIG_FIX)
    router = hidden * count + (hidden if shared else 0)  # the shared expert has a gate of its own
    return router + 3 * hidden * shared, count * 3 * hidden * size, count, chosen


def _hf_windows(fields: Fields, family: _Family, layers: int, name: str) -> tuple[int | None, ...]:
    """Each layer's sliding window, by `layer_types` where that is given, else by the rule of the family's class."""
    if family.windows == "none" or (family.windows == "qwen" and not fields.flag("use_sliding_window", False)):
        return (None,) * layers
    types = fields.get("layer_types")
    if types is not None:
        known = isinstance(types, list) and all(kind in ("full_attention", "sliding_attention") for kind in types)
        if not known or len(types) != layers:
            raise UnsupportedModelError(f"The layer_types of {name} are not known here.", CONFIG_FIX)
        window = fields.number("sliding_window") if "sliding_attention" in types else None
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.windows == "all":  # null is no window
        window = fields.number("sliding_window") if fields.get("sliding_window") is not None else None
        return (window,) * layers
    window = fields.number("sliding_window")
    if family.windows == "qwen":
        first = fields.number("max_window_layers", least=0)
        return tuple(window if i >= first else None for i in range(layers))
    every = 2 if family.windows == "alternate" else fields.number("sliding_window_pattern", 6)  # as its class
    return alternating_windows(window, every, layers)


def alternating_windows(window: int, every: int, layers: int) -> tuple[int | None, ...]:
    """The window in all layers but each `every`-th one; 0 is all layers."""
    return tuple(window if not every or (i + 1) % every else None for i in range(layers))
