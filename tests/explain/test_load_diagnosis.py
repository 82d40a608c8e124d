"""Diagnosis from a client's measurements of a real engine, and claims that it must not make."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provoked import Engine
from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.errors import ResultError
from twinphase.explain.load_diagnosis import explain_client
from twinphase.explain.loads import ObservedLoad, read_loads
from twinphase.phases.observation import Observation


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path = write_tiny_gguf(
        folder / "tiny.gguf", layers=1, tensor_type="F32", context=4096
    )  # its time is scripted
    with own_cache(folder / "cache"):
        yield lambda **config: Engine(path, **config)


def request(intended, token_times, **fields):
    return Observation("", intended, intended, list(token_times), **fields)


def entry(*args, **fields):
    """The observation as an entry of a result file."""
    return asdict(request(*args, **fields))


def observed(life):
    """The observation that a client would have recorded."""
    (served, timeline) = life
    counts = ("num_prompt_tokens", "num_output_tokens")
    lengths = (len(served.prompt_token_ids), len(served.output_token_ids))
    return entry(timeline.arrival, timeline.token_times, **dict(zip(counts, lengths, strict=True)))


@pytest.fixture
def explained(tmp_path, twinphase):
    """The output of the command for a result with that data."""

    def explain(data, **result):
        form = {"format": "twinphase-result", "data": data, **result}
        (tmp_path / "result.json").write_text(json.dumps(form))
        return twinphase("explain", tmp_path)

    return explain


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
    assert "prompt_length" not in causes(
        (1.0, [observed(engine.serve(engine.prompt(50), 3)) for _ in range(10)])
    )


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
    assert "stalls" not in causes(
        (1.0, [observed(engine.serve(engine.prompt(30), 60)) for _ in range(3)])
    )


def test_tpot_that_grows_with_company_is_batching(start):
    engine = start()
    alone = [observed(engine.serve(engine.prompt(30), 30)) for _ in range(8)]
    lives = [engine.add(engine.prompt(30), 30) for _ in range(16)]
    engine.run()
    assert "decode_batching" in causes((1.0, alone), (9.0, [observed(life) for life in lives]))
    assert "decode_batching" not in causes((1.0, alone))


def test_comparisons_of_other_requests_are_no_shares_of_one_whole(explained):
    """Both load and prompts make TTFT long: the sum of their shares would exceed the whole."""
    lengths = [100, 200, 400, 800, 1600]
    alone = [(20.0 * n, length) for n, length in enumerate(lengths)]
    crowd = [(200.0 + 0.1 * n, length) for n, length in enumerate(lengths * 3)]
    observations = []
    for at, length in alone + crowd:
        first = at + length / 200 + (length / 20 if at >= 200 else 0)
        times = [first + n * 2e-3 * length for n in range(5)]
        observations.append(entry(at, times, num_prompt_tokens=length, num_output_tokens=5))
    data = {"loads": [{"rate": 1.0, "observations": observations}]}
    found = explain_client(read_loads(data)).diagnoses
    assert {"queue", "prompt_length"} <= {one.cause for one in found}
    assert all(one.share is None for one in found)
    assert next(one for one in found if one.cause == "queue").evidence.count("times as long") == 1
    shown = explained(data).text()
    told = [line for line in shown.splitlines() if line.startswith(("- queue", "- prompt length"))]
    assert len(told) == 2 and not any("%" in line for line in told)
    assert "What to change, by what it would save these requests" in shown


def test_nobody_beside_is_not_a_little_less_than_nobody():
    sent = [1e9 + 0.1 * n for n in range(50)]
    load = ObservedLoad("x", tuple(request(at, [at + 0.01, at + 0.03]) for at in sent))
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
def test_a_result_that_is_no_load_is_named(kind, data, words, explained):
    done = explained(data, kind=kind)
    assert done.code == 2 and f"The file is {words}, with no load" in done.error()
    assert "--request-rate" in done.err and "--max-concurrency" in done.err


MOMENTS = st.tuples(st.floats(0, 9), st.lists(st.floats(0.1, 9), min_size=1, max_size=4))


@given(st.lists(MOMENTS, min_size=1, max_size=8))
def test_company_is_what_comparing_each_with_each_gives(moments):
    requests = []
    for sent, gaps in moments:
        times = [sent + sum(gaps[: n + 1]) for n in range(len(gaps))]
        requests.append(request(sent, times))
    load = ObservedLoad("x", tuple(requests))
    for one in requests:
        others = [other for other in requests if other is not one]
        assert load.others_before(one) == sum(
            o.intended <= one.intended < o.token_times[-1] for o in others
        )
        start = one.token_times[0]
        end = one.token_times[-1]
        reading = sum(o.intended < end and start < o.token_times[0] for o in requests)
        assert list(load.others_in_prefill([start], [end])) == [reading]
        if end - start > 0.01:
            beside = sum(
                max(0.0, min(end, o.token_times[-1]) - max(start, o.token_times[0])) for o in others
            )
            assert load.others_decoding(one) == pytest.approx(beside / (end - start), abs=1e-6)


PLAIN = [entry(float(n), [n + 0.5, n + 0.75]) for n in range(3)]


def test_what_cannot_be_told_is_unknown(tmp_path, twinphase, explained):
    damaged = [
        entry(9.0, [], error="503"),
        entry(9.0, [8.0]),
        entry(9.0, [float("nan")]),
        {"intended": 9.0},
        3,
    ]
    data = {"rate": 3.0, "observations": [*PLAIN, *damaged], "void": ["the client was late"]}
    found = explain_client(read_loads(data))
    assert found.unknown[0] == "Everything at 3 requests/s: that run is void, the client was late."
    assert found.num_requests == 3 and not found.diagnoses
    assert [bar.share for bar in found.waterfall.bars] == pytest.approx([2 / 3, 1 / 3])
    text = " ".join(found.unknown)
    for words in (
        "What bound each phase",
        "Had it run alone",
        "counts no output tokens",
        "Cache pressure",
    ):
        assert words in text
    shown = explained({"load": data}).text()
    assert twinphase("explain", tmp_path / "result.json").code == 0
    assert (
        "3 requests as a client saw them" in shown
        and "Unknown from outside" in shown
        and "66.7 %" in shown
    )


def test_the_servers_own_ledgers_are_quoted(explained):
    claims = {"timings": {"ledger_ms": {"queue": 30.0, "decode": 10.0}}}
    data = {"observations": [entry(0.0, [1.0], claims=claims)]}
    found = explain_client(read_loads(data))
    assert (
        found.diagnoses == () and "75 % queue, 25 % decode" in found.claims
    )  # its word, and no cause
    shown = explained(data).text()
    said = shown.partition("\nWhat the server itself says\n")[2].splitlines()[0]
    assert said.startswith("By its own ledgers of 1 requests") and "claims" not in shown


@pytest.mark.parametrize(
    "data", [None, {}, {"observations": []}, {"observations": [{"error": "x"}, 3]}, [[]]]
)
def test_a_result_without_requests_is_refused(data):
    with pytest.raises(ResultError, match="no load"):
        read_loads(data)
