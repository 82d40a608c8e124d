from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from twinphase.backends.cpu import ceilings
from twinphase.backends.cpu.isa import ISAS, available_isas, baseline_cpu
from twinphase.errors import InvalidRequestError

# Compiled for one processor each, hence a process a path. Turns beyond OPERAND_STEPS come round to the first operands.
CHECK = """
import sys
import numpy as np
from twinphase.backends.cpu.isa import ISAS
from twinphase.backends.cpu.peaks import OPERAND_STEPS, READ_UNIT, peak_loop, read_loop

isa, rng, turns = ISAS[sys.argv[1]], np.random.default_rng(0), OPERAND_STEPS + 3

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
        w, x, got = weights.view(np.uint8).astype(np.int64), inputs.view(np.int8).astype(np.int64), out
    elif kind == "float32":
        weights.view(np.float32)[:] = rng.integers(-9, 10, weights.shape)
        inputs.view(np.float32)[:] = rng.integers(-9, 10, inputs.shape)
        w, x, got = weights.view(np.float32), inputs.view(np.float32), out.view(np.float32)
    else:
        weights.view(np.uint16)[:] = rng.choice([0x3F80, 0xBF80, 0x4000, 0], weights.view(np.uint16).shape)
        inputs.view(np.uint16)[:] = rng.choice([0x3F80, 0xBF80, 0x4000, 0], inputs.view(np.uint16).shape)
        w, x, got = bfloat16(weights.view(np.uint16)), bfloat16(inputs.view(np.uint16)), out.view(np.float32)
    loop.run(weights, inputs, out, turns)
    order = np.arange(turns) % OPERAND_STEPS
    products = (w[order, None, :, :] * x[order, :, None, :]).sum(0)  # [rows, columns, numbers]
    want = products.reshape(*products.shape[:2], loop.lanes, -1).sum(-1)
    assert np.array_equal(got.astype(np.float64), want.astype(np.float64)), kind
    assert loop.operations == 2 * products.size

memory = rng.integers(0, 256, 8 * READ_UNIT, np.uint8)
want = np.bitwise_xor.reduce(memory.view(np.int64))
read = read_loop(isa)
assert read(memory, 1) == want and read(memory, 2) == 0 and read(memory, 3) == want
print("right")
"""


@pytest.mark.parametrize("name", available_isas())
def test_loops_compute_what_they_claim(name: str) -> None:
    isa = ISAS[name]
    environment = dict(os.environ)
    if isa.cpu or name == "generic":
        environment |= {"NUMBA_CPU_NAME": baseline_cpu(isa), "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", CHECK, name], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr


def test_measure_gives_sane_numbers() -> None:
    found = ceilings.measure(1)
    sizes, rates = zip(*found.bandwidth, strict=True)
    assert list(sizes) == sorted(sizes) and min(rates) > 0
    assert found.int8_ops > 0 and found.float32_flops > 0
    assert found.bfloat16_flops is None or found.bfloat16_flops > 0
    assert np.isfinite([*rates, found.int8_ops, found.float32_flops]).all()


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no-such-path"):
        ceilings.measure(1, "no-such-path")


def test_a_failing_measurement_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings.sys, "executable", "/bin/false")
    with pytest.raises(ceilings.CeilingsError, match="failed"):
        ceilings.measure(1)


def test_importing_needs_no_compiler() -> None:
    code = "import sys, twinphase.backends.cpu.ceilings; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
