"""What a client alone can tell, of requests that a real engine served, and what it must not claim."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provoked import Engine
from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.bench.load.diagnosis import explain_client
from twinphase.bench.load.results import ClientRequest, Load, read_loads
from twinphase.cli import run_app
from twinphase.explain.saved import SavedLedgerError


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path = write_tiny_gguf(folder / "tiny.gguf", hidden=128, layers=4, ffn=512, tensor_type="F32", context=4096)
    with own_cache(folder / "cache"):
        yield lambda **config: Engine(path, **config).warm()


def observed(life, **known):
    """What a client would have written down."""
    request, timeline = life
    counts = {"num_prompt_tokens": len(request.prompt_token_ids), "num_output_tokens": len(request.output_token_ids)}
    return {"intended": timeline.arrival, "token_times": timeline.token_times, "error": "", **counts, **known}


def causes(*loads):
    data = {"loads": [{"rate": rate, "observations": observations} for rate, observations in loads]}
    return [one.cause for one in explain_client(read_loads(data)).diagnoses]


def test_ttft_that_grows_with_the_load_is_queue(start):
    engine = start(max_num_seqs=1)
    quiet = [observed(engine.serve(engine.prompt(40), 20)) for _ in range(8)]
    lives = [engine.add(engine.prompt(40), 20) for _ in range(12)]
    engine.run()
    crowd = [observed(life) for life in lives]
    assert causes((1.0, quiet), (9.0, crowd))[0] == "queue"
    assert causes((1.0, quiet)) == []


def test_ttft_that_grows_with_the_prompt_is_prefill(start):
    engine = start()
    lengths = [50, 1500, 300, 1000, 600, 1200, 100, 800, 1500, 400]
    found = causes((1.0, [observed(engine.serve(engine.prompt(length), 3)) for length in lengths]))
    assert found == ["prompt_length"]
    assert "prompt_length" not in causes((1.0, [observed(engine.serve(engine.prompt(50), 3)) for _ in range(10)]))


def test_gaps_that_grow_while_others_prompts_come_are_stalls(start):
    engine = start()
    life = engine.add(engine.prompt(30), 60)
    others = []
    for at in (10, 20, 30, 40):
        engine.run(lambda at=at: len(life[0].output_token_ids) >= at)
        others.append(engine.add(engine.prompt(1000), 1))
    engine.run()
    found = causes((1.0, [observed(life), *map(observed, others)]))
    assert "stalls" in found and "decode_batching" not in found
    assert "stalls" not in causes((1.0, [observed(engine.serve(engine.prompt(30), 60)) for _ in range(3)]))


def test_tpot_that_grows_with_company_is_batching(start):
    engine = start()
    alone = [observed(engine.serve(engine.prompt(30), 30)) for _ in range(8)]
    lives = [engine.add(engine.prompt(30), 30) for _ in range(24)]
    engine.run()
    assert "decode_batching" in causes((1.0, alone), (9.0, [observed(life) for life in lives]))
    assert "decode_batching" not in causes((1.0, alone))


def request(sent, times, **fields):
    return ClientRequest(sent, tuple(times), **fields)


def test_company_is_counted_as_it_was():
    load = Load("x", (request(0, [1, 5]), request(2, [3, 4]), request(4.5, [6, 7]), request(8, [9])))
    assert [load.others_before(one) for one in load.requests] == [0, 1, 1, 0]
    burst = Load("x", tuple(request(0, [n, n + 1]) for n in range(1, 4)))
    assert [burst.others_before(one) for one in burst.requests] == [2, 2, 2]
    assert load.others_decoding(load.requests[0]) == pytest.approx(0.25)  # of 4 seconds one
    assert load.others_reading(3.5, 4.4) == 0 and load.others_reading(3.5, 4.6) == 1


def test_comparisons_of_other_requests_are_no_shares_of_one_whole(tmp_path, capsys):
    """TTFT is long for the load and for the prompts alike: shares of each would be more than all of it."""
    lengths = [100, 200, 400, 800, 1600]
    alone = [(20.0 * n, length) for n, length in enumerate(lengths)]
    crowd = [(200.0 + 0.1 * n, length) for n, length in enumerate(lengths * 3)]
    observations = [
        {"intended": at, "token_times": [at + length / 200 + (length / 20 if at >= 200 else 0) + n * 2e-3 * length
                                         for n in range(5)], "error": "", "num_prompt_tokens": length,
         "num_output_tokens": 5}
        for at, length in alone + crowd
    ]  # fmt: skip
    data = {"loads": [{"rate": 1.0, "observations": observations}]}
    found = explain_client(read_loads(data)).diagnoses
    assert {"queue", "prompt_length"} <= {one.cause for one in found}
    assert all(one.share is None for one in found)
    assert next(one for one in found if one.cause == "queue").evidence.count("times as long") == 1
    (tmp_path / "result.json").write_text(json.dumps({"format": "twinphase-result", "data": data}))
    assert run_app(["explain", str(tmp_path)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("- queue", "- prompt length"))]
    assert len(told) == 2 and not any("%" in line for line in told)


def test_what_is_said_of_a_load_is_said_of_its_requests(tmp_path, capsys):
    observations = [{"intended": 20.0 * n, "token_times": [20.0 * n + 1.0 + n, 20.0 * n + 3.0 + n], "error": "",
                     "num_prompt_tokens": 100 * (1 + n), "num_output_tokens": 5} for n in range(10)]  # fmt: skip
    data = {"load": {"observations": observations}}
    (tmp_path / "result.json").write_text(json.dumps({"format": "twinphase-result", "data": data}))
    assert run_app(["explain", str(tmp_path)]) == 0
    assert "What to change, by what it would save of these requests" in capsys.readouterr().out


def test_nobody_beside_is_not_a_little_less_than_nobody():
    load = Load("x", tuple(request(1e9 + 0.1 * n, [1e9 + 0.1 * n + 0.01, 1e9 + 0.1 * n + 0.03]) for n in range(50)))
    assert not any(f"{load.others_decoding(one)}".startswith("-") for one in load.requests)


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("bench", {"target": {}, "phase sweep": {"points": []}}, "a phase sweep"),
        ("bench", {"target": {}, "load": {"observations": []}}, "a load's result"),
        ("lab", {"speed": 1.0}, "a lab result"),
        ("roofline", {}, "a roofline"),
    ],
)
def test_a_result_that_is_no_load_is_named(kind, data, words, tmp_path, capsys):
    (tmp_path / "result.json").write_text(json.dumps({"format": "twinphase-result", "kind": kind, "data": data}))
    assert run_app(["explain", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"The file is {words}, with no load" in " ".join(told.split())
    assert "--request-rate" in told and "--max-concurrency" in told


MOMENTS = st.tuples(st.floats(0, 9), st.lists(st.floats(0.1, 9), min_size=1, max_size=4))


@given(st.lists(MOMENTS, min_size=1, max_size=8))
def test_company_is_what_comparing_each_with_each_gives(moments):
    requests = []
    for sent, gaps in moments:
        times = [sent + sum(gaps[: n + 1]) for n in range(len(gaps))]
        requests.append(request(sent, times))
    load = Load("x", tuple(requests))
    for one in requests:
        others = [other for other in requests if other is not one]
        assert load.others_before(one) == sum(o.sent <= one.sent < o.times[-1] for o in others)
        start, end = one.times[0], one.times[-1]
        if end - start > 0.01:
            beside = sum(max(0.0, min(end, o.times[-1]) - max(start, o.times[0])) for o in others)
            assert load.others_decoding(one) == pytest.approx(beside / (end - start), abs=1e-6)


def test_what_cannot_be_told_is_unknown():
    plain = [{"intended": float(n), "token_times": [n + 0.5, n + 0.75], "error": ""} for n in range(3)]
    failed = {"intended": 9.0, "token_times": [], "error": "503"}
    found = explain_client(read_loads({"rate": 3.0, "observations": [*plain, failed], "void": ["the client was late"]}))
    assert found.unknown[0] == "Everything at 3 requests/s: that run is void, the client was late."
    assert found.num_requests == 3 and not found.diagnoses
    assert [bar.share for bar in found.waterfall.bars] == pytest.approx([2 / 3, 1 / 3])
    text = " ".join(found.unknown)
    for words in ("What bound each phase", "Had it run alone", "counts no output tokens", "Cache pressure"):
        assert words in text


def test_the_servers_own_ledgers_are_quoted(tmp_path, capsys):
    claims = {"timings": {"ledger_ms": {"queue": 30.0, "decode": 10.0}}}
    data = {"observations": [{"intended": 0.0, "token_times": [1.0], "error": "", "claims": claims}]}
    found = explain_client(read_loads(data))
    assert found.diagnoses == () and "75% queue, 25% decode" in found.claims  # its word, and no cause
    (tmp_path / "result.json").write_text(json.dumps({"format": "twinphase-result", "data": data}))
    assert run_app(["explain", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    said = shown.partition("\nWhat the server itself says\n")[2].splitlines()[0]
    assert said.startswith("By its own ledgers of 1 requests") and "claims" not in shown


@pytest.mark.parametrize("data", [None, {}, {"observations": []}, {"observations": [{"error": "x"}, 3]}, [[]]])
def test_a_result_without_requests_is_refused(data):
    with pytest.raises(SavedLedgerError, match="no load"):
        read_loads(data)


def test_the_command_takes_a_result(tmp_path, capsys):
    observations = [{"intended": float(n), "token_times": [n + 0.5, n + 0.75], "error": ""} for n in range(3)]
    result = {"format": "twinphase-result", "version": 1, "data": {"load": {"observations": observations}}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    for what in (tmp_path, tmp_path / "result.json"):
        assert run_app(["explain", str(what)]) == 0
        shown = capsys.readouterr().out
        assert "3 requests as a client saw them" in shown and "Unknown from outside" in shown and "66.7 %" in shown
