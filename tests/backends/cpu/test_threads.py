"""The thread pool: every tile runs once, and its dependents wait for it, however late it is.

Kernels here are Python functions where order is looked at, and compiled ones where bits are.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kernel_calls import call_kernel, kernel, pack, random_blocks

from twinphase.backends.cpu.isa import ISAS, available_isas
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.program_layout import (
    CTL_EPOCH,
    EPOCH_MASK,
    HAS_FUTEX,
    STATE_IS_GUEST,
)
from twinphase.backends.cpu.threads import Command, ThreadPool
from twinphase.backends.cpu.tiling import scratch_bytes

BEST = available_isas()[0]
KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
ROWS = 64
INPUTS = 64
OUTPUTS = 96
SLEEPY = {"spins": 1, "idle_spins": 1}  # waiting threads go to sleep at once
per_count = pytest.mark.parametrize("threads", (1, 2, 3, 4))


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ThreadPool]]:
    pools: list[ThreadPool] = []

    def make(threads: int, **options: int) -> ThreadPool:
        pools.append(
            ThreadPool(
                kernel(BEST, "run_program"),
                threads,
                scratch_bytes(ISAS[BEST], "Q4_1", ROWS),
                **options,
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


class Log:
    """Commands whose kernels write down what ran; worker threads dawdle now and then."""

    def __init__(self, syncs: list[bool], dawdle: float = 0.0) -> None:
        self.tiles = aligned(len(syncs), np.int64)
        self.runs: list[tuple[int, int]] = []  # (command, tile) in the order of their ends
        self.early: list[
            tuple[int, int]
        ] = []  # tiles that began before what they depend on was done
        self._syncs = syncs
        self._dawdle = dawdle
        self._functions = [KERNEL(self._kernel(index)) for index in range(len(syncs))]

    @property
    def commands(self) -> list[Command]:
        """The program."""
        addresses = [
            ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions
        ]
        first = self.tiles.ctypes.data
        return [Command(a, first + 8 * i, self._syncs[i], ()) for i, a in enumerate(addresses)]

    def _kernel(self, index: int) -> Callable[..., int]:
        def run(place: int, again: int, args: int, tile: int, scratch: int) -> int:
            last_sync = max((i for i in range(index + 1) if self._syncs[i]), default=0)
            if Counter(command for command, _ in self.runs if command < last_sync) != Counter(
                {i: int(self.tiles[i]) for i in range(last_sync) if self.tiles[i]}
            ):
                self.early.append((index, tile))
            if self._dawdle and threading.current_thread() is not threading.main_thread():
                time.sleep(random.random() * self._dawdle)
            self.runs.append((index, tile))
            return 0

        return run

    def check(self) -> None:
        """Every tile ran once, none too early; starts the next step's log."""
        assert Counter(self.runs) == Counter(
            (i, t) for i, n in enumerate(self.tiles) for t in range(n)
        )
        assert not self.early
        self.runs.clear()


@per_count
@pytest.mark.parametrize(
    ("options", "dawdle", "steps"),
    (({}, 0, 200), (SLEEPY, 0, 200), (SLEEPY, 0.002, 60)),
    ids=("spinning", "sleeping", "waiting for slow threads"),
)
def test_every_tile_once_and_in_order(
    make_pool,
    threads,
    options,
    dawdle,
    steps,
):
    rng = np.random.default_rng(threads)
    log = Log([False, True, False, True, True, False], dawdle)
    pool = make_pool(threads, **options)
    pool.load(log.commands)
    for _ in range(steps):
        log.tiles[:] = rng.choice([0, 1, 2, 3, 7, 20] if not dawdle else range(6), len(log.tiles))
        pool.run()
        log.check()


class Chain:
    """quantize, linear, quantize, linear: each reads the result of the one before."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        # Rows, strips a tile takes, tiles of quantize and of linear, rows a tile takes.
        self.counts = aligned(5, np.int64)
        self.x = aligned(ROWS * INPUTS, np.float32).reshape(ROWS, INPUTS)
        self.x[:] = rng.standard_normal(self.x.shape)
        self.middle, self.end = (
            aligned(ROWS * OUTPUTS, np.float32).reshape(ROWS, OUTPUTS) for _ in range(2)
        )
        self.keep: list[object] = []
        self.calls: list[
            tuple[int, list[int], int]
        ] = []  # kernel, arguments, address of the number of tiles
        for source, out in ((self.x, self.middle), (self.middle, self.end)):
            self._layer(rng, source, out)

    def _layer(self, rng: np.random.Generator, source: np.ndarray, out: np.ndarray) -> None:
        inputs = source.shape[1]
        rows = self.counts.ctypes.data
        groups = inputs // 32
        weights = pack(BEST, "Q4_1", random_blocks(rng, OUTPUTS, inputs, "Q4_1"), inputs)
        data = aligned(ROWS * inputs, np.int8)
        zeros = aligned(OUTPUTS, np.float32)
        scale, fsum, isum = (
            aligned(ROWS * groups * 2, kind) for kind in (np.float32, np.float32, np.int32)
        )
        self.keep += [weights, data, scale, fsum, isum, zeros]
        at = [array.ctypes.data for array in (data, scale, fsum, isum)]
        self.calls.append(
            (
                kernel(BEST, "quantize"),
                [rows, source.ctypes.data, 4 * inputs, groups, *at],
                rows + 16,
            )
        )
        args = [weights.ctypes.data, groups, at[0], inputs, *at[1:3], 4 * groups, at[3]]
        args += [out.ctypes.data, out.strides[0], zeros.ctypes.data, 0]
        args += [OUTPUTS // 32, rows, rows + 8, rows + 32]
        self.calls.append((kernel(BEST, "quantized_linear:Q4_1"), args, rows + 24))

    def load(self, pool: ThreadPool) -> None:
        """Load the calls as the pool's program; the expected result is computed first, in order."""
        self._set_rows(ROWS, 1)
        for fn, args, tiles in self.calls:
            call_kernel(fn, args, int(self.counts[(tiles - self.counts.ctypes.data) // 8]))
        self.expected = self.end.copy()
        self.pool = pool
        pool.load([Command(fn, tiles, True, args) for fn, args, tiles in self.calls])

    def _set_rows(self, rows: int, per_tile: int) -> None:
        """Set the next step's counts, and first overwrite the output."""
        self.counts[:] = (
            rows,
            per_tile,
            -(-rows // 4),
            -(-OUTPUTS // 32 // per_tile) if rows else 0,
            ROWS,
        )
        self.middle[:] = self.end[:] = np.nan

    def step(self, rows: int, per_tile: int = 1) -> None:
        """A step gives the rows it should, and no others."""
        self._set_rows(rows, per_tile)
        self.pool.run()
        np.testing.assert_array_equal(self.end[:rows], self.expected[:rows])
        assert np.isnan(self.end[rows:]).all()


@per_count
@pytest.mark.parametrize("options", ({}, SLEEPY), ids=("spinning", "sleeping"))
def test_many_tiny_steps(make_pool, threads, options):
    chain = Chain(0)
    rng = np.random.default_rng(1)
    chain.load(make_pool(threads, **options))
    for _ in range(1500):
        chain.step(int(rng.integers(0, 9)), int(rng.integers(1, 4)))


def test_the_epoch_wraps(make_pool):
    # Days of steps: the epoch must not run into the sign bit of a claim word, where nothing could
    # be claimed.
    chain = Chain(3)
    chain.load(make_pool(2))
    chain.pool._set(CTL_EPOCH, EPOCH_MASK - 5)
    for _ in range(20):
        chain.step(ROWS)


def test_with_a_busy_competitor(make_pool):
    # More threads than cores, and one that never rests: the pool's are put aside in the middle of
    # steps.
    chain = Chain(2)
    stop = threading.Event()
    chain.load(make_pool(4))
    competitor = threading.Thread(
        target=lambda: [sum(range(50_000)) for _ in iter(stop.is_set, True)]
    )
    competitor.start()
    try:
        for step in range(300):
            chain.step(1 + step % ROWS)
    finally:
        stop.set()
        competitor.join()


@pytest.mark.skipif(not HAS_FUTEX, reason="lends processors on Linux only")
def test_a_thread_put_aside_inside_a_tile_gets_the_processor_of_one_that_waits(make_pool):
    """A sleeping thread looks alike; the threads' affinity must not change."""
    pool = make_pool(2, **SLEEPY)
    began = threading.Event()
    guests = []
    allowed = os.sched_getaffinity(0)

    def run(result, place, args, tile, scratch):
        if tile == 0:
            return 0 if began.wait(10) else 1
        began.set()
        time.sleep(0.05)
        flags = pool._states.view(np.int64).reshape(2, -1)[:, STATE_IS_GUEST // 8]
        guests.append((flags.tolist(), os.sched_getaffinity(0)))
        return 0

    kernel = KERNEL(run)
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    tiles = np.array([2], np.int64)
    pool.load([Command(address, tiles.ctypes.data, False, [])])
    pool.run()
    assert guests in ([([0, 1], allowed)], [([1, 0], allowed)])
    assert os.sched_getaffinity(0) == allowed


def test_two_pools_at_once(make_pool):
    chains = [Chain(3), Chain(4)]
    for chain in chains:
        chain.load(make_pool(3))
    with ThreadPoolExecutor() as callers:
        for work in [
            callers.submit(lambda c=chain: [c.step(1 + n % 16) for n in range(300)])
            for chain in chains
        ]:
            work.result()


@pytest.mark.parametrize("steps", (0, 1, 5))
@pytest.mark.parametrize("closed", (True, False), ids=("closed", "forgotten"))
def test_a_pool_ends_its_threads(steps, closed):
    before = set(threading.enumerate())
    pool = ThreadPool(kernel(BEST, "run_program"), 3, 64)
    log = Log([True])
    pool.load(log.commands)
    assert len(set(threading.enumerate()) - before) == 2
    log.tiles[0] = 3
    for _ in range(steps):
        pool.run()
        log.check()
    if closed:
        pool.close()
        assert set(threading.enumerate()) <= before
        pool.close()  # again, without harm
    del pool
    assert set(threading.enumerate()) <= before


def test_a_pool_runs_one_program(make_pool):
    pool = make_pool(2)
    log = Log([False])
    pool.load(log.commands)
    with pytest.raises(RuntimeError, match="one program"):
        pool.load(log.commands)
