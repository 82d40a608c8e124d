"""The ranks of one model on one machine: memory that they share, and where they meet in it.

Not for what they say to each other between steps, nor for who starts them
(`engine/ranks/ranks.py`).
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinphase.blueprint import Blueprint
from twinphase.errors import InvalidRequestError

# Each word that other ranks poll has a cache line of its own.
WORD_BYTES = 64
PAGE = 4096
SPINS_BEFORE_SLEEP = 200
SLEEP_SECONDS = 50e-6


def shared_bytes(blueprint: Blueprint, rows: int) -> int:
    """Upper bound of what ranks share, for steps of `rows` rows; pages are taken when written."""
    b = blueprint
    layers = range(b.num_layers)
    width = b.hidden_size + b.num_heads * sum({b.kv_shape(i).head_dim for i in layers})
    width += sum({b.ffn_width(i) for i in layers})
    width += b.experts.ffn_size * b.experts.used if b.experts else 0
    width += b.recurrence.channels if b.recurrence else 0
    return 4 * (rows + 8) * (8 * (width + 256) + 2 * (b.vocab_size + 256)) + (1 << 20)


def shared_file(nbytes: int) -> int:
    """Descriptor of memory without a name; its pages are taken when they are written.

    Raises:
        InvalidRequestError: the system has no such memory.
    """
    if not hasattr(os, "memfd_create"):
        raise InvalidRequestError(
            "tensor_parallel_size needs Linux.", "Leave --tensor-parallel-size out."
        )
    descriptor = os.memfd_create("twinphase-ranks")
    os.truncate(descriptor, -(-nbytes // PAGE) * PAGE)
    return descriptor


class Group:
    """One rank's view of the memory. All ranks take the same arrays in the same order.

    The first word is not 0 once a step has to end; the next count how often each rank has come to a
    meeting, and the words behind those the nanoseconds that it has waited there.
    """

    def __init__(self, rank: int, ranks: int, descriptor: int, meeting_place: Path) -> None:
        """Map the file of `descriptor`, zeros at first; libraries may meet at the path."""
        self.rank = rank
        self.ranks = ranks
        self.meeting_place = meeting_place
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)  # shared is mmap's default
        self._memory = np.frombuffer(self._map, np.uint8)
        self._taken = PAGE
        lines = self._memory[: (1 + ranks) * WORD_BYTES].view(np.int64).reshape(-1, WORD_BYTES // 8)
        self._words = lines[:, 0]
        self._waits = lines[1:, 1]

    @property
    def address(self) -> int:
        """Address of the words, WORD_BYTES apart."""
        return self._memory.ctypes.data

    @property
    def is_over(self) -> bool:
        """Whether a rank is missing, so that what was computed since means nothing."""
        return bool(self._words[0])

    def end(self) -> None:
        """End every wait, now and later."""
        self._words[0] = 1

    def meetings(self) -> list[int]:
        """How often each rank has come."""
        return [int(word) for word in self._words[1:]]

    def waits(self) -> list[float]:
        """Seconds that each rank has waited for others, so far."""
        return [float(word) * 1e-9 for word in self._waits]

    def take(self, nbytes: int | None = None) -> NDArray[np.uint8]:
        """The next `nbytes`, or all the rest, zeros, 64-byte aligned."""
        nbytes = len(self._memory) - self._taken if nbytes is None else nbytes
        taken = self._memory[self._taken : self._taken + nbytes]
        self._taken += -(-nbytes // WORD_BYTES) * WORD_BYTES
        if len(taken) < nbytes:
            raise MemoryError("the ranks' shared memory is too small")
        return taken

    def meet(self) -> None:
        """Wait until all ranks have come, or it is over."""
        mine = self._words[1 + self.rank] + 1
        self._words[1 + self.rank] = mine
        looks = 0
        start = time.perf_counter_ns()
        while not self.is_over and (self._words[1:] < mine).any():
            looks += 1
            if looks > SPINS_BEFORE_SLEEP:
                time.sleep(SLEEP_SECONDS)
        if looks:
            self._waits[self.rank] += time.perf_counter_ns() - start
