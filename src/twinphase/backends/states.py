"""How the state of recurrent layers lies in a slot, the same for every backend.

A slot holds the state of one sequence in every recurrent layer, as float32 numbers. Of each layer:

    history  [taps - 1 + num_drafts, channels], inputs of the convolution: those of the last
             positions that are known to be right, then those of drafts, which the next step takes
             for right or leaves out

Slot 0 holds zeros and is never written: it is the state before a sequence's first token.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinphase.blueprint import Blueprint, ShortConv

ZERO_SLOT = 0
# Columns of `StepInputs.states`.
SOURCE, TARGET, PENDING, FINAL = range(4)


@dataclass(frozen=True)
class SlotLayout:
    """Sizes of a slot in one layer.

    Attributes:
        num_layers: recurrent layers of the model.
        taps, channels: of the convolution.
        num_drafts: rows of a step, after a sequence's first, that a slot has room for.
    """

    num_layers: int
    taps: int
    channels: int
    num_drafts: int

    @property
    def history_rows(self) -> int:
        return self.taps - 1 + self.num_drafts

    @property
    def layer_floats(self) -> int:
        return self.history_rows * self.channels

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return 4 * self.num_layers * self.layer_floats


def slot_layout(blueprint: Blueprint, num_drafts: int) -> SlotLayout:
    """The layout for a model with recurrent layers, whose steps have up to `num_drafts` drafts."""
    recurrence: ShortConv | None = blueprint.recurrence
    assert recurrence is not None
    return SlotLayout(
        len(blueprint.recurrent_layers), recurrence.taps, recurrence.channels, num_drafts
    )


def slot_bytes(blueprint: Blueprint, num_drafts: int = 0) -> int:
    """Bytes of a sequence's state; 0 for a model that has none."""
    return slot_layout(blueprint, num_drafts).nbytes if blueprint.recurrent_layers else 0
