"""The torch backend with Triton kernels, and with weights that stay quantized on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinphase.backends.base import StepInputs
from twinphase.backends.torch.backend import ALIGNMENT_INT64S, RopeTables, TorchBackend
from twinphase.backends.torch.device import bind
from twinphase.backends.torch.kernels import elementwise, rope, tiles
from twinphase.backends.torch.kernels.attention import Shape, Tiles, attention, rows_of_tile
from twinphase.backends.torch.kernels.experts import Routed, combine, route
from twinphase.backends.torch.kernels.linear import linear
from twinphase.backends.torch.tune import tune
from twinphase.backends.torch.weights import Matrix, Packed, pack
from twinphase.blueprint import Experts, Span
from twinphase.weights.checkpoint import Checkpoint


class KernelBackend(TorchBackend):
    """Computes the same as `TorchBackend`, which is its oracle."""

    kernels = "triton"

    def __init__(
        self,
        device: str | None = None,
        dtype: str = "auto",
        enforce_eager: bool = False,
        dequantize: bool = False,
    ) -> None:
        super().__init__(device, dtype, enforce_eager=enforce_eager)
        self.dequantize = dequantize
        major, minor = (
            torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)
        )
        self.capability = 10 * major + minor
        self.matrices: list[Matrix] = []
        if self.device.type == "cuda":
            self._use(tiles.read_tuned(torch.cuda.get_device_name(self.device)))

    def _use(self, tuned: dict[str, tiles.Tile]) -> None:
        """Sets the tiles of kernels, which choose the unit that multiplies and so its rounding."""
        tiles.tuned = tuned
        self.kernels = (
            f"triton {hashlib.sha256(repr(sorted(tuned.items())).encode()).hexdigest()[:12]}"
        )

    def tune(self, progress: Callable[[int, int], None]) -> Path:
        """Time the candidates for every shape of the loaded weights, and store the fastest tiles.

        Returns the file.

        Raises:
            OSError: it cannot be written.
        """
        bind(self.device)
        name = torch.cuda.get_device_name()
        path = tiles.keep_tuned(name, tune(self.matrices, self.dtype, self.capability, progress))
        self._use(tiles.read_tuned(name))
        return path

    # Weights.
    def matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Matrix:
        """The matrices, those of one format as one."""
        if self._embedding is not None and list(names) == [self._embedding[0]]:
            table: Matrix = self._embedding[1]
            return table
        with self._weight_memory(checkpoint):
            self.matrices.append(Matrix([self._packed(checkpoint, name) for name in names]))
        return self.matrices[-1]

    experts = matrix

    def embedding(self, checkpoint: Checkpoint, name: str) -> Matrix:
        """The table, quantized as it is stored."""
        with self._weight_memory(checkpoint):
            table = Matrix([self._packed(checkpoint, name)])
        self._embedding = name, table
        return table

    def _packed(self, checkpoint: Checkpoint, name: str) -> Packed:
        info = checkpoint.tensors[name]
        packed = pack(checkpoint.raw(name), info.shape, info.type, self.dtype, self.device)
        return packed.dequantized() if self.dequantize and packed.bits else packed

    # One step.
    def _arrays(self, inputs: StepInputs) -> dict[str, NDArray[np.signedinteger]]:
        """Add to `TorchBackend`'s arrays the rows that each program of attention has."""
        arrays = super()._arrays(inputs)
        count = inputs.num_decodes
        # Whether it is decode, name and number of tiles, their rows, the longest context.
        self.phases: list[tuple[bool, str, int, int, int]] = []
        for decode, sequences in (
            (True, range(count)),
            (False, range(count, len(inputs.context_lens))),
        ):
            if sequences:
                name = f"tiles {decode}"
                longest = int(inputs.context_lens[sequences.start : sequences.stop].max())
                rows, table = self._tiles(inputs, sequences, decode)
                arrays[name] = np.pad(table, ((0, 0), (0, -table.shape[1] % ALIGNMENT_INT64S)))
                self.phases.append(
                    (decode, name, table.shape[1], rows, self._captured_context or longest)
                )
        return arrays

    def _tiles(
        self, inputs: StepInputs, sequences: range, decode: bool
    ) -> tuple[int, NDArray[np.int64]]:
        """Rows times heads of a program; and sequence, first and end row of each, [3, programs]."""
        b = self.blueprint
        rows = rows_of_tile(b.group, b.head_dim, decode, self.capability)
        step = rows // b.group
        programs = []
        for sequence in sequences:
            start, end = inputs.query_start[sequence : sequence + 2].tolist()
            programs += [
                (sequence, first, min(first + step, end)) for first in range(start, end, step)
            ]
        return rows, np.array(programs, np.int64).T

    def embed(self, table: Matrix, scale: float = 1.0) -> Tensor:
        return table.parts[0][self.step["token_ids"]].values().float() * scale

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps, self.dtype)

    def add_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, scale: float = 1.0, **more: None
    ) -> Tensor:
        return elementwise.rms_norm(h, weight, eps, self.dtype, x, scale)

    def linear(
        self,
        x: Tensor,
        weight: Matrix,
        *,
        residual: Tensor | None = None,
        first: int = 0,
        bias: Tensor | None = None,
        routed: Routed | None = None,
    ) -> Tensor:
        """Multiply as `TorchBackend` does, but add in float32 before rounding.

        With `routed`, the weights are of experts, and the result has a row for each pair.
        """
        x = x.to(self.dtype)
        parts = weight.parts
        if residual is not None and self.blueprint.share is not None:
            residual = residual[:, first : first + self.blueprint.share.hidden.size].contiguous()
        if len(parts) == 1:
            return linear(x, parts[0], bias, residual, self.capability, routed=routed)
        sizes = [part.codes.shape[-2] for part in parts]
        biases, residuals = (
            [None] * len(parts)
            if term is None
            else [own.contiguous() for own in torch.split(term, sizes, -1)]
            for term in (bias, residual)
        )
        each = zip(parts, biases, residuals, strict=True)
        return torch.cat([linear(x, *part, self.capability, routed=routed) for part in each], -1)

    def rope_kv_write(
        self,
        qkv: Tensor,
        rope_tables: RopeTables | None,
        layer: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        """Normalize, rotate and write in one pass; norms over the whole width take one more."""
        b = self.blueprint
        norms = None
        if q_norm is not None and k_norm is not None:
            norms = q_norm, k_norm
            if len(q_norm) != b.head_dim:
                kv_width = b.num_kv_heads * b.head_dim
                q, k, v = torch.split(qkv, [b.num_heads * b.head_dim, kv_width, kv_width], 1)
                q, k = map(self._norm_columns, (q, k), norms, b.norm_spans)
                qkv = torch.cat([q, k, v.float()], 1)
                norms = None
        keys, values = self.slots[layer]
        where = self.step["positions"], self.step["slot_mapping"], keys, values, b.num_heads
        return rope.rope_kv_write(qkv.contiguous(), rope_tables, norms, b.norm_eps, *where)

    def _norm_columns(self, x: Tensor, weight: Tensor, span: Span | None) -> Tensor:
        """RMSNorm over the whole width; a rank has the columns of `span`."""
        whole = self.gather(x, span)
        whole = elementwise.rms_norm(whole, weight, self.blueprint.norm_eps, torch.float32)
        return whole if span is None else whole[:, span.first : span.first + span.size]

    def attention(
        self, q: Tensor, layer: int, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend as `TorchBackend` does, with a kernel for decodes and one for prefills."""
        b = self.blueprint
        (keys, values) = self.slots[layer]
        out = torch.empty_like(q)
        sizes = b.num_heads, b.num_kv_heads, b.head_dim, self.kv_spec.block_size
        shape = Shape(*sizes, b.scale, b.attention_softcap or 0.0, window or 0)
        positions = self.step["positions"]
        tables = self.step["block_tables"]
        for decode, name, count, rows, longest in self.phases:
            of_sequence, first, end = self.step[name][:, :count]
            tiles = Tiles(of_sequence, first, end, rows, longest)
            attention(
                q,
                keys,
                values,
                out,
                shape=shape,
                sinks=sinks,
                positions=positions,
                tables=tables,
                tiles=tiles,
                decode=decode,
            )
        return out.flatten(1)

    def gate_mul(self, gate_up: Tensor, up: None = None, first: int = 0) -> Tensor:
        return elementwise.gate_mul(gate_up, self.blueprint.activation, self.dtype)

    def moe(
        self,
        x: Tensor,
        router: Matrix,
        gate_up: Matrix,
        down: Matrix,
        experts: Experts,
        **biases: Tensor | None,
    ) -> Tensor:
        """Multiply all experts in one product; the host does not learn which were chosen."""
        bias = biases.get
        routed = route(self.linear(x, router, bias=bias("router_bias")), experts, self.capability)
        h = self.gate_mul(self.linear(x, gate_up, bias=bias("gate_up_bias"), routed=routed))
        h = self.gather(h, self.blueprint.span("experts"))
        h = self.linear(h, down, bias=bias("down_bias"), routed=replace(routed, used=1))
        return combine(h, routed.weights)
