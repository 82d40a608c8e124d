from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from steps import on_each
from twinphase.backends.cpu import ceilings, peaks
from twinphase.backends.cpu.isa import ISAS, available_isas, choose_isa, compiler_environment
from twinphase.backends.cpu.peak_loops import peak_loop
from twinphase.backends.cpu.peaks import (
    MIB,
    WINDOW_CHUNKS,
    Ceiling,
    Crew,
    bandwidth_ceiling,
    best_window,
    settle,
)
from twinphase.errors import InvalidRequestError

# Compiled for one processor each, hence a process a path. Turns beyond OPERAND_STEPS come round to
# the first operands.
CHECK = """
import sys
import numpy as np
from twinphase.backends.cpu.isa import choose_isa
from twinphase.backends.cpu.peak_loops import OPERAND_STEPS, READ_TURN_BYTES
from twinphase.backends.cpu.peak_loops import clock_readings, peak_loop, read_loop

isa, rng, turns = choose_isa(sys.argv[1]), np.random.default_rng(0), OPERAND_STEPS + 3

def bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

for kind in ("int8", "float32", "bfloat16"):
    loop = peak_loop(kind, isa)
    if loop is None:
        assert kind == "bfloat16" and not isa.bf16_dot
        continue
    weights, inputs, out = loop.zeros()
    if kind == "int8":
        weights.view(np.uint8)[:] = rng.integers(0, 128, weights.view(np.uint8).shape)
        inputs.view(np.int8)[:] = rng.integers(-127, 128, inputs.view(np.int8).shape)
        w, x = weights.view(np.uint8).astype(np.int64), inputs.view(np.int8).astype(np.int64)
        got = out
    elif kind == "float32":
        weights.view(np.float32)[:] = rng.integers(-9, 10, weights.shape)
        inputs.view(np.float32)[:] = rng.integers(-9, 10, inputs.shape)
        w, x, got = weights.view(np.float32), inputs.view(np.float32), out.view(np.float32)
    else:
        w, x = weights.view(np.uint16), inputs.view(np.uint16)
        for operand in (w, x):
            operand[:] = rng.choice([0x3F80, 0xBF80, 0x4000, 0], operand.shape)
        w, x, got = bfloat16(w), bfloat16(x), out.view(np.float32)
    loop.run(weights, inputs, out, turns, clock_readings(1))
    order = np.arange(turns) % OPERAND_STEPS
    if kind != "float32" and isa.matrix_tiles:
        if kind == "int8":
            w = weights.view(np.int8).astype(np.int64)
        n = 4 if kind == "int8" else 2  # inputs side by side
        w = w.reshape(OPERAND_STEPS, 2, 32 // n, 16, n)[order]
        x = x.reshape(OPERAND_STEPS, 2, 16, 32 // n, n)[order]
        assert np.array_equal(got.reshape(2, 2, 16, 16), np.einsum("tcknj,trmkj->rcmn", w, x)), kind
        assert loop.operations == 2 * out.size * 32
        continue
    products = (w[order, None, :, :] * x[order, :, None, :]).sum(0)  # [rows, columns, numbers]
    want = products.reshape(*products.shape[:2], loop.lanes, -1).sum(-1)
    assert np.array_equal(got.astype(np.float64), want.astype(np.float64)), kind
    assert loop.operations == 2 * products.size

memory = rng.integers(0, 256, 8 * READ_TURN_BYTES, np.uint8)
words, read, readings = memory.view(np.int64).reshape(4, -1), read_loop(isa), clock_readings(2)
whole = np.bitwise_xor.reduce(words, axis=None)
assert read(memory, memory.size, 1, clock_readings(1)) == whole
assert read(memory, memory.size, 1, readings) == 0
first = np.bitwise_xor.reduce(words[:2], axis=None)
assert read(memory, 2 * READ_TURN_BYTES, 3, readings) == whole ^ first
assert (np.diff(readings @ [10**9, 1]) > 0).all(), "the clock goes on"
print("right")
"""


@on_each(available_isas())
def test_loops_compute_what_they_claim(isa):
    command = [sys.executable, "-c", CHECK, isa]
    environment = compiler_environment(ISAS[isa])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr


def test_measure_gives_sane_numbers():
    found = ceilings.measure(1)
    sizes, rates = zip(*found.bandwidth, strict=True)
    assert list(sizes) == sorted(sizes) and min(rates) > 0
    assert found.int8_ops > 0 and found.float32_flops > 0
    assert found.bfloat16_flops is None or found.bfloat16_flops > 0
    assert np.isfinite([*rates, found.int8_ops, found.float32_flops]).all()


def test_the_best_window_is_one_in_which_all_threads_had_a_core():
    steady = np.arange(21) * 0.25
    late = np.concatenate(
        [np.arange(6) * 0.25, 9 + np.arange(15) * 0.25]
    )  # without a core from 1.25 to 9
    assert best_window(np.array([steady, steady]), 4) == pytest.approx(8)
    assert best_window(np.array([steady, late]), 4) == pytest.approx(8)
    assert best_window(np.array([steady, late]), 8) < 7
    assert best_window(np.array([steady, steady + 100]), 4) == pytest.approx(4), (
        "side by side they never ran"
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rate_is_what_all_threads_do_per_second(threads):
    def work(thread: int, repeats: int, readings: NDArray[np.int64]) -> None:
        readings[:, 1] = np.arange(len(readings)) * repeats * 2000  # a unit takes each thread 2 us

    ceiling = Ceiling(work, 100.0)
    crew = Crew(threads)
    ceiling.measure(crew)
    crew.close()
    assert ceiling.rates == [pytest.approx(threads * 100 / 2e-6)]


def test_peaks_and_bandwidth_count_the_work_of_one_thread():
    isa = choose_isa(None)
    memory = [np.zeros(4 * MIB, np.uint8) for _ in range(2)]
    loop = peak_loop("int8", isa)
    assert loop is not None
    for threads in (1, 2):
        found = peaks.peak_ceiling("int8", isa, threads)
        assert (
            found is not None
            and found.amount % loop.operations == 0
            and found.amount <= loop.operations << 10
        )
        # A window of eight repeats is a pass over a thread's share of the set.
        assert (
            bandwidth_ceiling(4 * MIB, memory[:threads], isa).amount * WINDOW_CHUNKS
            == 4 * MIB / threads
        )


class Scripted(Ceiling):
    """A ceiling with given rounds; the last one repeats forever."""

    def __init__(self, *rates: float) -> None:
        super().__init__(lambda thread, repeats, readings: None, 1.0)
        self.script = list(rates)

    def measure(self, crew: Crew) -> None:
        self.rates.append(self.script.pop(0) if len(self.script) > 1 else self.script[0])
        crew.ran += 1.0


SLOW_START = (493, 400, 350, 480, 493, 700, 764, 772, 901, 905, 920, 500)


@pytest.mark.parametrize(
    ("rounds", "limit", "taken", "provisional"),
    [((900,), 60.0, 6, False), (SLOW_START, 60.0, 11, False), ((920, 500), 0.0, 1, True)],
)
def test_rounds_go_on_until_the_best_of_them_agree(
    rounds,
    limit,
    taken,
    provisional,
    monkeypatch,
):
    monkeypatch.setattr(peaks, "LIMIT_SECONDS", limit)
    one = Scripted(*rounds)
    crew = Crew(1)
    assert settle([one], crew) == provisional
    assert len(one.rates) == taken and max(one.rates) == max(rounds)
    crew.close()


@pytest.mark.parametrize(("waited", "stolen"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)])
def test_a_machine_where_others_took_the_cores_is_busy(waited, stolen, monkeypatch):
    clock = iter([0.0, stolen])
    monkeypatch.setattr(peaks, "_stolen", lambda: next(clock))
    one = Scripted(900.0)
    crew = Crew(1)
    monkeypatch.setattr(
        one, "measure", lambda crew: (Scripted.measure(one, crew), setattr(crew, "waited", waited))
    )
    assert settle([one], crew) == bool(waited or stolen)
    crew.close()


def test_a_crew_counts_how_long_its_threads_wait_for_a_core(
    monkeypatch,
):
    readings = iter([(1.0, 0.0), (3.0, 0.25)])
    monkeypatch.setattr(peaks, "_scheduled", lambda: next(readings))
    crew = Crew(1)
    crew.run(lambda thread: None)
    crew.close()
    assert (crew.ran, crew.waited) == (2.0, 0.25)


def test_an_unknown_path_is_refused():
    with pytest.raises(InvalidRequestError, match="no-such-path"):
        ceilings.measure(1, "no-such-path")


def test_a_failing_measurement_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ceilings.CeilingsError, match="failed"):
        ceilings.measure(1)


def test_importing_needs_no_compiler():
    code = "import sys, twinphase.backends.cpu.ceilings; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
