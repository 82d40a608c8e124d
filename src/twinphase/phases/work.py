"""The FLOP and bytes that the algorithm of a step requires, from a model's shape.

These are the numerators of MFU and MBU. They exclude activations and any extra work of an
implementation. Measured rates and times are in other files.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinphase.batch import StepWork
from twinphase.blueprint import Blueprint
from twinphase.models.size import Size, count_parameters, of_one_row, stored_bytes
from twinphase.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that the formulas need.

    Attributes:
        linear_parameters: P, weights of the matrices that every row is multiplied with, without the
            embedding; of the experts, only those that a row is routed to.
        head_parameters: weights that only rows with logits are multiplied with: the output head,
            and the last layer's matrices after its attention.
        linear_bytes, head_bytes: stored bytes of both, without experts.
        num_layers, num_heads, num_kv_heads, head_dim: L (layers with attention), H (query heads),
            H_kv, and d (mean over the layers).
        kv_token_bytes: bytes per token in the KV cache as the backend stores it; 0 stands for the
            formula with float16.
        state_bytes: bytes of a sequence's state in recurrent layers.
        window: maximum tokens that a row attends to in `windowed_layers` of the layers; None
            without a window.
        shared_kv_layers: number of last layers that attend to the KV of earlier layers; only rows
            with logits use them.
        num_experts, experts_per_row: E and k of every layer; 0 in a dense model.
        expert_bytes, head_expert_bytes: bytes of all experts, and of those of the last layer.
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
    state_bytes: int = 0
    window: int | None = None
    windowed_layers: int = 0
    shared_kv_layers: int = 0
    num_experts: int = 0
    experts_per_row: int = 0
    expert_bytes: int = 0
    head_expert_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a step reads; the embedding counts only if it is the head."""
        return self.linear_bytes + self.head_bytes + self.expert_bytes + self.head_expert_bytes

    @property
    def windowed_share(self) -> float:
        """The fraction of the layers that have the window."""
        return self.windowed_layers / self.num_layers

    def mean_attended(self, context: float) -> float:
        """Tokens that the last row of a context attends to, itself included: mean over layers."""
        if self.window is None:
            return context
        return context - self.windowed_share * (context - min(context, self.window))


def model_shape(checkpoint: Checkpoint, blueprint: Blueprint) -> ModelShape:
    """The sizes of an open model for the cost formulas; bytes in the checkpoint's own precision."""
    return make_shape(blueprint, count_parameters(blueprint), stored_bytes(checkpoint, blueprint))


def make_shape(
    blueprint: Blueprint, parameters: Size, nbytes: Size, kv_token_bytes: int = 0
) -> ModelShape:
    """The sizes for the cost formulas of a model given by its parameter and byte counts."""
    b = blueprint
    experts = blueprint.experts
    attending = [layer for layer in range(b.num_layers) if b.attends(layer)]
    windowed = [window for window in b.windows if window is not None]
    tail = parameters.tail + of_one_row(parameters.tail_experts, experts)
    return ModelShape(
        linear_parameters=parameters.linear(experts) - tail,
        head_parameters=parameters.head + tail,
        linear_bytes=nbytes.layers - nbytes.tail,
        head_bytes=nbytes.head + nbytes.tail,
        num_layers=len(attending),
        num_heads=b.num_heads,
        num_kv_heads=b.num_kv_heads,
        head_dim=sum(b.kv_shape(layer).head_dim for layer in attending) // len(attending),
        kv_token_bytes=kv_token_bytes or round(b.kv_bytes(lambda dim: 4 * dim)),
        window=max(windowed, default=None),  # A model has a single window size.
        windowed_layers=len(windowed),
        shared_kv_layers=b.shared_kv_layers,
        num_experts=experts.count if experts else 0,
        experts_per_row=experts.used if experts else 0,
        expert_bytes=nbytes.experts - nbytes.tail_experts,
        head_expert_bytes=nbytes.tail_experts,
    )


@dataclass(frozen=True)
class Cost:
    """Work of a step or of a part of one; costs add up.

    Attributes:
        linear_flops: FLOP of the layers' matrices and the output head.
        attention_flops: FLOP of queries by keys and of weights by values, half each.
        bytes: bytes of weights, KV read and KV written.
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
    """KV bytes of one token in all layers: as the backend stores them, or 2 L H_kv d b, b = 2."""
    return shape.kv_token_bytes or 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2


def weight_bytes_read(shape: ModelShape, rows: int, num_logits: int) -> int:
    """Weight bytes that a step of `rows` rows reads, each once; the head's only for logits.

    Of E experts, k per row, n rows reach E (1 - (1 - k / E)^n) if they choose evenly and
    independently: the corresponding share of the experts' bytes is counted. In the last layer only
    the rows with logits choose experts.
    """
    dense = shape.linear_bytes + (shape.head_bytes if num_logits else 0)
    if not shape.num_experts:
        return dense
    passed = 1 - shape.experts_per_row / shape.num_experts
    last = (1 - passed**num_logits) * shape.head_expert_bytes
    return dense + round((1 - passed**rows) * shape.expert_bytes + last)


def step_cost(shape: ModelShape, work: StepWork) -> Cost:
    """Cost of a step, or of a part of one, without reading the weights.

        flops = 2 P n + 2 head_parameters logits + 4 H d contexts, the contexts summed over rows and
        layers bytes = KV read and written, of the tokens that the rows of each layer attend to

    `work` has been counted with the window of `shape`, if it has one.
    """
    linear = 2 * shape.linear_parameters * work.rows + 2 * shape.head_parameters * work.logits
    near = shape.windowed_layers
    whole = shape.num_layers - shape.windowed_layers
    contexts = whole * work.decode_contexts + near * work.windowed_decode_contexts
    prefill = whole * work.prefill_contexts + near * work.windowed_prefill_contexts
    writing = shape.num_layers - shape.shared_kv_layers
    contexts += prefill * writing // shape.num_layers
    kv_tokens = whole * work.kv_tokens + near * work.windowed_kv_tokens  # The values are per layer.
    attention = 4 * shape.num_heads * shape.head_dim * contexts
    return Cost(linear, attention, kv_tokens * kv_bytes_per_token(shape) // writing)


def rows_cost(shape: ModelShape, start: int, num_rows: int, num_logits: int) -> Cost:
    """Cost of the rows at positions `start` ..

    `start + num_rows - 1` of one sequence, weights not read here.

    The row at position p attends to p + 1 tokens, or to its layer's window if that is less. Without
    windows the sum of contexts over a whole prompt is n (n + 1) / 2.
    """
    chunk = StepWork.of_chunk(start, num_rows, num_logits=0, window=shape.window)
    return step_cost(shape, chunk._replace(logits=num_logits))
