"""A model's weights in memory: packed matrices in one huge-page arena, and what packs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu.formats import BY_OUTPUTS, FORMATS, GROUP_INPUTS, STRIP_OUTPUTS
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.threads import Command
from twinphase.backends.cpu.tiling import DENSE_TILE_INPUTS
from twinphase.errors import UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint, TensorInfo
from twinphase.weights.quant import dequantize

GATE_AND_UP = (["ffn_gate", "ffn_up"], ["ffn_gate_shexp", "ffn_up_shexp"])
EXACT = ("ssm_alpha.weight", "ssm_beta.weight")
DENSE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def padded(count: int, multiple: int = STRIP_OUTPUTS) -> int:
    """`count` rounded up."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class Part:
    """Strips of one type; `column` is where its outputs start in the layer's result."""

    type: str
    address: int
    strips: int
    groups: int  # of 32 inputs, or single inputs in a dense part
    column: int
    strip_bytes: int
    tiled: bool = False  # in the order of bfloat16 matrix tiles, which take such rows

    @property
    def nbytes(self) -> int:
        """Bytes from one expert's part to the next expert's."""
        return self.strips * self.strip_bytes


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weights, or those of the same layer of every expert, one after another.

    Attributes:
        parts: runs of strips, of the first expert where there are several.
        columns: first output column of each named tensor.
        sizes: outputs of each named tensor.
        width: columns of the result, padding included.
        paired: whether strips of gate and up take turns, for `Operations.gated_linear` alone.
    """

    parts: tuple[Part, ...]
    columns: tuple[int, ...]
    sizes: tuple[int, ...]
    width: int
    paired: bool = False


@dataclass(frozen=True)
class Vector:
    """Float32 values, a row or one per expert; each tensor is padded to a multiple of 32."""

    values: NDArray[np.float32]
    width: int

    @property
    def stride(self) -> int:
        """Bytes between rows."""
        return self.values.strides[0]


@dataclass(frozen=True)
class Embedding:
    """The token embedding, as stored in the mapped file."""

    type: str
    address: int
    row_bytes: int
    width: int


def check_type(name: str) -> None:
    """Raises UnsupportedModelError for a tensor type without a kernel."""
    known = (*FORMATS, *DENSE_BYTES)
    if name not in known:
        raise UnsupportedModelError(
            f"The cpu backend does not compute with {name} tensors.",
            f"Use --backend reference, or a file with {', '.join(known)} tensors.",
        )


def _strip_bytes(info: TensorInfo, tiled: bool) -> int:
    inputs = info.shape[-1]
    if info.type in FORMATS:
        return (BY_OUTPUTS if tiled else FORMATS)[info.type].strip_bytes(inputs)
    return (
        STRIP_OUTPUTS
        * (padded(inputs, DENSE_TILE_INPUTS) if tiled else inputs)
        * DENSE_BYTES[info.type]
    )


def _strips(info: TensorInfo) -> int:
    """Strips of a matrix, or of one expert's matrix."""
    return padded(info.shape[-2]) // STRIP_OUTPUTS


def _tiled(info: TensorInfo, isa: Isa) -> bool:
    """Whether a tensor is packed for matrix tiles in bfloat16, which experts are not."""
    return len(info.shape) == 2 and isa.takes_bf16(info.type)


def arena_bytes(checkpoint: Checkpoint, tied: bool, isa: Isa) -> int:
    """Memory for all matrices, the embedding included when it is also the output head."""
    total = 0
    mapped = ("per_layer_token_embd.weight", "" if tied else "token_embd.weight")
    for info in checkpoint.tensors.values():
        if info.name.endswith(".weight") and len(info.shape) >= 2 and info.name not in mapped:
            # An exact layer (`place`) takes float32.
            exact = replace(info, type="F32") if info.name.endswith(EXACT) else info
            total += (
                math.prod(info.shape[:-2]) * _strips(info) * _strip_bytes(exact, _tiled(exact, isa))
                + 64
            )
    return total


Pack = Callable[[str, Sequence[int], int], Command]  # (kernel, arguments, strips)


@dataclass(frozen=True)
class Fill:
    """A tensor and the memory for its strips, or for those of every expert.

    Attributes:
        memory: of its strips, or of both tensors' where they take turns.
        tiled: whether it is packed for matrix tiles in bfloat16.
        turn: which of the `turns` tensors this one is in their alternating strips.
    """

    checkpoint: Checkpoint
    info: TensorInfo
    memory: NDArray[np.uint8]
    tiled: bool
    turn: int = 0
    turns: int = 1

    def commands(self, pack: Pack) -> list[Command]:
        """Fill the memory of a dense tensor; the commands that fill that of a quantized one."""
        info = self.info
        count = math.prod(info.shape[:-2])
        (outputs, inputs) = info.shape[-2:]
        raws = np.split(self.checkpoint.raw(info.name), count)
        commands = []
        for raw, memory in zip(raws, np.split(self.memory, count), strict=True):
            strips = memory.reshape(_strips(info), self.turns, -1)[:, self.turn]
            if info.type != self.checkpoint.tensors[info.name].type:
                values = _floats(self.checkpoint, info.name)
                _pack_dense(values.reshape(-1).view(np.uint8), info, strips)
            elif info.type in FORMATS:
                row_bytes = len(raw) // outputs
                groups = inputs // GROUP_INPUTS
                args = [raw.ctypes.data, row_bytes, outputs, groups]
                args += [strips.ctypes.data, strips.strides[0]]
                order = "pack_tiles" if self.tiled else "pack"
                commands.append(pack(f"{order}:{info.type}", args, _strips(info)))
            elif self.tiled:
                _pack_tiles(raw, info, strips)
            else:
                _pack_dense(raw, info, strips)
        return commands


def place(
    checkpoint: Checkpoint,
    names: Sequence[str],
    take: Callable[[int], NDArray[np.uint8]],
    isa: Isa,
    exact: bool = False,
) -> tuple[Matrix, list[Fill]]:
    """Take memory for a layer's tensors, or for those of its experts, stacked along the outputs.

    An `exact` layer's weights become float32, and with them the rows that it takes.

    Raises:
        UnsupportedModelError: a tensor type without a kernel.
    """
    parts: list[Part] = []
    columns = []
    fills = []
    column = 0
    infos = [checkpoint.tensors[name] for name in names]
    paired = _paired(checkpoint, infos)
    turns = 2 if paired else 1
    for number, info in enumerate(infos):
        check_type(info.type)
        if exact:
            info = replace(info, type="F32")
        tiled = _tiled(info, isa)
        strips = _strips(info)
        strip_bytes = _strip_bytes(info, tiled)
        if number % turns == 0:
            memory = take(turns * math.prod(info.shape[:-2]) * strips * strip_bytes)
        fills.append(Fill(checkpoint, info, memory, tiled, number % turns, turns))
        part = Part(
            type=info.type,
            address=memory.ctypes.data,
            strips=turns * strips,
            groups=info.shape[-1] // (GROUP_INPUTS if info.type in FORMATS else 1),
            column=0 if paired else column,
            strip_bytes=strip_bytes,
            tiled=tiled,
        )
        parts = [part] if paired else _joined(parts, part)
        columns.append(column)
        column += padded(info.shape[-2])
    sizes = tuple(info.shape[-2] for info in infos)
    return Matrix(tuple(parts), tuple(columns), sizes, column, paired), fills


def _paired(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> bool:
    """Whether tensors are gate and up of a feed-forward layer, which can share tiles."""
    if [info.name.split(".")[-2] for info in infos] not in GATE_AND_UP:
        return False
    gate, up = infos
    biases = [f"{info.name.removesuffix('weight')}bias" for info in infos]
    biased = any(name in checkpoint.tensors for name in biases)
    return (gate.type, gate.shape) == (up.type, up.shape) and len(gate.shape) == 2 and not biased


def _joined(parts: list[Part], new: Part) -> list[Part]:
    """Parts with `new` added; adjacent strips of one type are one part."""
    last = parts[-1] if parts else None
    if last and last.type == new.type and last.address + last.nbytes == new.address:
        return [*parts[:-1], replace(last, strips=last.strips + new.strips)]
    return [*parts, new]


def _floats(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    info = checkpoint.tensors[name]
    return np.ascontiguousarray(dequantize(checkpoint.raw(name), info.shape, info.type))


def _pack_dense(raw: NDArray[np.uint8], info: TensorInfo, strips: NDArray[np.uint8]) -> None:
    outputs, inputs = info.shape[-2:]
    word = np.dtype(f"u{DENSE_BYTES[info.type]}")
    rows = raw.view(word).reshape(outputs, inputs)
    whole = strips.view(word).reshape(-1, inputs, STRIP_OUTPUTS)
    full = outputs // STRIP_OUTPUTS
    whole[:full] = (
        rows[: full * STRIP_OUTPUTS].reshape(full, STRIP_OUTPUTS, inputs).transpose(0, 2, 1)
    )
    if full < len(whole):
        whole[full, :, : outputs - full * STRIP_OUTPUTS] = rows[full * STRIP_OUTPUTS :].T


def _pack_tiles(raw: NDArray[np.uint8], info: TensorInfo, strips: NDArray[np.uint8]) -> None:
    """[strip][32 inputs][output][input], as tiles are loaded."""
    outputs, inputs = info.shape
    rows = raw.view(np.uint16).reshape(outputs, inputs)
    more = padded(outputs) - outputs, padded(inputs, DENSE_TILE_INPUTS) - inputs
    if any(more):
        rows = np.pad(rows, [(0, count) for count in more])
    parts = rows.reshape(len(strips), STRIP_OUTPUTS, -1, DENSE_TILE_INPUTS)
    tiles = parts.swapaxes(1, 2)
    strips.view(np.uint16).reshape(tiles.shape)[:] = tiles


def load_vector(checkpoint: Checkpoint, names: Sequence[str], plus: float) -> Vector:
    """The tensors side by side with `plus` added, each padded with zeros as stacked outputs are."""
    parts = []
    infos = [checkpoint.tensors[name] for name in names]
    for info in infos:
        width = info.shape[-1]
        values = dequantize(checkpoint.raw(info.name), info.shape, info.type) + np.float32(plus)
        part = np.zeros((*info.shape[:-1], padded(width)), np.float32)
        part[..., :width] = values
        parts.append(part)
    return Vector(np.concatenate(parts, axis=-1), sum(info.shape[-1] for info in infos))
