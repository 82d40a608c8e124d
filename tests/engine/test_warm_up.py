"""What a warm engine knows: its own speed, and whether stored ceilings are plausible."""

import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from provoked import Script, usual_seconds
from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.cpu.compiler import LoadedKernels
from twinphase.batch import Batch
from twinphase.config import EngineConfig
from twinphase.engine.loading import loading as load
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.loop import engine_facts
from twinphase.engine.runner import Runner
from twinphase.phases.hardware import Ceilings
from twinphase.scheduler.pace import Pace

CEILINGS = Ceilings("p", 1, "generic", ((1, 1e15),), 1e15, 1e15, 1e15)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048)


@pytest.fixture(scope="module")
def loaded(model) -> LoadedEngine:
    return LoadedEngine(model, EngineConfig(backend="reference"))


def test_the_speed_told_at_the_start_was_measured_on_a_warm_engine(loaded):
    assert engine_facts(loaded, None).ttft is None
    phases: set[bool] = set()

    def seconds(batch: Batch) -> float:
        cold = bool(batch.prefills) not in phases
        phases.add(bool(batch.prefills))
        return usual_seconds(batch) * (6 if cold else 1)

    Script(loaded.engine, seconds)
    loaded.warm_up(600, 16)
    totals = [loaded.warm_timeline.prefill, loaded.warm_timeline.decode]
    assert all(total.building > 0 for total in totals)
    facts = engine_facts(loaded, loaded.settle_pace())
    assert facts.warm_up_tokens == 600
    # Two chunks: 2 x 2 ms for the weights, 60 ms for the rows, 3.6 ms for what they attend to, one
    # row of logits.
    assert facts.ttft == pytest.approx(0.0677, abs=0.001)
    assert facts.tpot == pytest.approx(0.0022, abs=0.0001)


def test_a_pace_that_was_chosen_on_a_busy_machine_is_soon_forgotten(loaded, monkeypatch):
    """The machine is busy at the start and for two later choices; then it is quiet for good."""
    choices = [150.0, 80.0, 82.0, 300.0, 290.0, 79.0, 81.0, 78.0, 160.0, 161.0, 162.0]
    slos = [150, 80, 82, 82, 150, 82, 82, 81, 81, 81, 160]
    monkeypatch.setattr(loaded, "_paces", deque(maxlen=load.MAX_KEPT_PACES))
    monkeypatch.setattr(
        load.Pacing,
        "choose",
        lambda pacing: Pace(choices[len(kept)] / 1e3, choices[len(kept)] / 1e4, True),
    )
    kept: list[tuple[float | None, float]] = []
    for _ in choices:
        loaded.choose_pace()
        pace = loaded.engine.scheduler.pace
        kept.append((pace.slo_seconds, pace.step_factor))
    assert kept == [(pytest.approx(slo / 1e3), pytest.approx(slo / 1e4)) for slo in slos]


@pytest.mark.parametrize("faster", [False, True])
def test_a_request_that_beats_the_ceilings_has_them_measured_again(loaded, faster, monkeypatch):
    monkeypatch.setattr(loaded, "_final_ceilings", CEILINGS)
    kept: list[Ceilings] = []
    monkeypatch.setattr(load, "save_ceilings", kept.append)
    Script(loaded.engine, lambda batch: 1e-12 if faster else 1.0)
    loaded.warm_up(40, 3)
    assert loaded.warm_timeline is not None
    for _ in range(2):
        loaded.doubt_ceilings(loaded.warm_timeline)
    assert kept == ([replace(CEILINGS, provisional=True)] if faster else [])


def test_the_first_step_of_a_request_loads_captures_and_starts_nothing(model, monkeypatch):
    loaded = LoadedEngine(model, EngineConfig(threads=2))
    backend = loaded.backend
    kernels = dict(backend._kernels)
    pool = backend._pool
    threads = set(threading.enumerate())
    assert kernels and pool is not None
    done: list[str] = []
    monkeypatch.setattr(LoadedKernels, "load", lambda *args: done.append("load"))
    monkeypatch.setattr(CpuBackend, "_capture", lambda *args: done.append("capture"))
    loaded._compute("first", 20, 3)
    assert not done and backend._pool is pool
    assert dict(backend._kernels) == kernels and set(threading.enumerate()) == threads


def test_the_made_up_row_of_loading_changes_no_answer(model, monkeypatch):
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
    warm = LLM(model, threads=2)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "first_step", lambda self: None)
        cold = LLM(model, threads=2)
    found, plain = (llm.generate(["hello world"], params)[0].outputs[0] for llm in (warm, cold))
    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)
