"""Reads a checkpoint's hyper-parameters under Hugging Face's field names.

A GGUF file's metadata is translated, so that `architectures/` describes each model once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinphase.errors import CheckpointError
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.quant import dequantize

# No model comes close to this in any integer field, so a larger number means a damaged file.
MAX_INTEGER = 1 << 24
MAX_LAYERS = 10_000
FIX = "Convert or fetch the model again."
NEXT_TOKEN = ".nextn.eh_proj.weight"
# GGUF's keys after the architecture's prefix (gguf.constants), and the corresponding field.
GGUF_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.key_length_swa": "window_head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_gating_func": "expert_gating_func",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "num_dense_layers",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.scale": "attention_multiplier",
    "attention.temperature_scale": "temperature_scale",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.dimension_count": "rotary_dim",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "pooling_type": "pooling_type",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_num_values",
    "full_attention_interval": "full_attention_interval",
    "nextn_predict_layers": "nextn_predict_layers",
}
GGUF_SCALING_FIELDS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
    "finetuned": "finetuned",
}


@dataclass(frozen=True)
class Config:
    """Typed access to hyper-parameters; each error names the field and the model.

    Attributes:
        architecture: GGUF's name of the architecture.
        name: name of the model in messages.
        is_gguf: whether the checkpoint is a GGUF file, whose converter changes some values.
        tensors: values of small tensors that carry hyper-parameters (RoPE factors in GGUF), by
            name.
        max_positions: maximum tokens of a sequence in this engine; None is the model's own limit.
        part: description of the fields for messages.
    """

    fields: Mapping[str, Any]
    architecture: str
    name: str
    is_gguf: bool = False
    tensors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    max_positions: int | None = None
    part: str = "configuration"

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_positions: int | None = None) -> Config:
        """The hyper-parameters of an open checkpoint.

        Raises:
            CheckpointError: there is no token embedding, or a field has an impossible value.
        """
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        embedding = shapes.get("token_embd.weight", ())
        if len(embedding) != 2:
            raise CheckpointError(f"{checkpoint.path.name} has no token_embd.weight matrix.", FIX)
        arch = checkpoint.architecture
        name = checkpoint.path.name
        if checkpoint.config is not None:
            fields = dict(checkpoint.config)
            # A folder without its own head is tied, despite the default of its class.
            fields.setdefault("tie_word_embeddings", "output.weight" not in shapes)
            if fields.get("tied_without_head") and "output.weight" not in shapes:
                fields["tie_word_embeddings"] = True
            # A folder may declare MTP layers and have none.
            fields["nextn_predict_layers"] = sum(name.endswith(NEXT_TOKEN) for name in shapes)
            return cls(fields, arch, name, max_positions=max_positions)
        fields = _gguf_fields(checkpoint)
        fields |= {"vocab_size": embedding[0], "tie_word_embeddings": "output.weight" not in shapes}
        # In GGUF only the tensors show these.
        fields["qkv_bias"] = "blk.0.attn_q.bias" in shapes
        fields["use_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in shapes)
        fields["mamba_rms_norm"] = "blk.0.ssm_norm.weight" in shapes
        fields["fused_experts"] = "blk.0.ffn_gate_up_exps.weight" in shapes
        # In a layer without a value projection, keys are also the values.
        keys = [name for name in shapes if name.endswith(".attn_k.weight")]
        fields["attention_k_eq_v"] = any(k.replace("attn_k", "attn_v") not in shapes for k in keys)
        tensors = {
            key: _values(checkpoint, key) for key in checkpoint.tensors if key.startswith("rope_")
        }
        return cls(fields, arch, name, is_gguf=True, tensors=tensors, max_positions=max_positions)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`; `default`, if given, replaces a missing or null field."""
        value: Any = self.fields.get(name)
        if value is None and default is not None:
            return default
        most = MAX_LAYERS if name == "num_hidden_layers" else MAX_INTEGER
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, value)
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A positive number; `default`, if given, replaces a missing or null field."""
        value: Any = self.fields.get(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise self._wrong(name, value)
        return float(value)

    def reals(self, name: str, count: int) -> list[float]:
        """Positive numbers; ones if the field is missing or null."""
        values = self.sequence(name, count) or [1.0] * count
        return [replace(self, fields={name: value}).real(name) for value in values]

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value)
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """An object of the configuration; empty if it is missing or null."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value)
        return value or {}

    def sequence(self, name: str, length: int) -> list[Any] | None:
        """The first `length` entries of a list; None if it is missing or null."""
        value = self.fields.get(name)
        if value is not None and (not isinstance(value, list) or len(value) < length):
            raise self._wrong(name, value)
        return None if value is None else value[:length]

    def called(self, name: str) -> str:
        """The name of the field in the checkpoint's own format."""
        key = next((key for key, field in GGUF_FIELDS.items() if field == name), None)
        return f"{self.architecture}.{key}" if key and self.is_gguf else name

    def _wrong(self, name: str, value: object) -> CheckpointError:
        what = "has no" if value is None else f"has {str(value)[:80]!r} as"
        return CheckpointError(f"The {self.part} of {self.name} {what} {self.called(name)}.", FIX)


def _values(checkpoint: Checkpoint, name: str) -> tuple[float, ...]:
    info = checkpoint.tensors[name]
    try:
        return tuple(dequantize(checkpoint.raw(name), info.shape, info.type).ravel().tolist())
    except (ValueError, CheckpointError):
        raise CheckpointError(f"Tensor {name} of {checkpoint.path.name} is damaged.", FIX) from None


def _gguf_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    prefix = f"{checkpoint.architecture}."
    given = {
        k.removeprefix(prefix): v for k, v in checkpoint.metadata.items() if k.startswith(prefix)
    }
    fields = {GGUF_FIELDS[key]: value for key, value in given.items() if key in GGUF_FIELDS}
    pattern = fields.get("sliding_window_pattern")
    fields = {name: _single(value) for name, value in fields.items()}
    if isinstance(pattern, list):
        # The list states for each layer whether it has the window.
        del fields["sliding_window_pattern"]
        fields["layer_types"] = [
            "sliding_attention" if has_window else "full_attention" for has_window in pattern
        ]
    heads = fields.get("num_key_value_heads")
    if isinstance(heads, list) and heads and all(type(count) is int for count in heads):
        # Layers without KV heads are recurrent.
        fields["num_key_value_heads"] = max(heads)
        fields["kv_heads_by_layer"] = heads
        if 0 in heads:
            fields["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    return fields | {"rope_scaling": _gguf_rope_scaling(given)}


def _single(value: Any) -> Any:
    """A single number for values by layer that are all equal."""
    same = isinstance(value, list) and value and value[1:] == value[:-1]
    return value[0] if same else value


def _gguf_rope_scaling(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling` from GGUF's keys."""
    scaling = {name: given.get(f"rope.scaling.{key}") for key, name in GGUF_SCALING_FIELDS.items()}
    if scaling["factor"] is None:
        scaling["factor"] = given.get("rope.scale_linear")
    if scaling["rope_type"] is None and scaling["factor"] not in (None, 0, 1):
        scaling["rope_type"] = "linear"
    return {key: value for key, value in scaling.items() if value is not None} or None
