"""A model's first step without memory: it only records which kernels are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from twinphase.backends.base import Forward
from twinphase.backends.cpu.formats import FORMATS
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.operations import RopeTables
from twinphase.backends.cpu.weights import (
    Embedding,
    Matrix,
    Vector,
    check_type,
    load_vector,
    place,
)
from twinphase.backends.group import Group, shared_file
from twinphase.backends.rope_tables import query_scales, rope_tables
from twinphase.blueprint import Blueprint, Rope
from twinphase.weights.checkpoint import Checkpoint


class RecordedKernels(dict[str, int]):
    """The specs that a program asks for, at addresses that are never called."""

    def __init__(self, specs: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(specs, 0))

    def __missing__(self, spec: str) -> int:
        return self.setdefault(spec, 0)


class DryLoader:
    """A model's weights by type and shape; only vectors are read, which are small.

    Attributes:
        packs: specs of the kernels that pack the weights.
    """

    def __init__(self, isa: Isa) -> None:
        self.packs: set[str] = set()
        self._isa = isa

    def prepare(
        self, checkpoint: Checkpoint, blueprint: Blueprint, forward_on: Callable[..., Forward]
    ) -> None:
        """Nothing is compiled."""

    def matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Matrix:
        matrix, _ = place(checkpoint, names, lambda nbytes: np.empty(0, np.uint8), self._isa)
        self.packs |= {
            f"{'pack_tiles' if part.tiled else 'pack'}:{part.type}"
            for part in matrix.parts
            if part.type in FORMATS
        }
        return matrix

    def exact_matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Matrix:
        return place(
            checkpoint, names, lambda nbytes: np.empty(0, np.uint8), self._isa, exact=True
        )[0]

    experts = matrix

    def vector(self, checkpoint: Checkpoint, names: Sequence[str], plus: float = 0.0) -> Vector:
        return load_vector(checkpoint, names, plus)

    def embedding(self, checkpoint: Checkpoint, name: str) -> Embedding:
        info = checkpoint.tensors[name]
        check_type(info.type)
        return Embedding(info.type, 0, 0, info.shape[1])

    def rope(self, rope: Rope, max_positions: int) -> RopeTables:
        return RopeTables(rope, *rope_tables(rope, 1), query_scales(rope, 1))


@contextmanager
def private_group(group: Group | None, nbytes: int) -> Iterator[Group | None]:
    """A group of the same size with memory of its own; None for no group."""
    if group is None:
        yield None
        return
    descriptor = shared_file(nbytes)
    try:
        yield Group(group.rank, group.ranks, descriptor, group.meeting_place)
    finally:
        os.close(descriptor)
