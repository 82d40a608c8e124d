"""Counts a model's parameters and stored bytes by the use of its tensors.

All counts of FLOP and bytes are based on these numbers, which are based on the list in
`tensors.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from twinphase.blueprint import Blueprint, Experts
from twinphase.models.tensors import LAYER_EMBEDDING, LAYER_PROJECTION, model_tensors
from twinphase.weights.checkpoint import Checkpoint

AFTER_ATTENTION = ("attn_output", "shortconv.out_proj", "ssm_out", "ffn_", "inp_gate.", "proj.")
# Endings of vectors, which may have a second dimension in files.
VECTORS = (".bias", ".ssm_a", ".ssm_d", "norm.weight")


@dataclass(frozen=True)
class Size:
    """Numbers of parameters, or of their bytes, by use.

    Attributes:
        layers: matrices of all layers that every row uses, including routers.
        experts: matrices of all experts of all layers.
        head: the output head, or the embedding if they are tied.
        embedding: the embedding, from which a row reads one line; 0 if it is the head. It includes
            layer embeddings.
        other: norms, biases, sinks, and RoPE factors if a file has them.
        tail, tail_experts: parts of `layers` and `experts` after the attention or recurrence of the
            last layer that writes KV or a state; only rows with logits use them.
        expert_biases: part of `other` that belongs to experts.
    """

    layers: int = 0
    experts: int = 0
    head: int = 0
    embedding: int = 0
    other: int = 0
    tail: int = 0
    tail_experts: int = 0
    expert_biases: int = 0

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.head + self.embedding + self.other

    def linear(self, experts: Experts | None) -> int:
        """P of the formulas: parameters that a row uses in the layers, with its own experts."""
        return self.layers + of_one_row(self.experts, experts)

    def active(self, experts: Experts | None) -> int:
        """Parameters that a token uses, as model cards count: without the other experts."""
        chosen = self.experts + self.expert_biases
        return self.total - chosen + of_one_row(chosen, experts)


def of_one_row(amount: int, experts: Experts | None) -> int:
    """The part of all experts' `amount` that one row uses."""
    return amount * experts.used // experts.count if experts else 0


def count_parameters(blueprint: Blueprint) -> Size:
    """Parameters of a model."""
    return _add_up(
        blueprint, ((name, shape, math.prod(shape)) for name, shape in model_tensors(blueprint))
    )


def stored_bytes(checkpoint: Checkpoint, blueprint: Blueprint) -> Size:
    """Bytes of an open model's tensors, in their stored precision."""
    drafting = tuple(f"blk.{blueprint.num_layers + i}." for i in range(blueprint.draft_layers))
    tensors = [one for one in checkpoint.tensors.values() if not one.name.startswith(drafting)]
    return _add_up(blueprint, ((tensor.name, tensor.shape, tensor.nbytes) for tensor in tensors))


def _add_up(blueprint: Blueprint, tensors: Iterable[tuple[str, tuple[int, ...], int]]) -> Size:
    """The `Size` from (name, shape, amount) of each tensor."""
    last = blueprint.last_writer
    after_attention = (
        *(f"blk.{last}.{part}" for part in AFTER_ATTENTION),
        *(f"blk.{layer}." for layer in range(last + 1, blueprint.num_layers)),
    )
    sums: Counter[str] = Counter()
    for name, shape, amount in tensors:
        use = _use(name, shape, blueprint.tied)
        sums[use] += amount
        if name.endswith("_exps.bias"):
            sums["expert_biases"] += amount
        if use in ("layers", "experts") and name.startswith(after_attention):
            sums["tail" if use == "layers" else "tail_experts"] += amount
    return Size(**sums)


def _use(name: str, shape: tuple[int, ...], tied: bool) -> str:
    if name == "token_embd.weight":
        return "head" if tied else "embedding"
    if name == LAYER_EMBEDDING:
        return "embedding"
    if name == LAYER_PROJECTION:
        return "layers"
    if name == "output.weight":
        return "head"
    if not name.startswith("blk.") or len(shape) < 2 or name.endswith(VECTORS):
        return "other"
    return "experts" if "_exps." in name else "layers"
