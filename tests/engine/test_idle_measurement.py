"""Ceilings are measured while the engine is idle; the measurement ends at once on a request."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from twinphase.backends.cpu.ceilings import CeilingsError
from twinphase.config import EngineConfig
from twinphase.engine.loading import ceilings
from twinphase.engine.loading.ceilings import IdleMeasurement
from twinphase.phases.hardware import Ceilings

FOUND = Ceilings("p", 1, "generic", ((1 << 20, 1e12),), 1e15, 1e14, 1e15)
LIMIT_SECONDS = 30


@pytest.fixture
def kept(monkeypatch) -> list[Ceilings]:
    """The stored ceilings, which are known from then on."""
    kept: list[Ceilings] = []
    monkeypatch.setattr(ceilings, "measured_ceilings", lambda _: kept[-1] if kept else None)
    monkeypatch.setattr(ceilings, "save_ceilings", kept.append)
    return kept


def idle(measure) -> IdleMeasurement:
    return IdleMeasurement(EngineConfig(), measure, patience=0.0)


def finish() -> None:
    for thread in threading.enumerate():
        if thread.daemon and "IdleMeasurement" in str(getattr(thread, "_target", "")):
            thread.join(LIMIT_SECONDS)


def test_an_undisturbed_measurement_is_kept_and_not_repeated(kept):
    calls = []
    done = threading.Event()

    def measure(config, repetitions, started):
        calls.append(repetitions)
        done.set()
        return [FOUND]

    waiting = idle(measure)
    with waiting:
        assert done.wait(LIMIT_SECONDS)
        finish()
    with waiting:
        finish()
    assert calls == [1] and kept == [FOUND]


def test_a_disturbed_measurement_is_not_kept(kept):
    done = threading.Event()

    def measure(config, repetitions, started):
        done.set()
        return [replace(FOUND, provisional=True)]

    with idle(measure) as waiting:
        assert done.wait(LIMIT_SECONDS)
        finish()
    assert not kept and waiting.is_due


def test_work_ends_a_measurement_at_once(kept):
    begun = threading.Event()
    ended = threading.Event()

    def measure(config, repetitions, started):
        started(ended.set)
        begun.set()
        assert ended.wait(LIMIT_SECONDS)
        raise CeilingsError("ended")

    waiting = idle(measure)
    with waiting:
        assert begun.wait(LIMIT_SECONDS)
    assert ended.is_set()
    finish()
    assert not kept


def test_nothing_begins_before_the_patience_is_over(kept):
    waiting = IdleMeasurement(
        EngineConfig(), lambda *_, **__: pytest.fail("measured"), patience=3600.0
    )
    with waiting:
        pass
    finish()


def test_other_backends_and_shared_machines_are_left_alone(kept, monkeypatch):
    assert IdleMeasurement(EngineConfig()).is_due
    assert not IdleMeasurement(EngineConfig(backend="reference")).is_due
    monkeypatch.setattr(ceilings, "cores_of_each_engine", lambda: 0)
    assert not IdleMeasurement(EngineConfig()).is_due
