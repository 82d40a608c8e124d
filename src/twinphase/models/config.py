"""Hyper-parameters of a decoder, read from a checkpoint's metadata."""

from __future__ import annotations

from dataclasses import dataclass

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint

__all__ = ["ModelConfig"]

MAX_CONTEXT = 1 << 24  # tokens; no model comes near, so a larger number is a damaged file
# Features that would change the answers if they were ignored, with the value that means "not used".
NEUTRAL = {"rope.scale_linear": 1.0, "expert_count": 0, "attention.sliding_window": 0}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model, in the field's names."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_dim: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Read the GGUF keys of the checkpoint's architecture.

        Raises:
            CheckpointError: a required key is missing or its value is absurd.
            UnsupportedModelError: a feature that is not implemented (RoPE scaling by factor).
        """
        arch = checkpoint.architecture

        def number(key: str, default: float | None = None) -> float:
            value = checkpoint.metadata.get(f"{arch}.{key}", default)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
                raise CheckpointError(f"{checkpoint.path.name}: {arch}.{key} is {value!r}.", "Convert the model again.")
            return value

        scaling = checkpoint.metadata.get(f"{arch}.rope.scaling.type", "none")
        if scaling not in ("none", ""):
            raise UnsupportedModelError(f"RoPE scaling {scaling!r} is not supported.", "Use a model without it.")
        for key, neutral in NEUTRAL.items():
            if checkpoint.metadata.get(f"{arch}.{key}", neutral) not in (neutral, 0):
                raise UnsupportedModelError(f"{arch}.{key} is not supported.", "Use a model without it.")
        hidden, heads = int(number("embedding_length")), int(number("attention.head_count"))
        head_dim = int(number("attention.key_length", hidden // heads))
        embedding = checkpoint.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{checkpoint.path.name}: no token_embd.weight matrix.", "Convert the model again.")
        kv_heads = int(number("attention.head_count_kv", heads))
        if heads % kv_heads:
            raise CheckpointError(f"{heads} heads do not divide by {kv_heads} KV heads.", "Convert the model again.")
        rope_dim = int(number("rope.dimension_count", head_dim))
        if rope_dim % 2 or rope_dim > head_dim:
            raise CheckpointError(
                f"{arch}.rope.dimension_count is {rope_dim}, but a head has {head_dim}.", "Convert the model again."
            )
        context_length = int(number("context_length"))
        if context_length > MAX_CONTEXT:
            raise CheckpointError(f"{arch}.context_length is {context_length}.", "Convert the model again.")
        return cls(
            architecture=arch,
            hidden_size=hidden,
            num_layers=int(number("block_count")),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=int(number("feed_forward_length")),
            vocab_size=embedding.shape[0],
            context_length=context_length,
            rms_norm_eps=float(number("attention.layer_norm_rms_epsilon", 1e-5)),
            rope_theta=float(number("rope.freq_base", 10000.0)),
            rope_dim=rope_dim,
        )

    @property
    def linear_parameters(self) -> int:
        """Weights of the layers' matrices, without embedding and output head: P of the FLOP formulas."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.ffn_size)
