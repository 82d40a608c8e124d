"""Files without a ledger, or a damaged one, are refused with a reason; others are restored."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinphase.commands.explain_saved import SavedLedgerError, read_ledger
from twinphase.commands.explain_source import from_file
from twinphase.commands.explain_view import lines
from twinphase.errors import ResultError
from twinphase.explain.explanation import explain_evidence
from twinphase.explain.waterfall import WaterfallError
from twinphase.phases.hardware import BOUND_WORDS
from twinphase.phases.timeline import IntervalKind

TIMINGS = {
    "cache_n": 16,
    "prompt_n": 84,
    "predicted_n": 3,
    "ttft_ms": 60.0,
    "tpot_ms": 20.0,
    "e2e_ms": 100.0,
    "ledger_ms": {"tokenize": 1.0, "queue": 9.0, "prefill": 50.0, "decode": 30.0, "stall": 10.0},
    "num_preemptions": 0,
    "prefix_miss": {"reason": "evicted", "token_index": 16, "num_known": 80},
}
TIMELINE = {
    "id": "r",
    "e2e_ms": 100.0,
    "token_times_ms": [60.0, 80.0, 100.0],
    "intervals": [
        {"kind": "queue", "start_ms": 0.0, "end_ms": 10.0, "reason": "seats"},
        {"kind": "prefill", "start_ms": 10.0, "end_ms": 60.0, "step": 3},
        {"kind": "decode", "start_ms": 60.0, "end_ms": 90.0, "step": 4},
        {"kind": "stall", "start_ms": 90.0, "end_ms": 100.0, "step": 5, "prefill_tokens": 64},
    ],
    "prefill": {"steps": 1, "tokens": 84},
    "decode": {"steps": 2, "tokens": 2, "decodes": 4},
    "request": {"num_prompt_tokens": 100, "num_cached_tokens": 16},
}
RUN = {
    "usage": {"prompt_tokens": 10, "completion_tokens": 3},
    "timing": {
        "wall_seconds": 1.0,
        "ttft": 0.2,
        "tpot": 0.05,
        "phases": [
            {
                "name": "prefill",
                "seconds": 0.2,
                "metric": "MFU",
                "efficiency": 0.5,
                "other_efficiency": 0.1,
                "bound": "compute",
            },
            {
                "name": "decode",
                "seconds": 0.1,
                "metric": "MBU",
                "efficiency": 1.4,
                "other_efficiency": None,
                "bound": "memory",
            },
        ],
        "rest": [{"name": "load", "seconds": 0.7}, {"name": "unattributed", "seconds": 0.0}],
    },
}


def changed(form, path, value):
    """A copy with one value replaced, or removed if `value` is `...`."""
    form = copy.deepcopy(form)
    holder = form
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    elif path:
        holder[path[-1]] = value
    return form


@pytest.mark.parametrize(
    "form", [TIMINGS, {"timings": TIMINGS}, {"choices": [{"timings": TIMINGS}]}]
)
def test_timings_of_an_answer(form):
    found = explain_evidence(read_ledger(form))
    assert found.waterfall.wall_seconds == pytest.approx(
        0.1
    ) and found.waterfall.first_token == pytest.approx(0.06)
    assert [one.cause for one in found.diagnoses] == [
        "missed_prefix",
        "queue",
        "unknown_bound",
        "stalls",
    ]
    assert found.tpot == pytest.approx(0.02)


def test_a_timeline():
    found = explain_evidence(read_ledger(TIMELINE))
    assert [one.cause for one in found.diagnoses] == [
        "prompt_length",
        "queue",
        "unknown_bound",
        "stalls",
    ]
    assert "all seats were taken" in found.diagnoses[1].evidence


@pytest.mark.parametrize("bound", [*BOUND_WORDS, "unknown"])
def test_every_bound_that_a_run_reports_can_be_explained_later(bound):
    form = changed(RUN, ("timing", "phases", 0, "bound"), bound)
    assert read_ledger(form).efficiency("prefill").bound == bound


def test_a_run_with_what_came_before_it():
    found = explain_evidence(read_ledger(RUN))
    assert [(bar.name, round(bar.share, 3)) for bar in found.waterfall.bars] == [
        ("load", 0.7),
        ("prefill", 0.2),
        ("decode", 0.1),
    ]
    assert [one.cause for one in found.diagnoses] == ["cold_start", "prompt_length", "model_size"]
    assert found.efficiency["decode"].mbu == 1.4 and found.efficiency["decode"].mfu is None


@pytest.mark.parametrize(
    ("form", "path", "value", "error", "words"),
    [
        (TIMINGS, ["e2e_ms"], 200.0, WaterfallError, "add up to 100.000 ms"),
        (TIMINGS, ["ledger_ms", "queue"], float("nan"), SavedLedgerError, "NaN"),
        (TIMINGS, ["ledger_ms", "queue"], -5.0, SavedLedgerError, "negative"),
        (TIMINGS, ["ledger_ms", "lunch"], 5.0, SavedLedgerError, "lunch is not a kind"),
        (TIMINGS, ["prompt_n"], 10**12, SavedLedgerError, "<= 16777216"),
        (TIMINGS, ["prefix_miss", "reason"], "luck", SavedLedgerError, "luck"),
        (TIMELINE, ["intervals", 1, "start_ms"], 12.0, WaterfallError, "begins at 12.000 ms"),
        (TIMELINE, ["intervals", 1, "kind"], "nap", SavedLedgerError, "nap"),
        (RUN, ["timing", "wall_seconds"], 2.0, WaterfallError, "add up"),
        ({"timings": {"prompt_ms": 3}}, [], None, SavedLedgerError, "another server"),
        ({"hello": 1}, [], None, SavedLedgerError, "no ledger"),
        ([1], [], None, SavedLedgerError, "list"),
    ],
)
def test_what_is_damaged_is_refused(form, path, value, error, words):
    with pytest.raises(error, match=words):
        explain_evidence(read_ledger(changed(form, path, value)))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**20),
    st.just(10**400),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.none()),
    st.dictionaries(st.text(max_size=2), st.none()),
)


@settings(suppress_health_check=list(HealthCheck), deadline=None, derandomize=True)
@given(st.sampled_from([TIMINGS, TIMELINE, RUN]), st.data())
def test_whatever_is_in_a_file_is_an_explanation_or_an_error_of_ours(form, data):
    form = replaced(form, data)
    try:
        found = explain_evidence(read_ledger(form))
    except (SavedLedgerError, WaterfallError):
        return
    assert found.waterfall is None or sum(
        bar.share for bar in found.waterfall.bars
    ) == pytest.approx(1)


@pytest.fixture
def explained(tmp_path, twinphase):
    """The output of `explain` for a saved form."""

    def explain_file(form, *options):
        path = tmp_path / "form.json"
        path.write_text(form if isinstance(form, str) else json.dumps(form))
        return twinphase("explain", path, *options)

    return explain_file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\x00", "is not JSON"),
        ('"a"', "not an object"),
    ],
)
def test_the_command_says_what_files_it_takes(tmp_path, twinphase, explained, content, words):
    done = explained(content)
    assert done.code == 2
    assert all(named in done.error() for named in (words, "twinphase run --json", "result.json"))
    missing = twinphase("explain", tmp_path / "missing.json")
    assert missing.code == 2 and "cannot be read" in missing.error()
    assert twinphase("explain", tmp_path).code == 2


def test_the_command_draws_bars_that_follow_each_other(explained):
    shown = explained(TIMINGS).text().splitlines()
    bars = [
        line
        for line in shown
        if line.split(" ")[0] in {kind.value for kind in IntervalKind} and "█" in line
    ]
    starts = [line.index(next(c for c in line if c in "█▉▊▋▌▍▎▏")) for line in bars]
    assert len(bars) == 4 and starts == sorted(starts)
    assert any("100.0 %" in line for line in shown)


def client_result():
    observations = [
        {
            "request_id": "",
            "intended": n,
            "sent": n,
            "token_times": [n + 0.5, n + 0.75],
            "error": "",
        }
        for n in range(3)
    ]
    return {
        "format": "twinphase-result",
        "version": 1,
        "data": {"load": {"observations": observations}},
    }


DAMAGES = [
    (["id"], ...),  # taken away
    (["dominant"], ...),
    (["kind"], "client"),
    (["kind"], 3),
    (["waterfall"], None),
    (["waterfall", "wall_seconds"], 0),
    (["waterfall", "wall_seconds"], float("nan")),
    (["waterfall", "wall_seconds"], float("inf")),
    (["waterfall", "first_token"], float("nan")),
    (["waterfall", "bars", 0, "share"], 7.0),
    (["waterfall", "bars", 0, "seconds"], -1.0),
    (["diagnoses"], ["queue", "prefill"]),
    (["diagnoses", 0, "phase"], "lunch"),
    (["diagnoses", 0, "share"], "much"),
    (["diagnoses", 0, "evidence"], 3),
    (["efficiency", "decode"], "high"),
    (["efficiency", "decode", "mbu"], "high"),
    (["efficiency", "decode", "mbu"], 10**400),
    (["levers", 0, "saved_seconds"], float("nan")),
    (["levers", 0, "flag"], None),
    (["alone"], {"seconds": 1.0}),
    (["tpot"], float("-inf")),
]


@pytest.mark.parametrize(("path", "value"), DAMAGES)
def test_a_damaged_explanation_is_refused(explained, path, value):
    saved = explained(TIMELINE, "--json").json()
    done = explained(changed(saved, path, value))
    if path == ["id"]:  # the file's name is one
        assert done.code == 0
    else:
        assert done.code == 2 and len(done.error()) < 1000


def loaded(**observation):
    data = [{"observations": [{"request_id": "", "sent": 0.0, **observation}]}]
    return {"format": "twinphase-result", "data": data}


@pytest.mark.parametrize(
    "form",
    [
        {"waterfall": {"wall_seconds": 1.0, "first_token": None, "bars": []}, "diagnoses": []},
        {"waterfall": {}, "diagnoses": [], "kind": "client"},
        {**TIMELINE, "token_times_ms": [60.0, 80.0, 500.0]},
        {**TIMELINE, "token_times_ms": [80.0, 60.0]},
        {**TIMELINE, "token_times_ms": [float("nan")]},
        {**TIMELINE, "decode": {"seconds": float("nan")}},
        {**TIMELINE, "decode": {"bytes": 10**400}},
        {**TIMELINE, "e2e_ms": 10**400},
        {
            **TIMELINE,
            "intervals": [{"kind": "queue", "start_ms": 0, "end_ms": 100, "step": float("inf")}],
        },
        {**TIMELINE, "intervals": [], "e2e_ms": 0, "token_times_ms": []},
        {**TIMINGS, "prompt_n": 10**400},
        {
            **RUN,
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": "x"},
            },
        },
        {
            **RUN,
            "timing": {
                **RUN["timing"],
                "phases": [
                    {**RUN["timing"]["phases"][0], "efficiency": "high"},
                    RUN["timing"]["phases"][1],
                ],
            },
        },
        {**RUN, "explanation": "because"},
        {**RUN, "explanation": {"diagnoses": ["queue"]}},
        loaded(intended=1.0, token_times=[1.0]),
        loaded(intended=1.0, token_times=[10**400]),
        loaded(intended=2.0, token_times=[1.0]),
        loaded(intended=1.0, token_times=[2.0], num_output_tokens=-1),
        {"format": "twinphase-result", "kind": "explain", "data": {"kind": "client"}},
    ],
)
def test_odd_files_are_refused_with_one_clear_error(explained, form):
    done = explained(form)
    assert done.code == 2 and done.error()


def replaced(form, data):
    """A form with one value of it, however deep, replaced by any other."""
    path = []
    holder = form
    while not path or (
        isinstance(holder, (dict, list)) and holder and not data.draw(st.booleans())
    ):
        keys = sorted(holder) if isinstance(holder, dict) else list(range(len(holder)))
        path.append(data.draw(st.sampled_from(keys)))
        holder = holder[path[-1]]
    return changed(form, path, data.draw(VALUES))


@settings(
    suppress_health_check=list(HealthCheck), deadline=None, derandomize=True, max_examples=150
)
@given(st.data())
def test_whatever_is_in_a_saved_explanation_is_shown_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("saved") / "saved.json"
    form = data.draw(st.sampled_from([client_result(), TIMELINE]))
    path.write_text(json.dumps(form))
    if form is TIMELINE or data.draw(st.booleans()):
        form = from_file(path)
    path.write_text(json.dumps(replaced(form, data)))
    try:
        found = from_file(path)
    except (SavedLedgerError, ResultError, WaterfallError):
        return
    assert "\n".join(lines(found)) and json.dumps(found)
