"""How the state of recurrent layers lies in a slot, the same for every backend.

A slot holds the state of one sequence in every recurrent layer, as float32 numbers. Of each layer:

    history  [taps - 1 + log_rows, channels], inputs of the convolution: those of the last
             positions before the log, then those of the log
    log      of matrices, [log_rows]: keys [heads, key_dim], changes [heads, value_dim] and
             decays [heads] of rows that the state has yet to take up, and then of drafts, which
             the next step takes for right or writes over
    matrices of a delta rule or a state space, a [key_dim, value_dim] of each value head

Slot 0 holds zeros and is never written: it is the state before a sequence's first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from twinphase.blueprint import Blueprint
from twinphase.errors import UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint

# Columns of `StepInputs.states`.
SOURCE, TARGET, PENDING, FINAL = range(4)


class RecurrentOperations(Protocol):
    """The operations of recurrent layers and of what goes with them, on a backend's arrays."""

    def short_conv(self, bcx: Any, weight: Any, layer: int) -> Any:
        """The gated short convolution of LFM2, C * conv(B * x), [num_tokens, channels].

        `bcx` is [num_tokens, 3 * channels]: B, C and x; `weight` is [channels, taps]. The
        convolution is depthwise and causal, over each sequence; rows before the step's are in the
        state of recurrent layer number `layer`, which is written for the next step.
        """

    def delta_rule(self, qkv: Any, gates: Any, weights: tuple[Any, Any, Any], layer: int) -> Any:
        """The gated delta rule (`blueprint.DeltaNet`), [num_tokens, num_values].

        With S the state of a value head, k and q its key head's rows of length 1, q over
        sqrt(key_dim), g = A * softplus(alpha + bias) and beta = sigmoid(beta):
        S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; the result is S^T q.

        `qkv` is [num_tokens, channels], before the convolution; `gates` are alpha and beta of each
        value head; `weights` are those of the convolution [channels, taps], A as it is stored, and
        the bias. State as in `short_conv`.
        """

    def state_space(
        self, xbc: Any, steps: Any, conv: tuple[Any, Any], weights: tuple[Any, Any, Any], layer: int
    ) -> Any:
        """The selective state space of Mamba-2 (`blueprint.Mamba2`), [num_tokens, num_values].

        With S the state of a head, x its values, B and C its group's rows and t = softplus(step +
        bias): S <- exp(t A) S + B (t x)^T; the result is S^T C + D x.

        `xbc` is [num_tokens, channels], all x, all B and all C before the convolution; `steps` has
        a number of each head; `conv` is the convolution's weight [channels, taps] and bias;
        `weights` are A as it is stored, the steps' bias, and D. State as in `short_conv`.
        """

    def gated_norm(self, x: Any, weight: Any, gate: Any, eps: float) -> Any:
        """rms_norm(x, weight) of each run of len(weight) columns, times silu(gate)."""

    def gate_norm(self, x: Any, weight: Any, gate: Any, eps: float) -> Any:
        """rms_norm(x * silu(gate)) of each of the state space's groups of columns, times weight.

        Where its `norm` is "before_gate", rms_norm(x) times weight, times silu(gate).
        """

    def gate_heads(self, h: Any, qkv: Any) -> Any:
        """Attention's result h times the sigmoid of each head's gate, which follows its queries."""

    def add_gated(self, x: Any, h: Any, y: Any, weight: Any) -> Any:
        """x + sigmoid(y . weight) * h of each row, all [rows, width], `weight` [width].

        It adds the expert that every row goes through (Qwen1.5-MoE, 2024).
        """

    def given_rows(self) -> Any:
        """The rows that the step brings along (`StepInputs.hidden`), [num_tokens, hidden_size]."""

    def join(self, left: Any, right: Any) -> Any:
        """Both side by side, [rows, widths together]."""


class NoRecurrence:
    """The operations of a backend that refuses models with recurrent layers."""

    def short_conv(self, bcx: Any, weight: Any, layer: int) -> Any:
        raise NotImplementedError

    def delta_rule(self, qkv: Any, gates: Any, weights: tuple[Any, Any, Any], layer: int) -> Any:
        raise NotImplementedError

    def state_space(
        self, xbc: Any, steps: Any, conv: tuple[Any, Any], weights: tuple[Any, Any, Any], layer: int
    ) -> Any:
        raise NotImplementedError

    def gated_norm(self, x: Any, weight: Any, gate: Any, eps: float) -> Any:
        raise NotImplementedError

    def gate_norm(self, x: Any, weight: Any, gate: Any, eps: float) -> Any:
        raise NotImplementedError

    def gate_heads(self, h: Any, qkv: Any) -> Any:
        raise NotImplementedError

    def add_gated(self, x: Any, h: Any, y: Any, weight: Any) -> Any:
        raise NotImplementedError

    def given_rows(self) -> Any:
        raise NotImplementedError

    def join(self, left: Any, right: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class SlotLayout:
    """Sizes of a slot, in numbers.

    Attributes:
        num_layers: recurrent layers of the model.
        taps, channels: of the convolution.
        log_rows: rows that a slot has room for beside the state.
        history_rows: of each layer.
        layer_floats: numbers of each layer.
        matrix_floats: the last ones of them, of the matrices.
        log_floats: those of a row of the log, before them.
    """

    num_layers: int
    taps: int
    channels: int
    log_rows: int
    history_rows: int
    layer_floats: int
    matrix_floats: int
    log_floats: int

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return 4 * self.num_layers * self.layer_floats


def slot_layout(blueprint: Blueprint, log_rows: int) -> SlotLayout:
    """The layout for a model with recurrent layers, whose slots have a log of `log_rows` rows."""
    recurrence = blueprint.recurrence
    assert recurrence is not None
    return SlotLayout(
        num_layers=len(blueprint.recurrent_layers),
        taps=recurrence.taps,
        channels=recurrence.channels,
        log_rows=log_rows,
        history_rows=recurrence.history_rows(log_rows),
        layer_floats=recurrence.state_floats(log_rows),
        matrix_floats=recurrence.matrix_floats,
        log_floats=recurrence.log_floats,
    )


def refuse_unlike_layers(checkpoint: Checkpoint, blueprint: Blueprint, backend: str) -> None:
    """Raise `UnsupportedModelError` for a model with recurrent layers, or with different heads."""
    if blueprint.recurrent_layers or blueprint.unlike_layers:
        what = "recurrent layers" if blueprint.recurrent_layers else "layers with different heads"
        raise UnsupportedModelError(
            f"{checkpoint.path.name} has {what}, which the {backend} backend does not compute.",
            "Use --backend cpu.",
        )
