"""Commands about commands: help, version, completion, aliases, and what errors point to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from twinphase import __version__

pytestmark = pytest.mark.usefixtures("cache")


def test_each_command_has_one_whole_line_in_a_group(twinphase):
    lines = twinphase().text().splitlines()
    groups = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert groups == [
        "Options:",
        "Ask:",
        "Serve:",
        "Models:",
        "Measure and explain:",
        "Cluster and devices:",
        "Help:",
    ]
    rows = [line for line in lines[lines.index("Ask:") :] if line.startswith("  ")]
    assert all(len(row) <= 80 and row.endswith(".") and "..." not in row for row in rows), rows


def test_options_of_run_are_grouped_and_followed_by_examples(twinphase):
    text = twinphase("run", "-h").text()
    heads = ["\nArguments:", "\nOptions:", "\nSampling:", "\nEngine:", "\nExamples:"]
    places = [text.index(head) for head in heads]
    assert places == sorted(places)
    sampling = text[places[2] : places[3]]
    assert "--temperature" in sampling and "--threads" not in sampling
    assert '  twinphase run "Why is the sky blue?"  ' in text[places[4] :], "lines stay as written"


def test_help_of_a_command_is_that_of_its_option(twinphase):
    assert twinphase("help", "serve").text() == twinphase("serve", "--help").text()
    assert twinphase("help").text() == twinphase("--help").text()
    assert "Did you mean 'serve'" in twinphase("help", "serv").error()


def test_the_version_under_three_names(twinphase):
    names = ("version", "--version", "-v")
    assert {twinphase(name).text() for name in names} == {f"twinphase {__version__}\n"}


def test_other_tools_words_work_or_are_explained(twinphase):
    assert twinphase("ls") == twinphase("list")
    assert "`twinphase run` without a prompt" in twinphase("chat").error()
    assert "`twinphase pull MODEL`" in twinphase("download", "x").error()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("run", "--temprature", "3"),
            "No such option: --temprature. Did you mean --temperature? See `twinphase run --help`.",
        ),
        (
            ("run", "--temperature", "x"),
            "unable to parse string as a number. See `twinphase run --help`.",
        ),
        (("rm",), "Missing argument 'name'. See `twinphase rm --help`."),
        (("hlp",), "No such command 'hlp'. Did you mean 'help'? See `twinphase --help`."),
    ],
)
def test_wrong_options_point_to_the_help_of_their_command(twinphase, given, message):
    done = twinphase(*given)
    assert done.error().endswith(f"{message}\n") and done.code == 2


def test_completion_offers_commands_and_options(twinphase):
    for shell in ("bash", "zsh", "fish"):
        assert "_TWINPHASE_COMPLETE" in twinphase("completion", shell).text()
    assert "bash, zsh, fish" in twinphase("completion", "csh").error()

    def offered(words: str) -> list[str]:
        asked = {
            "_TWINPHASE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-m", "twinphase_bench.cli"],
            env={**os.environ, **asked},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert offered("twinphase ro") == ["roofline"]
    assert offered("twinphase run --temp") == ["--temperature"]
    assert offered("twinphase pull qwen2.5-coder") == [
        "qwen2.5-coder",
        "qwen2.5-coder:0.5b",
        "qwen2.5-coder:1.5b",
    ]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "cut", "offered"),
    [
        ("twinphase pull qwen2.5-coder:0", True, "0.5b"),
        ("twinphase pull qwen2.5-coder:0", False, "qwen2.5-coder:0.5b"),
        ("twinphase ro", True, "roofline"),
    ],
)
def test_bash_completes_names_with_a_colon(twinphase, tmp_path, line, cut, offered):
    """Bash replaces the part of the word after the last colon, unless a colon breaks no words."""
    command = tmp_path / "twinphase"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m twinphase_bench.cli "$@"\n')
    command.chmod(0o755)
    breaks = " :" if cut else " "
    script = (
        f"{twinphase('completion', 'bash').text()}\nCOMP_WORDBREAKS='{breaks}'\n"
        f"COMP_LINE='{line}'\nCOMP_POINT={len(line)}\n_twinphase_completion '{command}'\n"
        'printf "%s" "${COMPREPLY[*]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (offered, "")
