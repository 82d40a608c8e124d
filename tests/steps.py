"""Drives a backend by `StepInputs` alone: the test chooses the rows of each step.

Also gives tests a cache folder of their own that still finds the user's compiled kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from twinphase.backends.base import Backend, KVCacheSpec, StepInputs
from twinphase.backends.cpu.compiler import compile_kernels
from twinphase.backends.cpu.isa import ISAS, available_isas, choose_isa
from twinphase.models.loader import load_model, open_model
from twinphase.weights.storage import cache_root

# Read when tests are collected: fixtures of other tests move the cache while they run.
USER_CACHE = cache_root()


def isas_that_differ(*traits: str) -> list[str]:
    """Instruction-set paths of this processor that differ in a trait, the one that users get first.

    Of paths whose kernels have equal code but for traits that they do not look at, one is enough:
    `avx512-bf16` has the linear layers of `avx512-vnni`.
    """
    best, *others = available_isas()
    paths: dict[tuple[object, ...], str] = {}
    for name in (best, *reversed(others)):
        paths.setdefault(tuple(getattr(ISAS[name], trait) for trait in traits), name)
    return list(paths.values())


def on_each(isas: list[str]) -> pytest.MarkDecorator:
    """All but the path that users get are long proofs."""
    best, *others = isas
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in others]
    return pytest.mark.parametrize("isa", [best, *slow])


# Attention, and whole models: among these paths are all linear layers too.
ISAS_OF_ATTENTION = isas_that_differ(
    "lanes", "dot", "registers", "bf16_dot", "matrix_tiles", "bf16_weights"
)
ISAS_OF_LINEAR = isas_that_differ(
    "lanes", "dot", "registers", "converts_f16", "matrix_tiles", "bf16_weights"
)
per_isa = on_each(ISAS_OF_ATTENTION)


def differs_in_dot_alone(isa: str) -> bool:
    """Whether another path's kernels are equal but for their dot product, so that few cases do."""
    tried = isas_that_differ("lanes", "registers", "bf16_dot", "matrix_tiles", "bf16_weights")
    return isa in ISAS_OF_LINEAR and isa not in tried


@contextlib.contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Keeps the tests' files out of the user's cache, but reuses kernels and fetched models."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("kernels", "models"):
        with contextlib.suppress(OSError):
            (USER_CACHE / name).mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(USER_CACHE / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINPHASE_CACHE", str(folder))
        yield


def compile_together(isa: str, models: Iterable[Callable[[], object]]) -> None:
    """Compile at once the kernels that `models` need: one by one takes twice as long."""
    specs: set[str] = set()
    backend = "twinphase.backends.cpu.backend"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            f"{backend}.compile_kernels", lambda folder, isa, wanted, progress: specs.update(wanted)
        )
        patch.setattr(f"{backend}.load_kernels", Mock(side_effect=InterruptedError))
        for load in models:
            with pytest.raises(InterruptedError):
                load()
    compile_kernels(cache_root() / "kernels", choose_isa(isa), sorted(specs))


@dataclass(frozen=True)
class Piece:
    """The rows of one sequence in a step: token ids from `start`, and its block ids."""

    tokens: NDArray[np.int32]
    start: int
    blocks: NDArray[np.int32]


def step_inputs(
    pieces: Sequence[Piece], block_size: int = 16, logit_rows: Sequence[int] | None = None
) -> StepInputs:
    """Flatten pieces, decodes first, into a step that computes logits of `logit_rows` or all."""
    counts = [len(piece.tokens) for piece in pieces]
    positions = [
        np.arange(p.start, p.start + n, dtype=np.int32) for p, n in zip(pieces, counts, strict=True)
    ]
    slots = [
        p.blocks[at // block_size].astype(np.int64) * block_size + at % block_size
        for p, at in zip(pieces, positions, strict=True)
    ]
    tables = np.zeros((len(pieces), max(len(p.blocks) for p in pieces)), np.int32)
    for table, piece in zip(tables, pieces, strict=True):
        table[: len(piece.blocks)] = piece.blocks
    decodes = [len(piece.tokens) == 1 and piece.start > 0 for piece in pieces]
    return StepInputs(
        token_ids=np.concatenate([piece.tokens for piece in pieces]).astype(np.int32),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_start=np.cumsum([0, *counts], dtype=np.int32),
        block_tables=tables,
        num_decodes=decodes.index(False) if False in decodes else len(decodes),
        logit_rows=np.arange(sum(counts), dtype=np.int32)
        if logit_rows is None
        else np.array(logit_rows, np.int32),
    )


class SequenceStates:
    """Slots for the states of sequences, which are told apart by their first block.

    Every step's states are kept for a while, so that a piece may begin where any of them ended.
    """

    SLOTS = 1000

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], int] = {}
        self._next = 1

    def of(self, pieces: Sequence[Piece]) -> NDArray[np.int32]:
        """`StepInputs.states` without drafts."""
        rows = []
        before = dict(self._slots)
        for piece in pieces:
            sequence = int(piece.blocks[0])
            source = before[sequence, piece.start] if piece.start else 0
            target = self._next
            self._next = self._next % (self.SLOTS - 1) + 1
            self._slots[sequence, piece.start + len(piece.tokens)] = target
            rows.append((source, target, 0, len(piece.tokens)))
        return np.array(rows, np.int32)


class Steps:
    """A model on a backend, with a KV cache."""

    _states: SequenceStates | None = None  # where layers are recurrent

    def __init__(
        self, path: Path, backend: Backend, *, num_blocks: int = 64, block_size: int = 16
    ) -> None:
        self.backend = backend
        self.block_size = block_size
        self.model = load_model(open_model(path), backend)
        config = self.model.blueprint
        self.vocab_size = config.vocab_size
        spec = KVCacheSpec.of(config, num_blocks, block_size)
        if config.recurrent_layers:
            self._states = SequenceStates()
            spec = replace(spec, num_state_slots=SequenceStates.SLOTS)
        backend.allocate_kv_cache(spec)
        self.blocks = np.arange(num_blocks, dtype=np.int32)

    def run(
        self, pieces: Sequence[Piece], logit_rows: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """One step; a copy of its logits."""
        inputs = step_inputs(pieces, self.block_size, logit_rows)
        if self._states is not None:
            inputs = replace(inputs, states=self._states.of(pieces))
        return self.backend.execute(self.model.forward, inputs).copy()

    def chunked(
        self,
        tokens: NDArray[np.int32],
        sizes: Sequence[int],
        blocks: NDArray[np.int32] | None = None,
    ) -> NDArray[np.float32]:
        """Logits of every position of one sequence, prefilled in chunks of cyclic `sizes`."""
        blocks = self.blocks if blocks is None else blocks
        logits = []
        start = 0
        size = cycle(sizes)
        while start < len(tokens):
            chunk = tokens[start : start + next(size)]
            logits.append(self.run([Piece(chunk, start, blocks)]))
            start += len(chunk)
        return np.concatenate(logits)
