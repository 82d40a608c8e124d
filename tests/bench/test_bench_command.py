"""`twinphase bench` from its options to its files, on a tiny model and a stub server."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.cli import run_app
from twinphase.engine import stepped
from twinphase.errors import InvalidRequestError
from twinphase_bench.client.health import ClientHealth
from twinphase_bench.commands.bench import VOID_EXIT_CODE, _apart
from twinphase_bench.load.plan import LoadOptions
from twinphase_bench.report.compare import CANNOT, compare_reports
from twinphase_bench.report.report import Status
from twinphase_bench.report.result import read_result
from twinphase_bench.targets.kinds import TargetOptions

FEW = "--quick --repetitions 2 --max-length 96 --batches 1,4 --max-seconds 60"


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512))


@pytest.fixture
def small(monkeypatch):
    """The slow reference backend needs no compiled kernels; the command has no option for it."""
    loaded = stepped.LoadedEngine
    monkeypatch.setattr(
        stepped,
        "LoadedEngine",
        lambda model, config, **how: loaded(model, replace(config, backend="reference"), **how),
    )


@pytest.fixture
def on_time(monkeypatch):
    """These tests do not depend on whether the client is late on a busy machine."""
    monkeypatch.setattr(ClientHealth, "faults", lambda *_: ())


@pytest.fixture
def url(stub):
    """The URL of a server that writes eight tokens, a millisecond apart."""
    stub.script({"gaps": [0.001] * 7})
    return stub.url


def bench(words):
    """The exit code of a command."""
    return run_app(["bench", *words.split()])


def bench_json(capsys, words, code=0):
    """What a command prints with --json."""
    assert bench(f"{words} --json") == code
    return json.loads(capsys.readouterr().out)


def test_sweep_of_a_model_to_files(gguf_path, small, tmp_path, capsys):
    assert bench(f"{gguf_path} {FEW} --out {tmp_path}/out") == 0
    shown = capsys.readouterr().out
    assert "prefill's rate is" in " ".join(shown.split())
    assert "phase    tokens before" in shown and "| " not in shown and "model SHA-256" not in shown
    assert max(map(len, shown.splitlines())) <= 120 and "report.md" in shown
    report = read_result(tmp_path / "out")
    assert report.kind == "bench"
    assert {"prefill_seconds[n=10]"} < {metric.name for metric in report.metrics}
    assert report.data["phase sweep"]["measurements"][0]["samples"]
    names = {path.name for path in (tmp_path / "out").rglob("*.*")}
    assert {
        "report.html",
        "report.md",
        "result.json",
        "prefill-time.png",
        "decode-position.png",
    } <= names


def test_a_load_beside_a_sweep_is_the_load_alone(gguf_path, small, tmp_path):
    """The sweep's engine has no prefix cache; a load's has one, also after a sweep."""
    load = "--max-concurrency 2 --num-prompts 3 --random-input-len 20 --random-output-len 4"
    for more in (f"--all {FEW}", ""):
        out = tmp_path / str(len(more))
        assert bench(f"{gguf_path} {load} {more} --out {out}") in (0, VOID_EXIT_CODE)
        found = read_result(out)
        assert found.conditions["prefix caching in the load"] == "on"
        assert found.data["load"]["target"]["details"]["prefix caching"] == "on"
        assert ("phase sweep" in found.data) == bool(more)
        assert found.conditions.get("prefix caching in the sweep") == ("off" if more else None)


@pytest.mark.slow
def test_two_results_are_compared(gguf_path, small, tmp_path, capsys, monkeypatch):
    for name in ("a", "b"):  # seeds are drawn, and the second command writes elsewhere
        words = f"{gguf_path} {FEW} --out {tmp_path / name}"
        monkeypatch.setattr("sys.argv", ["twinphase", "bench", *words.split()])
        assert bench(words) == 0
    seeds = {
        read_result(tmp_path / name).conditions["seed of prompts and order"] for name in ("a", "b")
    }
    assert len(seeds) == 2
    capsys.readouterr()
    found = bench_json(capsys, f"compare {tmp_path}/a {tmp_path}/b")
    assert found["kind"] == "compare"
    assert (found["verdicts"][0]["status"], found["verdicts"][0]["reason"]) == ("holds", "")


def test_two_loads_of_one_command_have_the_same_conditions(url, on_time, tmp_path):
    for name in ("a", "b"):
        assert bench(f"{url} --request-rate 50 --num-prompts 6 --out {tmp_path / name}") == 0
    a, b = (read_result(tmp_path / name) for name in ("a", "b"))
    assert a.conditions["seed"] != b.conditions["seed"]
    report = compare_reports(a, b)
    assert [v.status for v in report.verdicts if "same conditions" in v.text] == [Status.HOLDS]
    # One run tells nothing of how runs differ.
    assert {item.verdict for item in report.data["comparisons"]} <= {CANNOT}


def test_no_secret_is_in_a_result(url, on_time, tmp_path, monkeypatch):
    words = f"{url}/v1?api_key=querysecret#anchorsecret --api-key -keysecret "
    words += f"--request-rate 50 --num-prompts 4 --out {tmp_path}/out"
    monkeypatch.setattr("sys.argv", ["twinphase", "bench", *words.split()])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bench(words) == 0
    for path in ("result.json", "report.md", "report.html"):
        text = (tmp_path / "out" / path).read_text()
        assert "secret" not in text.lower()
        assert str(tmp_path) not in text
    assert "--api-key ***" in read_result(tmp_path / "out").conditions["command"]


@pytest.mark.slow
def test_sweep_of_a_server_has_its_requests(stub, on_time, tmp_path, capsys):
    stub.script(
        {
            "gaps": [0.0005] * 16,
            "timings": {
                "prompt_ms": 1.5,
                "prompt_n": 20,
                "predicted_ms": 8.0,
                "predicted_n": 17,
                "cache_n": 0,
            },
        }
    )
    report = bench_json(capsys, f"{stub.url} {FEW} --repetitions 1")
    sections = {section["title"]: section for section in report["sections"]}
    assert "Client TTFT" in sections["Both phases"]["paragraphs"][0]
    assert len(report["data"]["client"]["requests"]) > 20
    assert list(tmp_path.iterdir()) == []  # --json alone writes nothing


def test_load_instead_of_the_sweep(url, on_time, capsys):
    load = "--request-rate 50 --num-prompts 12 --goodput ttft:5000 tpot:500"
    report = bench_json(capsys, f"{url} {load}")
    assert "phase sweep" not in report["data"]
    assert len(report["data"]["load"]["observations"]) == 12
    assert report["data"]["load"]["slos"] == {"ttft": 5.0, "tpot": 0.5}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("nothing-like-this", "'nothing-like-this'"),
        ("x.gguf y.gguf", "'y.gguf' is a second one"),
        ("compare one", "two results"),
        ("compare a b c", "two results"),
        ("URL", "Nothing answers at"),
        ("URL --goodput ttft:500", "--goodput needs a load"),
        ("URL --request-rate 2 --goodput ttft:soon", "--goodput 'ttft:soon'"),
        ("URL --request-rate 2 --max-concurrency 2", "a cap on the open loop in vLLM"),
        ("URL --request-rate 0", "--request-rate is 0.0"),
        ("URL --request-rate nan", "--request-rate is nan"),
        ("URL --constant", "--constant needs a load"),
        ("URL --max-concurrency 2 --constant", "--constant is a way of --request-rate"),
        ("URL --num-prompts 0 --request-rate 1", "--num-prompts is 0"),
        ("URL --random-input-len 0 --request-rate 1", "prompt lengths 0 to 0"),
        ("URL --random-input-len 5", "--random-input-len needs a load"),
        ("URL --random-output-len 5", "--random-output-len needs a load"),
        ("URL --num-prompts 5", "--num-prompts needs a load"),
        ("URL --batches a", "--batches is 'a'"),
        ("URL --request-rate 2 --batches 1,2", "--batches belongs to the sweep"),
        ("URL --request-rate 2 --max-length 100", "--max-length belongs to the sweep"),
        ("URL --repetitions 0", "'--repetitions'"),
        ("URL --max-num-seqs 4", "--max-num-seqs has no meaning"),
        ("URL --endpoint /v1/embeddings", "--endpoint is '/v1/embeddings'"),
        ("URL --timeout 0", "--timeout is 0.0"),
        ("x.gguf --timeout 5", "--timeout has no meaning"),
        ("x.gguf --api-key k", "--api-key has no meaning"),
        ("x.gguf --endpoint chat", "--endpoint has no meaning"),
        ("llama-cpp:x --max-num-seqs 2", "--max-num-seqs has no meaning"),
        ("transformers:x --model m", "--model has no meaning"),
        ("x.gguf --kv-cache-dtype int3", "kv_cache_dtype is 'int3'"),
        ("transformers:x --request-rate 2", "one batch at a time"),
        ("URL --request-rate 2 --scale-lengths 1", "--scale-lengths needs --trace"),
        ("URL --request-rate 2 --time-scale 1", "--time-scale needs --trace"),
        (
            "URL --trace x --request-rate 2 --time-scale 0.5",
            "--time-scale has no meaning where a rate",
        ),
        (
            "URL --trace x --max-concurrency 2 --time-scale 2",
            "--time-scale has no meaning where a rate",
        ),
        ("URL --trace x --random-input-len 5", "--random-input-len has no meaning with --trace"),
        ("URL --trace x --random-output-len 5", "--random-output-len has no meaning with --trace"),
        ("URL --trace x --constant", "--constant has no meaning at the times of a trace"),
        ("URL --trace x --scale-lengths 0", "--scale-lengths is 0.0"),
        ("URL --trace x --scale-lengths=-1", "--scale-lengths is -1.0"),
        ("URL --trace x --quick", "--quick has no meaning with --trace"),
    ],
)
def test_bad_usage_is_one_line_that_names_the_option_and_exit_code_2(words, named, capsys):
    assert bench(words.replace("URL", "http://localhost:1")) == 2
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith("twinphase bench: opening")
    ]
    assert len(lines) == 1 and lines[0].startswith("error: ") and named in lines[0], lines


def test_options_that_are_used_are_not_refused():
    LoadOptions(
        trace=Path("x"), scale_lengths=0.5, time_scale=2.0, num_prompts=5, repetitions=3
    ).check()


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ("auto", (None, "auto")),
        ("chat", ("chat", "/v1/chat/completions")),
        ("completions", ("completions", "/v1/completions", "v1/completions/")),
    ],
)
def test_endpoints_may_be_paths(route, words):
    assert {TargetOptions(endpoint=word).server["endpoint"] for word in words} == {route}


def test_a_void_run_has_an_exit_code_of_its_own(url, monkeypatch, capsys):
    monkeypatch.setattr(
        "twinphase_bench.client.health.MAX_CORE_SHARE", -1.0
    )  # no client is that idle
    load = "--request-rate 100 --num-prompts 6 --repetitions 2"
    server = "--endpoint /v1/completions --timeout 30"
    report = bench_json(capsys, f"{url} {load} {server}", VOID_EXIT_CODE)
    assert VOID_EXIT_CODE == 10
    assert report["verdicts"][0]["status"] == "void" and report["metrics"] == []
    first = report["data"]["load"]
    (second,) = first["further runs"]
    assert len(first["observations"]) == len(second["observations"]) == 6
    assert first["conditions"]["seed"] != second["conditions"]["seed"]
    assert report["sections"][0]["title"] == "Runs of the load"


def test_a_load_ends_when_its_time_is_over(url, on_time, capsys):
    words = f"{url} --request-rate 20 --constant --num-prompts 100 --max-seconds 1"
    load = bench_json(capsys, words)["data"]["load"]
    assert len(load["observations"]) == 21  # at 0, 0.05, .. 1.0 seconds
    assert load["num_requests"] == 100 and not load["client"]["not_sent"]


@pytest.mark.parametrize(
    ("words", "levels", "expected"),
    [
        # Wherever service levels stand.
        ("ttft:500 tpot:50 http://h", ["e2el:5"], ("http://h", [], ["ttft:500", "tpot:50"])),
        ("ttft:500 http://h tpot:50", ["e2el:5"], ("http://h", [], ["ttft:500", "tpot:50"])),
        ("http://h ttft:500 tpot:50", ["e2el:5"], ("http://h", [], ["ttft:500", "tpot:50"])),
        # Words that are no levels stay words.
        ("localhost:8000", ["ttft:5"], ("localhost:8000", [], [])),
        ("a tpot:5", [], ("a", ["tpot:5"], [])),
        # A misspelt one is refused as a level.
        ("a ttf:5 b", ["ttft:5"], ("a", ["b"], ["ttf:5"])),
    ],
)
def test_service_levels_are_told_from_targets(words, levels, expected):
    target, *more = words.split()
    assert _apart(target, more, levels) == expected


def test_service_levels_alone_are_no_target():
    with pytest.raises(InvalidRequestError, match="No target"):
        _apart("tpot:5", [], ["ttft:5"])
