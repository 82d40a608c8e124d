"""The lab end to end on a tiny model, its report, its command, and the engine stepped by hand."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
from rich.console import Console

from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams
from twinphase.cli import run_app
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.engine.stepped import Workshop
from twinphase.errors import OutOfMemoryError
from twinphase.phases.hardware import Ceilings
from twinphase.progress import live
from twinphase.server.live.recording import read_recording
from twinphase_bench.lab.lab import EXPERIMENTS, choose, planned_seconds, run_lab
from twinphase_bench.lab.report import _title, make_report
from twinphase_bench.report.render import write_report
from twinphase_bench.report.report import Status
from twinphase_bench.report.result import read_result, result_json
from twinphase_bench.report.terminal import show
from twinphase_bench.roofline.measure import RooflinePoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_gguf(tmp_path_factory.mktemp("lab") / "tiny.gguf"))


@pytest.fixture(scope="module", autouse=True)
def known_ceilings():
    """Ceilings are given, since measuring them has its own tests; nothing is stored."""
    ceilings = Ceilings(
        "a processor", 2, "generic", ((2**20, 4e10), (2**30, 4e10)), 1e12, 2e11, None
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("measured_ceilings", None),
            ("measure_ceilings", [ceilings]),
            ("save_ceilings", None),
        ):
            patch.setattr(f"twinphase_bench.lab.lab.{name}", lambda _, value=value: value)
        patch.setenv(KEY_VARIABLE, "put back after these tests")
        yield


@pytest.fixture(scope="module")
def made(tiny):
    told = []
    *found, bystanders = run_lab(tiny, seconds=4.0, progress=lambda *what: told.append(what))
    return make_report(*found, bystanders), found[1], told


def test_every_claim_gets_a_verdict_with_numbers(made):
    report, conclusions, _ = made
    assert [one.experiment for one in conclusions] == list(EXPERIMENTS)
    assert len(report.verdicts) == len(report.sections) == len(EXPERIMENTS)
    for verdict, conclusion in zip(report.verdicts, conclusions, strict=True):
        assert verdict.status in (Status.HOLDS, Status.FAILS, Status.UNKNOWN)
        assert conclusion.experiment.claim in verdict.text
        assert bool(verdict.reason) is (verdict.status is not Status.HOLDS)
        assert (conclusion.trial.why in verdict.reason) is (verdict.status is Status.FAILS)


def recorded(path):
    """The lanes of a recording by number, and the chunks and decodes of each."""
    events = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    chunks = defaultdict(list)
    decodes = defaultdict(list)
    stalls = defaultdict(float)
    for event in (event for event in events if event["event"] == "steps"):
        for column, found in (("pre", chunks), ("dec", decodes)):
            for step in event[column]:
                for lane, *numbers in step:
                    found[lane].append(numbers)
        times = (event[name] for name in ("duration_ms", "decode_ms", "bookkeeping_ms"))
        for pre, dec, whole, own, after in zip(event["pre"], event["dec"], *times, strict=True):
            for lane, *_ in dec if pre else ():
                stalls[lane] += whole - own + after
    return {
        number: (lane, chunks[number], decodes[number], stalls[number])
        for (_, number), lane in read_recording(path).lanes.items()
    }


def test_recordings_have_every_token_of_each_variant(tiny, tmp_path):
    chosen = choose(["chunked-prefill", "speculation"])
    run_lab(tiny, experiments=chosen, seconds=0.1, recordings=tmp_path)
    found = {path.name.removesuffix(".jsonl.gz"): recorded(path) for path in tmp_path.iterdir()}
    assert {name.partition("-")[0] for name in found} == {"chunked", "speculation"}
    for lanes in found.values():
        for lane, chunks, decodes, stall in lanes.values():
            timings = lane["timings"]
            assert lane["cached"] + sum(tokens for tokens, *_ in chunks) == lane["prompt"]
            assert 1 + sum(tokens for tokens, *_ in decodes) == timings["predicted_n"]
            ledger = timings["ledger_ms"]
            assert sum(ledger.values()) == pytest.approx(timings["e2e_ms"], abs=0.01)
            assert stall == pytest.approx(ledger["stall"], abs=0.05 + 0.001 * len(decodes))

    def chunks_of_the_longest(name):
        return len(max(found[name].values(), key=lambda lane: lane[0]["prompt"])[1])

    small, *_, whole = sorted(
        (name for name in found if name.startswith("chunked")), key=lambda name: "whole" in name
    )
    assert chunks_of_the_longest(whole) == 1 < chunks_of_the_longest(small)
    (plain,), (right,) = (
        found[name].values() for name in ("speculation-no-drafts", "speculation-7-right-drafts")
    )
    assert len(right[2]) < len(plain[2]) == right[0]["timings"]["predicted_n"] - 1
    assert all(tokens == drafted + 1 for tokens, drafted in (one for one in right[2] if one[1:]))


def test_what_no_noise_can_change_is_the_same_everywhere(made):
    found = {one.experiment.name: one for one in made[1]}
    assert found["same-tokens"].status is Status.HOLDS
    judged = {
        (name, one.rule.name): one
        for name, conclusion in found.items()
        for one in conclusion.judged
    }
    assert judged["prompt-cache", "answers that differ"].status is Status.HOLDS
    assert judged["no-kv-cache", "tokens that differ"].status is Status.HOLDS
    visits = found["prompt-cache"].trial.runs
    assert visits[max(visits)]["tokens computed the second time"][0] < 32
    steps = {way: runs["steps"][0] for way, runs in found["static-batching"].trial.runs.items()}
    assert steps["continuous"] <= steps["static"] == steps["static, padded to the longest answer"]


def test_every_section_states_rule_numbers_plot_and_meaning(made):
    report, conclusions, _ = made
    for section, conclusion in zip(report.sections, conclusions, strict=True):
        assert section.plots
        assert section.paragraphs[0].startswith("How it was tried")
        assert (conclusion.experiment.meaning in section.paragraphs[-1]) is (
            conclusion.status is Status.HOLDS
        )
        rules = section.tables[0].rows
        assert [row[0] for row in rules] == [rule.name for rule in conclusion.experiment.rules]


def test_the_report_has_its_conditions_and_everything_raw_and_can_be_read_again(made, tmp_path):
    report, conclusions, _ = made
    assert "Q4_0 weights" in report.conditions["precision"]
    assert set(report.data["experiments"]) == {one.name for one in EXPERIMENTS}
    raw = report.data["experiments"]["prefill-length"]
    assert all(found["prefill, ms"] for found in raw["runs"].values())
    for experiment in report.data["experiments"].values():
        assert all(
            bool(rule["reason"]) is (rule["status"] == "unknown") for rule in experiment["rules"]
        )
    assert any("instead of" in line for line in report.noise)  # the tiny model's context is short
    assert all(math.isfinite(value) for metric in report.metrics for value in metric.values)
    path = tmp_path / "result.json"
    path.write_text(result_json(report))
    assert result_json(read_result(path)) == path.read_text()


@pytest.fixture(scope="module")
def written(made, tmp_path_factory):
    return write_report(made[0], tmp_path_factory.mktemp("report"))


@pytest.mark.slow  # thirteen PNGs
def test_the_files_are_written(made, written):
    assert len(written.plots) == sum(len(section.plots) for section in made[0].sections)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.plots)


@pytest.mark.slow
def test_the_page_draws_every_plot_without_a_complaint(made, written, browser):
    browser.look()
    browser.open(written.html, "document.documentElement.dataset.state === 'drawn'")
    charts = "[...document.querySelectorAll('figure[data-plot]')]"
    drawn = browser.evaluate(f"{charts}.map((chart) => [chart.dataset.plot, chart.dataset.state])")
    assert drawn == [[plot.name, "drawn"] for section in made[0].sections for plot in section.plots]
    assert browser.complaints() == []
    shown = browser.evaluate("document.body.innerText")
    assert all(conclusion.experiment.claim in shown for conclusion in made[1])
    assert {one.experiment.name for one in made[1] if one.experiment.meaning in shown} == {
        one.experiment.name for one in made[1] if one.status is Status.HOLDS
    }


def test_progress_says_which_claim_and_rises_to_the_end(made):
    told = [what for what, _, total in made[2] if total]
    shares = [done / total for _, done, total in made[2] if total]
    assert shares == sorted(shares) and shares[-1] == 1
    count = len(EXPERIMENTS)
    assert f"claim 4 of {count}: {EXPERIMENTS[3].name}" in told
    stream = io.StringIO()
    with live("twinphase lab", stream, percent=True) as progress:
        progress(told[0], 334, 1400)
    assert stream.getvalue().startswith(f"twinphase lab: 23 % claim 1 of {count}: ")


def test_progress_is_whole_on_a_narrow_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    claim = (
        f"claim {len(EXPERIMENTS)} of {len(EXPERIMENTS)}: "
        f"{max((one.name for one in EXPERIMENTS), key=len)}"
    )
    point = str(RooflinePoint("decode", 4096, 1))
    for title, percent, longest in (
        ("twinphase lab", True, claim),
        ("twinphase roofline", False, point),
    ):
        stream = Terminal()
        with live(title, stream, percent=percent) as progress:
            progress(longest, 12, 17)
        assert longest in stream.getvalue()


@pytest.mark.parametrize(("others", "disturbed"), [(None, False), (0.2, False), (0.44, True)])
def test_the_headline_counts_all_three_and_says_when_it_was_not_quiet(others, disturbed):
    statuses = [Status.HOLDS] * 3 + [Status.FAILS] * 3 + [Status.UNKNOWN] * 8
    title = _title(statuses, others)
    assert "3 hold, 3 do not, 8 could not be decided" in title
    assert (
        ("(others used 0.44 of" in title) is ("run it again when it is quiet" in title) is disturbed
    )


def test_the_terminal_shows_every_claim_and_rule(made, capsys):
    show(made[0], tables="none", console=Console(width=400, highlight=False))
    shown = capsys.readouterr().out
    for conclusion in made[1]:
        assert conclusion.experiment.claim in shown
        assert all(f"{one.line}, must be {one.rule.text}"[1:] in shown for one in conclusion.judged)


def test_the_command(tiny, tmp_path, capsys):
    options = f"--only phase-ratio --only 9 --seconds 1 --out {tmp_path} --json"
    assert run_app(["lab", tiny, *options.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["data"]["experiments"]) == {"phase-ratio", "same-tokens"}
    assert (tmp_path / "report.html").exists()


def test_all_claims_take_under_three_minutes_and_the_quick_ones_about_one():
    assert planned_seconds(EXPERIMENTS) <= 160
    assert planned_seconds(choose(quick=True)) <= 65


def test_the_command_lists_without_measuring(capsys):
    assert run_app(["lab", "no such model", "--list"]) == 0
    listed = capsys.readouterr().out
    assert (
        max(map(len, listed.splitlines())) > 80
    )  # no terminal, so no need to break lines at its usual width
    assert all(experiment.name in listed for experiment in EXPERIMENTS)


@pytest.mark.parametrize(
    "wrong", ["--only nonsense", "--seconds 0", "--seconds nan", "--threads 0"]
)
def test_wrong_arguments_are_told_before_anything_is_measured(tiny, wrong, capsys):
    assert run_app(["lab", tiny, *wrong.split()]) == 2
    assert "error:" in capsys.readouterr().err


def test_one_experiment_that_fails_loses_only_itself(tiny, tmp_path):
    def no_room(bench):
        raise OutOfMemoryError("No memory for the weights: 99.0 GB.", "Use a smaller model.")

    def no_memory(bench):
        raise MemoryError

    bounds, cores, same = choose(["bounds", "cores", "same-tokens"])
    broken = (replace(bounds, measure=no_room), replace(cores, measure=no_memory), same)
    setting, conclusions, bystanders = run_lab(tiny, experiments=broken, seconds=1.0)
    report = make_report(setting, conclusions, bystanders)
    assert [one.status for one in conclusions] == [Status.UNKNOWN, Status.UNKNOWN, Status.HOLDS]
    assert "No memory for the weights: 99.0 GB." in report.verdicts[0].reason
    assert "memory" in report.verdicts[1].reason
    assert report.data["experiments"]["bounds"]["runs"] == {}
    write_report(report, tmp_path)
    show(report, tables="none", console=Console(width=400, highlight=False))


def test_an_engine_stepped_by_hand_gives_the_tokens_of_an_llm(tiny):
    workshop = Workshop(tiny, max_num_batched_tokens=128)
    prompt = list(range(3, 43))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = (
        LLM(tiny)
        .generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
        .outputs[0]
        .token_ids
    )
    for settings in (
        {},
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": True},
        {"max_num_seqs": 1},
    ):
        engine = workshop.engine(**settings)
        tickets = [engine.submit(prompt, 8), engine.submit(list(range(50, 70)), 3)]
        records = engine.run()
        assert tickets[0].tokens == list(expected)
        assert sum(record.prefill_tokens for record in records) == 60
        assert all(
            wall >= record.seconds for wall, record in zip(engine.walls, records, strict=True)
        )
        assert tickets[0].times == sorted(tickets[0].times)
        assert len(tickets[0].gaps) == 7
        assert 0 < tickets[0].ttft <= tickets[0].e2e
