"""What a step must do by the algorithm: floating-point operations and bytes, from a model's shape.

These are the numerators of MFU and MBU. Activations are left out, and so is whatever an implementation does on top.
Not for measured rates, ceilings or times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinphase.batch import StepWork
from twinphase.blueprint import Blueprint
from twinphase.weights.checkpoint import Checkpoint

__all__ = ["Cost", "ModelShape", "kv_bytes_per_token", "model_shape", "rows_cost", "step_cost", "weight_bytes_read"]


@dataclass(frozen=True)
class ModelShape:
    """The plain numbers that the formulas need.

    Attributes:
        linear_parameters: weights of the matrices that every row goes through, P; not the embedding.
        head_parameters: weights that only rows with logits go through: the output head, and the last layer's matrices
            behind its attention.
        linear_bytes, head_bytes: both as stored.
        num_layers, num_heads, num_kv_heads, head_dim: L, H (query heads), H_kv and d.
        kv_token_bytes: of one token in the KV cache as the backend stores it; 0 for the formula with float16.
    """

    linear_parameters: int
    head_parameters: int
    linear_bytes: int
    head_bytes: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_token_bytes: int = 0


def model_shape(checkpoint: Checkpoint, blueprint: Blueprint) -> ModelShape:
    """The numbers of the cost formulas for an open model; bytes are those of the checkpoint's own precision.

    Of experts, those that one row goes through; a router counts as what it is, a small matrix.
    """
    b, head = blueprint, checkpoint.tensors["token_embd.weight" if blueprint.tied else "output.weight"]
    linear, tail = [0, 0], [0, 0]  # parameters, bytes; of the layers, and of the last one behind its attention
    last = f"blk.{b.num_layers - 1}."
    for info in checkpoint.tensors.values():
        if not info.name.startswith("blk.") or len(info.shape) < 2 or info.name.endswith(".bias"):
            continue
        used = b.experts.used / b.experts.count if b.experts and len(info.shape) == 3 else 1
        into = tail if info.name.startswith((f"{last}attn_output", f"{last}ffn_")) else linear
        into[0] += int(math.prod(info.shape) * used)
        into[1] += int(info.nbytes * used)
    return ModelShape(
        linear_parameters=linear[0],
        head_parameters=b.vocab_size * b.hidden_size + tail[0],
        linear_bytes=linear[1],
        head_bytes=head.nbytes + tail[1],
        num_layers=b.num_layers,
        num_heads=b.num_heads,
        num_kv_heads=b.num_kv_heads,
        head_dim=b.head_dim,
    )


@dataclass(frozen=True)
class Cost:
    """Work of (a part of) a step; costs add up.

    Attributes:
        linear_flops: of the layers' matrices and the output head.
        attention_flops: of queries by keys and of weights by values, half each.
        bytes: weights, KV read and KV written.
    """

    linear_flops: int = 0
    attention_flops: int = 0
    bytes: int = 0

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.linear_flops + other.linear_flops,
            self.attention_flops + other.attention_flops,
            self.bytes + other.bytes,
        )


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Keys and values of one token in every layer: what the backend stores, or 2 L H_kv d b with b = 2."""
    return shape.kv_token_bytes or 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2


def weight_bytes_read(shape: ModelShape, num_logits: int) -> int:
    """Weights that a step reads, once however many rows there are; those behind logits if any row wants them."""
    return shape.linear_bytes + (shape.head_bytes if num_logits else 0)


def step_cost(shape: ModelShape, work: StepWork, kv_tokens: int) -> Cost:
    """Cost of a step, or of a part of one, without reading the weights.

        flops = 2 P n + 2 head_parameters logits + 4 L H d sum of contexts
        bytes = KV read and written = kv_tokens * kv_bytes_per_token

    `kv_tokens` are those whose KV is read or written: of each sequence, those known after the step.
    """
    contexts = work.prefill_contexts + work.decode_contexts
    linear = 2 * shape.linear_parameters * work.rows + 2 * shape.head_parameters * work.logits
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * contexts
    return Cost(linear, attention, kv_tokens * kv_bytes_per_token(shape))


def rows_cost(shape: ModelShape, start: int, num_rows: int, num_logits: int) -> Cost:
    """Cost of the rows at positions `start` .. `start + num_rows - 1` of one sequence, weights not read here.

    The row at position p attends to p + 1 tokens. Over a whole prompt the sum of contexts is n (n + 1) / 2.
    """
    chunk = StepWork.of_chunk(start, num_rows, samples=False)
    return step_cost(shape, chunk._replace(logits=num_logits), start + num_rows)
