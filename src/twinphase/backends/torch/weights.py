"""Weights in device memory: codes of 4 or 8 bits with scales, or plain values.

A group's scale and minimum are float16 if products are in 16 bits, which rounds them no more than
the weights themselves; otherwise, and for MXFP4's powers of two beyond float16, they are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinphase.weights.block_formats import FORMATS
from twinphase.weights.quant import dequantize, unpack

# Inputs whose nibbles share 32 bytes: byte j has input j below and input 32 + j above.
PAIR = 64
# Values of MXFP4's codes, doubled.
FLOAT4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
DEQUANTIZED_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class Packed:
    """A matrix [outputs, inputs], or one for each expert in front.

    Attributes:
        codes: uint8 [..., outputs, padded / 2] with 4 bits, int8 [..., outputs, padded] with 8; the
            values with 0.
        scale, minimum: [..., outputs, padded / group]; weights are scale * (code - offset) +
            minimum.
        inputs: without padding, which is to a multiple of `PAIR` with scales of 0.
        float4: whether codes stand for `FLOAT4`.
    """

    codes: Tensor
    inputs: int
    dtype: torch.dtype
    scale: Tensor | None = None
    minimum: Tensor | None = None
    bits: int = 0
    group: int = 32
    offset: int = 0
    float4: bool = False

    @property
    def padded(self) -> int:
        return self.codes.shape[-1] * (2 if self.bits == 4 else 1)

    def __getitem__(self, index: int | slice | Tensor) -> Packed:
        """One expert, or some rows."""
        return replace(self, **{name: t[index] for name, t in self.tensors().items()})

    def tensors(self) -> dict[str, Any]:
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}

    def values(self) -> Tensor:
        """The weights in the element type, [..., outputs, inputs]."""
        if self.scale is None:
            return self.codes
        q = self.codes
        if self.bits == 4:
            pairs = q.view(*q.shape[:-1], -1, PAIR // 2)
            q = torch.cat([pairs & 15, pairs >> 4], -1).flatten(-2)
        if self.float4:  # as the kernel does it
            q = (((q & 8) << 4 | (q & 7) << 1).short() << 8).view(torch.float16).float() * 32768
        values = (q.float() - self.offset) * self.scale.float().repeat_interleave(self.group, -1)
        if self.minimum is not None:
            values = values + self.minimum.float().repeat_interleave(self.group, -1)
        return values[..., : self.inputs].to(self.dtype)

    def dequantized(self) -> Packed:
        """With the values that the kernels would unpack, in chunks to need little memory."""
        step = max(1, DEQUANTIZED_CHUNK_BYTES // self.codes[0].numel())
        values = torch.cat([self[i : i + step].values() for i in range(0, len(self.codes), step)])
        return Packed(values, self.inputs, self.dtype)


def pack(
    raw: NDArray[np.uint8],
    shape: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Packed:
    """A tensor as stored, of a type in `FORMATS`, on the device."""
    fmt = FORMATS[kind]
    inputs = shape[-1]
    if not fmt.quantized:
        values = torch.from_numpy(dequantize(raw, shape, kind)).to(device, dtype)
        return Packed(values, inputs, dtype)
    parts = unpack(raw, shape, kind)
    float4 = kind == "MXFP4"
    padded = -(-inputs // PAIR) * PAIR
    offset = fmt.offset
    bits = 4 if fmt.bits <= 4 or float4 else 8
    q: NDArray[Any] = parts.q
    if float4:
        codes_of = np.zeros(256, np.uint8)
        codes_of[FLOAT4.view(np.uint8)[::-1]] = np.arange(16, dtype=np.uint8)[::-1]
        q = codes_of[q.view(np.uint8)]
    elif bits == 8:
        q = (q.astype(np.int16) - offset).astype(np.int8)
        offset = 0
    q = np.pad(q, [(0, 0), (0, padded - inputs)])
    if bits == 4:
        halves = q.reshape(len(q), -1, 2, PAIR // 2)
        q = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(q), -1)
    narrow = dtype.itemsize == 2
    if float4 and narrow:
        with np.errstate(over="ignore"):
            narrow = bool((parts.scale.astype(np.float16) == parts.scale).all())

    def of_groups(values: NDArray[np.float32] | None) -> Tensor | None:
        if values is None:
            return None
        values = np.pad(values, [(0, 0), (0, padded // fmt.group_size - values.shape[1])])
        tensor = torch.from_numpy(values).to(device, torch.float16 if narrow else torch.float32)
        return tensor.reshape(*shape[:-1], -1)

    return Packed(
        codes=torch.from_numpy(q).to(device).reshape(*shape[:-1], -1),
        inputs=inputs,
        dtype=dtype,
        scale=of_groups(parts.scale),
        minimum=of_groups(parts.minimum),
        bits=bits,
        group=fmt.group_size,
        offset=offset,
        float4=float4,
    )


class Matrix:
    """Matrices joined along the outputs, one for each format; of all experts, or of one."""

    def __init__(self, parts: Sequence[Packed]) -> None:
        self.parts: list[Packed] = []
        for part in parts:
            if self.parts and _form(self.parts[-1]) == _form(part):
                self.parts[-1] = _joined(self.parts[-1], part)
            else:
                self.parts.append(part)

    def __getitem__(self, expert: int) -> Matrix:
        return Matrix([part[expert] for part in self.parts])


def _form(part: Packed) -> tuple[object, ...]:
    dtypes = {name: tensor.dtype for name, tensor in part.tensors().items()}
    return part.bits, part.group, part.offset, part.float4, dtypes


def _joined(left: Packed, right: Packed) -> Packed:
    others = right.tensors()
    joined: dict[str, Any] = {
        name: torch.cat([own, others[name]], -2) for name, own in left.tensors().items()
    }
    return replace(left, **joined)
