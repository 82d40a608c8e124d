"""Tests of weights keep their caches and models in folders of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"
