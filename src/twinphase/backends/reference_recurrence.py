"""The operations of recurrent layers on the reference backend, as the papers write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import StepInputs
from twinphase.backends.reference_math import changed_state, unit_rows
from twinphase.blueprint import Blueprint, DeltaNet, Mamba2

F32 = NDArray[np.float32]


class ReferenceRecurrence:
    """What `ReferenceBackend` computes of the protocol `RecurrentOperations`.

    Attributes:
        histories, matrices, logs: of each recurrent layer and slot.
    """

    blueprint: Blueprint
    inputs: StepInputs
    histories: F32
    matrices: F32
    logs: F32

    if TYPE_CHECKING:

        def rms_norm(self, x: F32, weight: F32, eps: float) -> F32: ...

    def short_conv(self, bcx: F32, weight: F32, layer: int) -> F32:
        """C * conv(B * x)."""
        b, c, x = np.split(bcx, 3, axis=1)
        return c * self._convolve(b * x, weight, layer)

    def delta_rule(self, qkv: F32, gates: F32, weights: tuple[F32, F32, F32], layer: int) -> F32:
        """Row by row, as the recurrence is written down."""
        delta = self.blueprint.recurrence
        assert isinstance(delta, DeltaNet)
        conv, decay, bias = weights
        x = _silu(self._convolve(qkv, conv, layer))
        q, k, v = np.split(x, [delta.num_keys, 2 * delta.num_keys], axis=1)
        q, k = (unit_rows(part.reshape(len(x), -1, delta.key_dim)) for part in (q, k))
        heads = np.arange(delta.value_heads)
        heads = (
            heads % delta.key_heads
            if delta.tiled
            else heads // (delta.value_heads // delta.key_heads)
        )
        q = q[:, heads] * np.float32(delta.key_dim**-0.5)
        k = k[:, heads]
        v = v.reshape(len(x), delta.value_heads, delta.value_dim)
        alpha, beta = np.split(gates, 2, axis=1)
        a = -np.exp(decay) if delta.log_decay else decay
        kept = np.exp(a * np.logaddexp(np.float32(0), alpha + bias))
        opened = 1 / (1 + np.exp(-beta))
        rows = [part.astype(np.float32) for part in (q, k, v, kept, opened)]
        return self._recur(rows, layer)

    def state_space(
        self, xbc: F32, steps: F32, conv: tuple[F32, F32], weights: tuple[F32, F32, F32], layer: int
    ) -> F32:
        """Row by row, as the recurrence is written down."""
        space = self.blueprint.recurrence
        assert isinstance(space, Mamba2)
        decay, bias, skip = weights
        x = _silu(self._convolve(xbc, conv[0], layer) + conv[1])
        first = space.num_values
        v, k, q = np.split(x, [first, first + space.num_keys], axis=1)
        groups = np.arange(space.value_heads) // (space.value_heads // space.key_heads)
        q, k = (part.reshape(len(x), -1, space.key_dim)[:, groups] for part in (q, k))
        v = v.reshape(len(x), space.value_heads, space.value_dim)
        a = -np.exp(decay) if space.log_decay else decay
        rate = np.logaddexp(np.float32(0), steps + bias)
        rows = [part.astype(np.float32) for part in (q, k, v, np.exp(a * rate), rate)]
        out: F32 = self._recur(rows, layer) + (skip[:, None] * v).reshape(len(x), -1)
        return out

    def _recur(self, rows: Sequence[F32], layer: int) -> F32:
        """The recurrence over each sequence, for queries, keys, values, decays and rates.

        A rate is the beta of a delta rule, or the step of a state space, which forgets nothing of
        what is there already.
        """
        inputs = self.inputs
        assert inputs.states is not None
        q, k, v, kept, rate = rows
        corrects = isinstance(self.blueprint.recurrence, DeltaNet)
        out = np.empty_like(v)
        snapshots = dict(inputs.snapshots.tolist())
        size = k.shape[2]
        for i, (source, target, pending, final) in enumerate(inputs.states.tolist()):
            state = self.matrices[layer, source].copy()
            for logged in self.logs[layer, source, :pending]:
                state = changed_state(state, logged[:, :size], logged[:, size:-1], logged[:, -1])
            log_at = 0 if final else pending
            first = int(inputs.query_start[i])
            for row in range(first, int(inputs.query_start[i + 1])):
                change = v[row]
                if corrects:
                    seen = np.einsum("hij,hi->hj", state, k[row])
                    change = change - seen * kept[row][:, None]
                change = rate[row][:, None] * change
                state = changed_state(state, k[row], change, kept[row])
                out[row] = np.einsum("hij,hi->hj", state, q[row])
                if row in snapshots:
                    self.matrices[layer, snapshots[row]] = state
                number = row - first - final
                if number == -1:
                    self.matrices[layer, target] = state
                elif number >= 0:
                    parts = [k[row], change, kept[row][:, None]]
                    self.logs[layer, target, log_at + number] = np.concatenate(parts, axis=1)
        return out.reshape(len(out), -1)

    def gated_norm(self, x: F32, weight: F32, gate: F32, eps: float) -> F32:
        """rms_norm of each head, then the gate."""
        normed = self.rms_norm(x.reshape(len(x), -1, len(weight)), weight, eps)
        out: F32 = normed.reshape(x.shape) * gate / (1 + np.exp(-gate))
        return out

    def gate_heads(self, h: F32, qkv: F32) -> F32:
        """h * sigmoid(gate)."""
        b = self.blueprint
        both = qkv[:, : 2 * b.num_heads * b.head_dim].reshape(len(h), b.num_heads, 2, b.head_dim)
        out: F32 = h / (1 + np.exp(-both[:, :, 1].reshape(h.shape)))
        return out

    def _convolve(self, x: F32, weight: F32, layer: int) -> F32:
        """Each sequence's rows of x [num_tokens, channels] after those in its state."""
        inputs = self.inputs
        assert inputs.states is not None
        taps = weight.shape[1]
        out = np.zeros_like(x)
        histories = self.histories[layer]
        for i, (source, target, pending, final) in enumerate(inputs.states.tolist()):
            rows = slice(inputs.query_start[i], inputs.query_start[i + 1])
            known = np.concatenate([histories[source, pending : pending + taps - 1], x[rows]])
            for tap in range(taps):
                out[rows] += known[tap : tap + len(known) - taps + 1] * weight[:, tap]
            log_at = 0 if final else pending
            histories[target, log_at : log_at + len(known) - final] = known[final:]
            for row, slot in inputs.snapshots.tolist():
                if rows.start <= row < rows.stop:
                    kept = row + 1 - rows.start
                    histories[slot, : taps - 1] = known[kept : kept + taps - 1]
        return out

    def gate_norm(self, x: F32, weight: F32, gate: F32, eps: float) -> F32:
        """The gate, then rms_norm of each group; or the other way round."""
        space = self.blueprint.whole.recurrence
        assert isinstance(space, Mamba2)
        first = space.norm == "after_gate"
        parts = (x * _silu(gate) if first else x).reshape(len(x), space.key_heads, -1)
        normed = self.rms_norm(parts, np.ones((), np.float32), eps).reshape(x.shape) * weight
        return normed if first else normed * _silu(gate)

    def add_gated(self, x: F32, h: F32, y: F32, weight: F32) -> F32:
        """x + sigmoid(y . weight) * h."""
        out: F32 = x + h / (1 + np.exp(-(y @ weight.reshape(-1, 1))))
        return out

    def given_rows(self) -> F32:
        """The step's own rows."""
        assert self.inputs.hidden is not None
        return self.inputs.hidden

    def join(self, left: F32, right: F32) -> F32:
        """Place both side by side."""
        return np.concatenate([left, right], axis=1)


def _silu(x: F32) -> F32:
    out: F32 = x / (1 + np.exp(-x))
    return out
