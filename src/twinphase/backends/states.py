"""How the state of recurrent layers lies in a slot, the same for every backend.

A slot holds the state of one sequence in every recurrent layer, as float32 numbers. Of each layer:

    history  [taps - 1 + num_drafts, channels], inputs of the convolution: those of the last
             positions that are known to be right, then those of drafts, which the next step takes
             for right or leaves out

Slot 0 holds zeros and is never written: it is the state before a sequence's first token.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinphase.blueprint import Blueprint
from twinphase.errors import UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint

# Columns of `StepInputs.states`.
SOURCE, TARGET, PENDING, FINAL = range(4)


@dataclass(frozen=True)
class SlotLayout:
    """Sizes of a slot, in numbers.

    Attributes:
        num_layers: recurrent layers of the model.
        taps, channels: of the convolution.
        num_drafts: rows of a step, after a sequence's first, that a slot has room for.
        history_rows: of each layer.
        layer_floats: numbers of each layer.
    """

    num_layers: int
    taps: int
    channels: int
    num_drafts: int
    history_rows: int
    layer_floats: int

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return 4 * self.num_layers * self.layer_floats


def slot_layout(blueprint: Blueprint, num_drafts: int) -> SlotLayout:
    """The layout for a model with recurrent layers, whose steps have up to `num_drafts` drafts."""
    recurrence = blueprint.recurrence
    assert recurrence is not None
    return SlotLayout(
        num_layers=len(blueprint.recurrent_layers),
        taps=recurrence.taps,
        channels=recurrence.channels,
        num_drafts=num_drafts,
        history_rows=recurrence.history_rows(num_drafts),
        layer_floats=recurrence.state_floats(num_drafts),
    )


def refuse_recurrent_layers(checkpoint: Checkpoint, blueprint: Blueprint, backend: str) -> None:
    """Raise `UnsupportedModelError` for a model with recurrent layers."""
    if blueprint.recurrent_layers:
        raise UnsupportedModelError(
            f"{checkpoint.path.name} has recurrent layers, which the {backend} backend does not "
            "compute.",
            "Use --backend cpu.",
        )
