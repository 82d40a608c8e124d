"""Conditions say what a reader needs and nothing secret; progress is brief in a log."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import time

import pytest

from twinphase.progress import live
from twinphase_bench import conditions as module
from twinphase_bench.conditions import (
    MIN_NOTABLE_CORES,
    Bystanders,
    command_line,
    conditions,
    file_sha256,
)
from twinphase_bench.targets.target import TargetFacts

FACTS = TargetFacts(
    "https://me:pw@host/v1", "openai", "engine 1", "model", "unknown", 4096, "p", "d", {"more": "x"}
)


def test_conditions_name_machine_target_and_versions(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    found = conditions(
        FACTS, model=model, threads=2, isa="avx2", command=["twinphase", "bench"], flags={"rate": 2}
    )
    assert found["model SHA-256"] == hashlib.sha256(b"weights").hexdigest()
    assert found["model file"] == "model.gguf, 7 bytes"
    assert (found["threads"], found["instruction set"], found["context length"]) == (
        "2",
        "avx2",
        "4,096",
    )
    assert (found["engine"], found["more"], found["rate"]) == ("engine 1", "x", "2")
    assert found["target"] == "https://host/v1"
    assert found["Python"] and found["numpy"][0].isdigit() and found["date"].endswith(" UTC")
    assert all(isinstance(value, str) and value for value in found.values())


def test_what_is_not_known_is_unknown(tmp_path):
    found = conditions(command=["twinphase"])
    assert (found["threads"], found["instruction set"]) == ("unknown", "unknown")
    assert "model file" not in found and "target" not in found
    assert file_sha256(tmp_path) == file_sha256(tmp_path / "none") == "unknown"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["/opt/bin/twinphase", "bench", "m", "--max-tokens", "8"],
            "twinphase bench m --max-tokens 8",
        ),
        (["/x/twinphase/__main__.py", "lab"], "twinphase lab"),
        (["twinphase", "--api-key", "abc", "--rate", "2"], "twinphase --api-key *** --rate 2"),
        (
            ["twinphase", "--api-key=abc", "--hf-token", "abc"],
            "twinphase --api-key=*** --hf-token ***",
        ),
        (["twinphase", "--header", "Authorization: Bearer abc"], "twinphase --header ***"),
        (["twinphase", "http://u:abc@h:1/v1"], "twinphase http://h:1/v1"),
        (["twinphase", "--api-key", "-abc", "--rate", "2"], "twinphase --api-key *** --rate 2"),
        (["twinphase", "--api-key", "--key", "abc"], "twinphase --api-key *** abc"),
        (["twinphase", "--url=http://u:p@h?token=abc"], "twinphase --url=http://h"),
        (["twinphase", "http://u:p/w@h/v1"], "twinphase http://h/v1"),
        (["twinphase", "a b"], "twinphase 'a b'"),
    ],
)
def test_a_command_line_has_no_secrets(arguments, expected):
    assert command_line(arguments) == expected


def test_the_home_folder_is_not_named(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert command_line(["twinphase", "/home/someone/models/m.gguf"]) == "twinphase ~/models/m.gguf"
    assert command_line(["twinphase", "/home/someone/a b"]) == "twinphase ~/'a b'"
    assert command_line(["twinphase", "--out=/home/someone/r"]) == "twinphase '--out=~/r'"
    assert command_line(["twinphase", "/home/someoneelse/m"]) == "twinphase /home/someoneelse/m"
    assert command_line(["twinphase", "/mnt/home/someone/m"]) == "twinphase /mnt/home/someone/m"
    assert conditions(flags={"api_key": "abc"}, command=["x"])["api_key"] == "***"


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_own_work_is_not_a_bystanders(monkeypatch):
    # The machine's counter is ours to say, so that whoever else runs here does not matter.
    monkeypatch.setattr(module, "_machine_ticks", lambda: 1000 + module._ticks_of_tree(os.getpid()))
    with Bystanders() as others:
        spin(0.3)
        subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    # Both counters cannot be read in one moment: a tick or two may be missing.
    assert (
        others.cores is not None and others.cores < MIN_NOTABLE_CORES and "quiet" in others.noise()
    )


def test_a_bystander_is_seen():
    if module._machine_ticks() is None:
        pytest.skip("the kernel has no counters here")
    code = (
        "import time\nend = time.process_time() + 1\nprint()\nwhile time.process_time() < end: pass"
    )
    # A grandchild whose parent has ended is no descendant of ours.
    shell = ["sh", "-c", 'exec 3>&1; ("$@" >&3 & )', "sh", sys.executable, "-uc", code]
    with Bystanders() as others, subprocess.Popen(shell, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.read()  # until it has ended: a second of CPU time
    assert others.cores is not None and others.cores > 0
    assert f"{others.cores:.2f}" in others.noise()


def test_without_counters_bystanders_are_unknown(monkeypatch):
    monkeypatch.setattr(module, "_machine_ticks", lambda: None)
    with Bystanders() as others:
        pass
    assert others.cores is None and "unknown" in others.noise()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_measured_now(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with live("twinphase bench", stream) as progress:
        progress("prefill of 512 [tokens]", 3, 20)
    assert "twinphase bench" in stream.getvalue() and "prefill of 512 [tokens]" in stream.getvalue()
    assert "3/20" in stream.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("twinphase.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with live("lab", stream) as progress:
        for step in range(60):
            progress(f"step {step}", step, 60)
            now[0] += 1
    assert stream.getvalue().splitlines() == [
        f"lab: {n}/60 step {n} ({n} s)" for n in range(0, 60, 10)
    ]


def test_progress_is_taken_away_when_the_work_fails(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(RuntimeError), live("lab", stream) as progress:
        progress("x", 1, 2)
        raise RuntimeError
    assert stream.getvalue().endswith("\x1b[2K")
