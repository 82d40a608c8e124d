"""Memory that kernels read and write: huge pages where the system has them, and aligned arrays."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import OutOfMemoryError

# An arena that arrays of less share; larger ones have an arena each.
ROOM_BYTES = 32 << 20
# Smaller arrays are not worth a huge page.
SMALL_BYTES = 4096


class Arena:
    """One block of memory, on huge pages where the system has them.

    Huge pages let kernels stream memory without a page-table miss every 4 KB.
    """

    def __init__(self, nbytes: int, purpose: str) -> None:
        """Reserve `nbytes`; pages are taken when they are first written.

        Raises:
            OutOfMemoryError: the system refuses; the message names the purpose.
        """
        page = 2 << 20
        # Private, because Linux gives shared anonymous memory (Python's default) no huge pages.
        private = (
            {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        )
        try:
            self._map = mmap.mmap(-1, -(-nbytes // page) * page + page, **private)
        except (OSError, OverflowError, ValueError) as error:
            raise OutOfMemoryError(
                f"No memory for the {purpose}: {nbytes / 1e9:.1f} GB.",
                "Lower --max-model-len, or use a smaller model.",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # A Linux kernel may be built without them.
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % page
        self._free: NDArray[np.uint8] = whole[start:]

    @property
    def free_bytes(self) -> int:
        """Bytes that have not been taken."""
        return self._free.size

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next `nbytes`, zeros, 64-byte aligned."""
        taken = self._free[:nbytes]
        self._free = self._free[-(-nbytes // 64) * 64 :]
        if len(taken) < nbytes:
            raise MemoryError("the arena is too small")
        return taken


class _Room:
    """Arrays of all programs, one after another in arenas.

    An arena is given back when the last of its arrays is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: Arena | None = None

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """That number of bytes, zeros, 64-byte aligned."""
        if nbytes >= ROOM_BYTES:
            return Arena(nbytes, "activations").take(nbytes)
        with self._lock:
            if self._arena is None or self._arena.free_bytes < nbytes:
                self._arena = Arena(ROOM_BYTES, "activations")
            return self._arena.take(nbytes)


_room = _Room()


def aligned(count: int, dtype: np.typing.DTypeLike) -> NDArray[np.generic]:
    """Zeros, [count] of `dtype`, at a 64-byte aligned address; large arrays are on huge pages.

    Raises:
        OutOfMemoryError: the system refuses.
    """
    nbytes = count * np.dtype(dtype).itemsize
    if nbytes >= SMALL_BYTES:
        return _room.take(nbytes).view(dtype)
    buffer = np.zeros(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype)
