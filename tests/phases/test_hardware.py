from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.phases.hardware import (
    Ceilings,
    Efficiency,
    bound,
    compute_seconds,
    efficiency,
    hint_is_due,
    load_ceilings,
    memory_seconds,
    must_measure,
    processor_name,
    save_ceilings,
)

MIB = 1 << 20
CEILINGS = Ceilings(
    processor="a processor",
    threads=2,
    isa="generic",
    bandwidth=((MIB, 200e9), (16 * MIB, 100e9), (64 * MIB, 40e9)),
    int8_ops=900e9,
    float32_flops=200e9,
    bfloat16_flops=None,
)


def test_bandwidth_meets_the_measurements_and_ends_flat():
    for size, rate in CEILINGS.bandwidth:
        assert CEILINGS.read_bandwidth(size) == pytest.approx(rate)
    assert CEILINGS.read_bandwidth(1) == pytest.approx(200e9)
    assert CEILINGS.read_bandwidth(1 << 40) == pytest.approx(40e9)


@given(st.floats(min_value=1, max_value=1e12), st.floats(min_value=1, max_value=1e12))
def test_bandwidth_never_rises_with_the_working_set(a, b):
    small = CEILINGS.read_bandwidth(min(a, b))
    large = CEILINGS.read_bandwidth(max(a, b))
    assert small is not None and large is not None
    assert small >= large * (1 - 1e-9)


def test_unknown_stays_unknown():
    nothing = replace(CEILINGS, bandwidth=(), int8_ops=None)
    assert nothing.read_bandwidth(MIB) is None
    assert CEILINGS.read_bandwidth(0) is None
    assert compute_seconds({"int8": 1}, nothing) is None
    assert compute_seconds({"int8": 1}, None) is None
    assert compute_seconds({"bfloat16": 1}, CEILINGS) is None
    assert compute_seconds({"no such unit": 1}, CEILINGS) is None
    assert memory_seconds(1, MIB, None) is None
    assert efficiency({"int8": 1}, 1, MIB, 1.0, None) == Efficiency("unknown")
    assert efficiency({"int8": 1}, 1, MIB, 0.0, CEILINGS) == Efficiency("unknown")
    fast = efficiency({"int8": 900}, 100, MIB, 0.5e-9, CEILINGS)
    assert (fast.mfu, fast.mbu) == (pytest.approx(2), pytest.approx(1)), "never clamped"
    assert bound(None, 1.0, 2.0) == bound(1.0, None, 2.0) == bound(1.0, 1.0, 0.0) == "unknown"


@pytest.mark.parametrize(
    ("flops", "seconds"),
    [
        ({"int8": 900, "bfloat16": 0}, 1e-9),  # a unit without work needs no ceiling
        ({"int8": int(900e9), "float32": int(200e9)}, 2.0),  # units add up in time, not in rate
    ],
)
def test_compute_seconds(flops, seconds):
    assert compute_seconds(flops, CEILINGS) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("compute", "memory", "waited", "outside", "expected"),
    [
        (0.6, 0.1, 0.0, 0.2, "compute"),
        (0.1, 0.6, 0.3, 0.0, "memory"),
        (0.5, 0.5, 0.0, 0.0, "compute"),
        (0.1, 1.2, 0.0, 0.0, "memory"),
        (0.4, 0.4, 0.2, 0.0, "kernels"),
        (0.4, 0.4, 0.1, 0.31, "overhead"),
        (0.4, 0.4, 0.31, 0.1, "contention"),
        (0.1, 0.2, 0.8, 0.0, "contention"),
    ],
)
def test_bound(compute, memory, waited, outside, expected):
    assert bound(compute, memory, 1.0, cpu_wait=waited, outside=outside) == expected


def test_merging_keeps_the_higher_of_each():
    other = replace(
        CEILINGS, bandwidth=((MIB, 150e9), (64 * MIB, 50e9)), int8_ops=1e12, float32_flops=None
    )
    merged = CEILINGS.merged(other)
    assert merged.bandwidth == ((MIB, 200e9), (16 * MIB, 100e9), (64 * MIB, 50e9))
    assert (merged.int8_ops, merged.float32_flops, merged.bfloat16_flops) == (1e12, 200e9, None)


def test_ceilings_are_measured_until_the_machine_was_quiet():
    busy = replace(CEILINGS, provisional=True)
    assert must_measure(None) and must_measure(busy) and not must_measure(CEILINGS)
    assert not must_measure(busy.merged(CEILINGS)) and not must_measure(CEILINGS.merged(busy))


def test_the_hint_about_measuring_comes_once_a_day(cache):
    assert hint_is_due() and not hint_is_due()
    (path,) = cache.rglob("hint")
    os.utime(path, (1, 1))
    assert hint_is_due() and not hint_is_due()


def test_cache_round_trip(cache):
    assert load_ceilings(2, "generic") is None
    save_ceilings(CEILINGS)
    assert load_ceilings(2, "generic") == CEILINGS
    assert load_ceilings(1, "generic") is load_ceilings(2, "avx2") is None
    (path,) = cache.rglob("*.json")
    assert json.loads(path.read_text())["processor"] == "a processor", "people can read it"
    assert processor_name()


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{}", '{"bandwidth": 3}', '{"bandwidth": [[1]]}', "\x00\xff"]
)
def test_a_damaged_cache_file_is_as_good_as_none(cache, content):
    save_ceilings(CEILINGS)
    (path,) = cache.rglob("*.json")
    path.write_text(content, encoding="latin-1")
    assert load_ceilings(2, "generic") is None
