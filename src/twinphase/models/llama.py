"""The Llama family (Touvron et al., 2023), written once over the `Backend` protocol.

RMSNorm, rotary embedding, grouped-query attention, SwiGLU; biases and sliding windows are other models' business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinphase.backends.base import Array, Backend, ModelShape, RopeSpec
from twinphase.models.config import ModelConfig
from twinphase.weights.checkpoint import Checkpoint

__all__ = ["Llama"]


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer."""

    attn_norm: Array
    qkv: Array
    output: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


class Llama:
    """Weights on one backend, and the forward pass of a step."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        backend: Backend,
        max_positions: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Load every tensor onto `backend`; positions stay below `max_positions`. `progress` counts layers."""
        self.config = config
        factors = "rope_freqs.weight" if "rope_freqs.weight" in checkpoint.tensors else None
        spec = RopeSpec(config.rope_theta, config.rope_dim, interleaved=True, factors=factors)
        backend.prepare(checkpoint, ModelShape(config.num_heads, config.num_kv_heads, config.head_dim, spec))
        self.rope = backend.rope(checkpoint, spec, max_positions)
        self.embedding = backend.embedding(checkpoint, "token_embd.weight")
        self.layers: list[Layer] = []
        for i in range(config.num_layers):
            progress(i, config.num_layers)
            self.layers.append(self._layer(checkpoint, backend, f"blk.{i}."))
        self.norm = backend.vector(checkpoint, "output_norm.weight")
        tied = "output.weight" not in checkpoint.tensors
        self.head = backend.matrix(checkpoint, ["token_embd.weight" if tied else "output.weight"])

    @staticmethod
    def _layer(checkpoint: Checkpoint, backend: Backend, prefix: str) -> Layer:
        def matrix(*names: str) -> Array:
            return backend.matrix(checkpoint, [f"{prefix}{name}.weight" for name in names])

        return Layer(
            attn_norm=backend.vector(checkpoint, prefix + "attn_norm.weight"),
            qkv=matrix("attn_q", "attn_k", "attn_v"),
            output=matrix("attn_output"),
            ffn_norm=backend.vector(checkpoint, prefix + "ffn_norm.weight"),
            gate_up=matrix("ffn_gate", "ffn_up"),
            down=matrix("ffn_down"),
        )

    def forward(self, backend: Backend) -> Array:
        """Logits [num_logits, vocab_size] of the backend's current step."""
        config, eps = self.config, self.config.rms_norm_eps
        x = backend.embed(self.embedding)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self.layers):
            h = backend.rms_norm(x, layer.attn_norm, eps)
            qkv = backend.linear(h, layer.qkv)
            q = backend.rope_kv_write(qkv, self.rope, index, config.num_heads)
            h = backend.attention(q, index, config.num_heads)
            if index == config.num_layers - 1:
                # Behind the last attention no row looks at another: only those whose logits are wanted go on.
                h, x = backend.logit_rows(h), backend.logit_rows(x)
            x = backend.linear(h, layer.output, residual=x)
            h = backend.rms_norm(x, layer.ffn_norm, eps)
            h = backend.silu_mul(backend.linear(h, layer.gate_up))
            x = backend.linear(h, layer.down, residual=x)
        x = backend.rms_norm(x, self.norm, eps)
        return backend.linear(x, self.head)
