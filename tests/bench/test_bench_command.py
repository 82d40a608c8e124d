"""`twinphase bench` from the command line to its files, on a tiny model and a server of known timings."""

import json
import re
from pathlib import Path

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.bench.client.health import ClientHealth
from twinphase.bench.load.plan import LoadOptions
from twinphase.bench.report.compare import CANNOT, compare_reports
from twinphase.bench.report.report import Status
from twinphase.bench.report.result import read_result
from twinphase.bench.targets.kinds import TargetOptions
from twinphase.cli import run_app
from twinphase.commands.bench import VOID_EXIT_CODE, _apart
from twinphase.errors import InvalidRequestError

FEW = ("--quick", "--repetitions", "2", "--max-length", "96", "--batches", "1,4", "--max-seconds", "60")


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512))


@pytest.fixture
def small(monkeypatch):
    """The slow reference backend needs no compiled kernels; the command has no option for it."""
    from twinphase.bench.targets import engine
    from twinphase.engine import load

    loaded = load.LoadedEngine
    for module in (engine, load):
        monkeypatch.setattr(module, "LoadedEngine", lambda *a, **k: loaded(*a, **{**k, "backend": "reference"}))


@pytest.fixture
def on_time(monkeypatch):
    """Whether the client is late on a busy machine is not what these tests are about."""
    monkeypatch.setattr(ClientHealth, "faults", lambda *_: ())


def test_sweep_of_a_model_to_files(gguf_path, small, tmp_path, capsys):
    assert run_app(["bench", gguf_path, *FEW, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "prefill's rate is" in shown.replace("\n         ", " ")
    assert "phase    tokens before" in shown and "| " not in shown and "model SHA-256" not in shown
    assert max(map(len, shown.splitlines())) <= 120 and "report.md" in shown
    report = read_result(tmp_path / "out")
    assert report.kind == "bench"
    assert {"prefill_seconds[n=10]"} < {metric.name for metric in report.metrics}
    assert report.data["phase sweep"]["measurements"][0]["samples"]
    names = {path.name for path in (tmp_path / "out").rglob("*.*")}
    assert {"report.html", "report.md", "result.json", "prefill-time.png", "decode-position.png"} <= names


def test_a_load_beside_a_sweep_is_the_load_alone(gguf_path, small, tmp_path, capsys):
    """The sweep's engine has no prefix cache; a load's has one, whether or not a sweep came before."""
    words = ["--max-concurrency", "2", "--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "4"]
    for more in (["--all", *FEW], []):
        out = tmp_path / str(len(more))
        assert run_app(["bench", gguf_path, *words, *more, "--out", str(out)]) in (0, VOID_EXIT_CODE)
        found = read_result(out)
        assert found.conditions["prefix caching in the load"] == "on"
        assert found.data["load"]["target"]["details"]["prefix caching"] == "on"
        assert ("phase sweep" in found.data) == bool(more)
        assert found.conditions.get("prefix caching in the sweep") == ("off" if more else None)


def test_two_results_are_compared(gguf_path, small, tmp_path, capsys, monkeypatch):
    for name in ("a", "b"):  # seeds are drawn, and the second command writes elsewhere
        words = ["bench", gguf_path, *FEW, "--out", str(tmp_path / name)]
        monkeypatch.setattr("sys.argv", ["twinphase", *words])
        assert run_app(words) == 0
    seeds = {read_result(tmp_path / name).conditions["seed of prompts and order"] for name in ("a", "b")}
    assert len(seeds) == 2
    capsys.readouterr()
    assert run_app(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "compare"
    assert (found["verdicts"][0]["status"], found["verdicts"][0]["reason"]) == ("holds", "")


def test_two_loads_of_one_command_have_the_same_conditions(stub, on_time, tmp_path, capsys):
    stub.script({"gaps": [0.001] * 7})
    words = ["bench", stub.url, "--request-rate", "50", "--num-prompts", "6"]
    for name in ("a", "b"):
        assert run_app([*words, "--out", str(tmp_path / name)]) == 0
    a, b = (read_result(tmp_path / name) for name in ("a", "b"))
    assert a.conditions["seed"] != b.conditions["seed"]
    report = compare_reports(a, b)
    assert [v.status for v in report.verdicts if "same conditions" in v.text] == [Status.HOLDS]
    # One run tells nothing of how runs differ.
    assert {item.verdict for item in report.data["comparisons"]} <= {CANNOT}


def test_no_secret_is_in_a_result(stub, on_time, tmp_path, monkeypatch):
    stub.script({"gaps": [0.001] * 7})
    words = ["bench", f"{stub.url}/v1?api_key=querysecret#anchorsecret", "--api-key", "-keysecret"]
    words += ["--request-rate", "50", "--num-prompts", "4", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["twinphase", *words])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_app(words) == 0
    for path in ("result.json", "report.md", "report.html"):
        text = (tmp_path / "out" / path).read_text()
        assert "secret" not in text.lower()
        assert str(tmp_path) not in text
    assert "--api-key ***" in read_result(tmp_path / "out").conditions["command"]


def test_sweep_of_a_server_has_its_claims(stub, on_time, tmp_path, capsys):
    stub.script({"gaps": [0.0005] * 16, "timings": {"prompt_ms": 1.5, "prompt_n": 20, "predicted_ms": 8.0,
                                                    "predicted_n": 17, "cache_n": 0}})  # fmt: skip
    assert run_app(["bench", stub.url, *FEW, "--repetitions", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sections = {section["title"]: section for section in report["sections"]}
    assert sections["The server's own claims"]["tables"][0]["rows"]
    assert "Client TTFT" in sections["Both phases"]["paragraphs"][0]
    assert len(report["data"]["claims"]["requests"]) > 20
    assert list(tmp_path.iterdir()) == []  # --json alone writes nothing


def test_load_instead_of_the_sweep(stub, on_time, tmp_path, capsys):
    stub.script({"gaps": [0.001] * 7})
    words = ["--request-rate", "50", "--num-prompts", "12", "--goodput", "ttft:5000", "tpot:500", "--json"]
    assert run_app(["bench", stub.url, *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "phase sweep" not in report["data"]
    assert len(report["data"]["load"]["observations"]) == 12
    assert report["data"]["load"]["slos"] == {"ttft": 5.0, "tpot": 0.5}


@pytest.mark.parametrize(
    "words",
    [
        ["nothing-like-this"],
        ["x.gguf", "y.gguf"],
        ["compare", "one"],
        ["compare", "a", "b", "c"],
        ["http://localhost:1", "--goodput", "ttft:500"],
        ["http://localhost:1", "--request-rate", "2", "--goodput", "ttft:soon"],
        ["http://localhost:1", "--request-rate", "2", "--max-concurrency", "2"],
        ["http://localhost:1", "--request-rate", "0"],
        ["http://localhost:1", "--request-rate", "nan"],
        ["http://localhost:1", "--saturate", "--trace", "x"],
        ["http://localhost:1", "--constant"],
        ["http://localhost:1", "--num-prompts", "0", "--request-rate", "1"],
        ["http://localhost:1", "--random-input-len", "0", "--request-rate", "1"],
        ["http://localhost:1", "--batches", "a"],
        ["http://localhost:1", "--repetitions", "0"],
        ["http://localhost:1", "--max-num-seqs", "4"],
        ["http://localhost:1", "--saturate", "--num-prompts", "5"],
        ["http://localhost:1", "--saturate", "--repetitions", "5"],
        ["http://localhost:1", "--request-rate", "2", "--scale-lengths", "0.5"],
        ["http://localhost:1", "--request-rate", "2", "--time-scale", "0.5"],
        ["http://localhost:1", "--trace", "x", "--request-rate", "2", "--time-scale", "0.5"],
        ["http://localhost:1", "--trace", "x", "--random-input-len", "5"],
        ["http://localhost:1", "--trace", "x", "--constant"],
        ["http://localhost:1", "--trace", "x", "--scale-lengths", "0"],
        ["http://localhost:1", "--trace", "x", "--quick"],
        ["http://localhost:1", "--request-rate", "2", "--batches", "1,2"],
        ["http://localhost:1", "--request-rate", "2", "--max-length", "100"],
        ["http://localhost:1", "--random-input-len", "5"],
        ["http://localhost:1", "--num-prompts", "5"],
        ["http://localhost:1", "--endpoint", "/v1/embeddings"],
        ["http://localhost:1", "--timeout", "0"],
        ["x.gguf", "--timeout", "5"],
        ["http://localhost:1"],
        ["transformers:x", "--saturate"],
        ["x.gguf", "--kv-cache-dtype", "int3"],
        ["x.gguf", "--api-key", "k"],
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(words, capsys):
    assert run_app(["bench", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("twinphase bench: opening")]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"saturate": True, "num_prompts": 5}, "--num-prompts"),
        ({"request_rate": 2.0, "scale_lengths": 1.0}, "--scale-lengths"),
        ({"request_rate": 2.0, "time_scale": 1.0}, "--time-scale"),
        ({"trace": Path("x"), "max_concurrency": 2, "time_scale": 2.0}, "--time-scale"),
        ({"trace": Path("x"), "output_len": 2}, "--random-output-len"),
        ({"trace": Path("x"), "constant": True}, "--constant"),
        ({"trace": Path("x"), "scale_lengths": -1.0}, "--scale-lengths"),
        ({"saturate": True, "max_seconds": 5.0}, "--max-seconds"),
        ({"request_rate": 2.0, "max_concurrency": 2}, "a cap on the open loop in vLLM"),
        ({"output_len": 2}, "--random-output-len needs a load"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_by_name(options, named):
    with pytest.raises(InvalidRequestError, match=re.escape(named)):
        LoadOptions(**options).check()


def test_options_that_are_used_are_not_refused():
    LoadOptions(trace=Path("x"), scale_lengths=0.5, time_scale=2.0, num_prompts=5, repetitions=3).check()
    LoadOptions(saturate=True, max_concurrency=2, input_len=5, output_len=5).check()
    LoadOptions(saturate=True, repetitions=3, max_seconds=60.0, quick=True, beside_sweep=True).check()


@pytest.mark.parametrize(
    ("word", "route"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("chat", "chat"),
        ("/v1/chat/completions", "chat"),
        ("completions", "completions"),
        ("/v1/completions", "completions"),
        ("v1/completions/", "completions"),
    ],
)
def test_endpoints_may_be_paths(word, route):
    assert TargetOptions(endpoint=word).server["endpoint"] == route


def test_a_load_is_repeated_with_other_prompts(stub, on_time, capsys):
    stub.script({"gaps": [0.001] * 7})
    words = ["--request-rate", "100", "--num-prompts", "6", "--repetitions", "5", "--random-input-len", "20", "--json"]
    assert run_app(["bench", stub.url, *words, "--endpoint", "/v1/completions", "--timeout", "30"]) in (
        0,
        VOID_EXIT_CODE,
    )
    report = json.loads(capsys.readouterr().out)
    runs = [report["data"]["load"], *report["data"]["load"]["further runs"]]
    assert len(runs) == 5 and all(len(run["observations"]) == 6 for run in runs)
    assert len({run["conditions"]["seed"] for run in runs}) == 5
    metrics = {metric["name"]: metric["values"] for metric in report["metrics"]}
    assert all(len(values) == 5 for values in metrics.values())
    assert report["sections"][0]["title"] == "Runs of the load" and len(report["sections"][0]["tables"][0]["rows"]) == 5


def test_a_void_run_has_an_exit_code_of_its_own(stub, monkeypatch, capsys):
    monkeypatch.setattr("twinphase.bench.client.health.CPU_OF_CORE", -1.0)  # no client is that idle
    stub.script({"gaps": [0.001] * 7})
    words = ["--request-rate", "100", "--num-prompts", "6", "--repetitions", "2", "--json"]
    assert run_app(["bench", stub.url, *words]) == VOID_EXIT_CODE == 10
    report = json.loads(capsys.readouterr().out)
    assert report["verdicts"][0]["status"] == "void" and report["metrics"] == []


def test_a_load_ends_when_its_time_is_over(stub, on_time, capsys):
    stub.script({"gaps": [0.001] * 2})
    words = ["--request-rate", "20", "--constant", "--num-prompts", "100", "--max-seconds", "1", "--json"]
    assert run_app(["bench", stub.url, *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["data"]["load"]["observations"]) == 21  # at 0, 0.05, .. 1.0 seconds


def test_a_load_is_wanted_only_when_asked_for():
    assert not LoadOptions().wanted
    assert LoadOptions(request_rate=1.0).wanted
    assert LoadOptions(saturate=True).wanted
    with pytest.raises(InvalidRequestError):
        LoadOptions(constant=True).check()


@pytest.mark.parametrize(
    "words",
    [
        ["ttft:500", "tpot:50", "http://h"],
        ["ttft:500", "http://h", "tpot:50"],
        ["http://h", "ttft:500", "tpot:50"],
    ],
)
def test_service_levels_are_found_wherever_they_stand(words):
    assert _apart(words[0], words[1:], ["e2el:5"]) == ("http://h", [], ["ttft:500", "tpot:50"])


def test_words_that_are_no_levels_stay_words():
    assert _apart("localhost:8000", [], ["ttft:5"]) == ("localhost:8000", [], [])
    assert _apart("a", ["tpot:5"], []) == ("a", ["tpot:5"], [])
    assert _apart("a", ["ttf:5", "b"], ["ttft:5"]) == ("a", ["b"], ["ttf:5"]), "a misspelt one is refused as a level"
    with pytest.raises(InvalidRequestError, match="No target"):
        _apart("tpot:5", [], ["ttft:5"])
