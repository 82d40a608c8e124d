"""Tests of weights keep their caches and models in folders of their own."""

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tests.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.fixture
def model_bytes(tmp_path) -> bytes:
    return write_tiny_gguf(tmp_path / "source.gguf", layers=1).read_bytes()


@pytest.fixture
def fake_hub(monkeypatch, model_bytes) -> Callable[..., list[str]]:
    """Puts a stand-in in place of huggingface_hub; the list it returns grows by fetched names."""

    def install(files: Collection[str], error: Exception | None = None) -> list[str]:
        fetched: list[str] = []

        def listing(self: object, repo: str) -> list[str]:
            if error is not None:
                raise error
            return list(files)

        def download(repo: str, file: str, *, local_dir: Path) -> str:
            fetched.append(file)
            path = Path(local_dir) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[file] if isinstance(files, Mapping) else model_bytes)
            return str(path)

        hub = ModuleType("huggingface_hub")
        utils = ModuleType("huggingface_hub.utils")
        vars(hub).update(
            HfApi=type("HfApi", (), {"list_repo_files": listing}), hf_hub_download=download
        )
        levels = {"get_verbosity": lambda: 30, "set_verbosity": lambda level: None}
        vars(utils).update(logging=SimpleNamespace(**levels))
        for module in (hub, utils):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return fetched

    return install
