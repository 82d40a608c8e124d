"""How large a model is, by what uses its tensors: parameters of a blueprint, stored bytes.

Every count of FLOP and bytes starts from these numbers, and they from the list in `tensors.py`.
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
# Files may give them a second dimension.
VECTORS = (".bias", ".ssm_a", ".ssm_d", "norm.weight")


@dataclass(frozen=True)
class Size:
    """Parameters, or their bytes, by what uses them.

    Attributes:
        layers: matrices that every row goes through, of all layers; routers are among them.
        experts: matrices of all experts of all layers.
        head: the output head; the embedding where they are tied.
        embedding: a row reads one line of it; 0 if it is the head. The layers' own is part of it.
        other: norms, biases, sinks, and RoPE's factors where a file has them.
        tail, tail_experts: those of `layers` and `experts` after the attention or recurrence of
            the last layer that writes KV or a state: only rows whose logits are wanted go through
            them.
        expert_biases: those of `other` that belong to experts.
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
        """P of the formulas: what a row uses in the layers, with the experts that it is sent to."""
        return self.layers + of_one_row(self.experts, experts)

    def active(self, experts: Experts | None) -> int:
        """What a token uses, as model cards count: all but the experts that it is not sent to."""
        chosen = self.experts + self.expert_biases
        return self.total - chosen + of_one_row(chosen, experts)


def of_one_row(amount: int, experts: Experts | None) -> int:
    """The part of all experts' `amount` that one row goes through."""
    return amount * experts.used // experts.count if experts else 0


def count_parameters(blueprint: Blueprint) -> Size:
    """Parameters of a model."""
    return _add_up(
        blueprint, ((name, shape, math.prod(shape)) for name, shape in model_tensors(blueprint))
    )


def stored_bytes(checkpoint: Checkpoint, blueprint: Blueprint) -> Size:
    """Bytes of an open model's tensors, in the precision that they have there."""
    drafting = tuple(f"blk.{blueprint.num_layers + i}." for i in range(blueprint.draft_layers))
    tensors = [one for one in checkpoint.tensors.values() if not one.name.startswith(drafting)]
    return _add_up(blueprint, ((tensor.name, tensor.shape, tensor.nbytes) for tensor in tensors))


def _add_up(blueprint: Blueprint, tensors: Iterable[tuple[str, tuple[int, ...], int]]) -> Size:
    """The `Size` of (name, shape, amount) of each tensor."""
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
