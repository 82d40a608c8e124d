"""Arrays of kernels: aligned, zero, apart from each other, and given back."""

import gc
import mmap
import weakref

import numpy as np
import pytest

from twinphase.backends.cpu import memory
from twinphase.backends.cpu.memory import ROOM_BYTES, SMALL_BYTES, Arena, aligned
from twinphase.errors import OutOfMemoryError


@pytest.mark.parametrize("count", [1, 100, SMALL_BYTES // 4, ROOM_BYTES // 4 + 1])
def test_arrays_are_aligned_zeros(count):
    array = aligned(count, np.int32)
    assert array.shape == (count,)
    assert array.ctypes.data % 64 == 0
    assert not array.any()


def test_arrays_do_not_overlap():
    arrays = [aligned(5000 + 7 * i, np.uint8) for i in range(20)]
    for i, array in enumerate(arrays):
        array[:] = i + 1
    assert [set(array.tolist()) for array in arrays] == [{i + 1} for i in range(20)]


def test_an_arena_goes_with_the_last_of_its_arrays(monkeypatch):
    monkeypatch.setattr(memory, "_room", memory._Room())
    first, second = (aligned(ROOM_BYTES // 2, np.uint8) for _ in range(2))
    base = first
    while isinstance(base.base, np.ndarray):
        base = base.base
    pages = weakref.ref(base)
    del base, first
    aligned(ROOM_BYTES // 2, np.uint8)  # begins another arena
    gc.collect()
    assert pages() is not None
    del second
    gc.collect()
    assert pages() is None


def test_a_large_array_has_an_arena_of_its_own(monkeypatch):
    room = memory._Room()
    monkeypatch.setattr(memory, "_room", room)
    aligned(SMALL_BYTES, np.uint8)
    shared = room._arena
    aligned(ROOM_BYTES, np.uint8)
    assert room._arena is shared


def test_a_system_without_huge_pages_has_memory_all_the_same(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *args):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Refusing)
    assert not Arena(100, "weights").take(100).any()


def test_what_the_system_refuses_is_said():
    with pytest.raises(OutOfMemoryError, match="No memory for the activations"):
        aligned(1 << 60, np.uint8)
