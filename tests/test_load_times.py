"""Downloading, unpacking and compiling are named apart in the time of a run."""

from __future__ import annotations

import json
import time
from unittest.mock import Mock

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.backends.cpu import compiler
from twinphase.backends.cpu.isa import choose_isa
from twinphase.load_times import loading_part, measured_loading


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time that `load_times` sees."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_every_second_counts_once_for_the_innermost_part(clock):
    with measured_loading() as seconds:
        clock[0] += 1
        with loading_part("download"):
            clock[0] += 2
            with loading_part("unpack"):
                clock[0] += 4
            with pytest.raises(OSError), loading_part("compile"):
                clock[0] += 8
                raise OSError
        with loading_part("download"):
            clock[0] += 16
    assert seconds == {"download": 18, "unpack": 4, "compile": 8}
    with loading_part("download"):
        clock[0] += 1
    assert seconds["download"] == 18


def test_kernels_are_compiled_by_name(clock, tmp_path, monkeypatch):
    def start(command: list[str], **options: object) -> Mock:
        clock[0] += 5
        return Mock(returncode=0)

    def copy(folder: object, isa: object, specs: list[str]) -> list[str]:
        clock[0] += 3
        return specs

    monkeypatch.setattr(compiler, "_copy_prebuilt", copy)
    monkeypatch.setattr(compiler.lifeline, "start", start)
    with measured_loading() as seconds:
        compiler.compile_kernels(tmp_path, choose_isa(None), ["quantize"])
    assert seconds == {"compile": 5, "unpack": 3}


def test_a_run_names_the_parts_and_the_shares_still_sum_to_its_wall(
    twinphase, cache, tmp_path, monkeypatch
):
    from twinphase.engine.embedding import embedder

    resolve = embedder.resolve_model

    def fetched(name: str) -> object:
        for part in ("download", "unpack", "compile"):
            with loading_part(part):
                time.sleep(0.02)
        return resolve(name)

    monkeypatch.setattr(embedder, "resolve_model", fetched)
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    words = ("--backend", "reference", "--max-tokens", "2", "--json")
    timing = json.loads(twinphase("run", model, "hello", *words).text())["timing"]
    rest = {row["name"]: row["seconds"] for row in timing["rest"]}
    assert rest["download"] >= 0.02 and rest["unpack"] >= 0.02 and rest["compile"] >= 0.02
    assert rest["load"] > 0
    rows = timing["phases"] + timing["rest"]
    assert sum(row["seconds"] for row in rows) == pytest.approx(timing["wall_seconds"])
    assert sum(row["share"] for row in rows) == pytest.approx(1)
