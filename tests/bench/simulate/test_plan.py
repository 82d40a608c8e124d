"""`twinphase plan`: the search against hand-made truths, and the command's report."""

import json
import math

import pytest

from twinphase import Distribution, capacity_of
from twinphase.cli import run_app
from twinphase.errors import InvalidRequestError
from twinphase_bench.simulate import plan as planning
from twinphase_bench.simulate.levels import Levels
from twinphase_bench.simulate.plan import Demand, Space, proposals, search

WORDS = "llama-3.1-8b --hardware h100-sxm,l40s --price h100-sxm=3,l40s=1 --request-rate 6"
LENGTHS = "--prompt-tokens 400 --output-tokens 60"


def plan(capsys, words, code=0):
    assert run_app(["plan", *words.split()]) == code
    return capsys.readouterr()


def demand(rate):
    return Demand(Distribution.parse("400"), Distribution.parse("60"), rate=rate)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=0ms", "e2e=3s", "ttft=1s,ttft=2s", "itl=5"])
def test_what_is_no_level_is_refused(text):
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        Levels.parse(text)


def test_arithmetic_proposes_enough_workers_and_no_more():
    levels = Levels.parse("ttft=2s,itl=60ms")
    space = Space("llama-3.1-8b", {"h100-sxm": 1.0}, ranks=(1,), seats=(64,), chunks=(512,))
    for rate in (2.0, 40.0, 200.0):
        found = {one.layout: one for one in proposals(space, demand(rate), levels, [])}
        single = found["one pool"]
        worker = single.deployment.worker("both")
        use = rate * capacity_of(worker, single.load, levels.gap).seconds
        assert single.pools[0] == max(1, math.ceil(use / 0.75))
        assert sum(found["two pools"].pools) <= single.pools[0] + 2


def test_a_tighter_level_costs_more_and_an_impossible_one_is_not_promised(monkeypatch):
    monkeypatch.setattr(planning, "REQUESTS", (60, 60))
    space = Space("llama-3.1-8b", {"l40s": 1.0}, ranks=(1,), seats=(64,), chunks=(512,))

    def price(text):
        levels = Levels.parse(text)
        found = search(space, demand(40.0), levels, lambda *_: None, seconds=60.0, seed=1)
        holding = found.cheapest("two pools")
        return holding.candidate.price if holding else None

    loose = price("ttft=3s,itl=300ms")
    tight = price("ttft=3s,itl=30ms")
    assert loose is not None and tight is not None
    assert loose < tight
    # No device of these reads its weights in 5 ms.
    assert price("ttft=2s,itl=5ms") is None


def test_the_command_names_the_cheapest_its_limit_and_the_break_even(capsys, monkeypatch):
    monkeypatch.setattr(planning, "REQUESTS", (60, 60))
    words = f"{WORDS} {LENGTHS} --slo ttft=1s,itl=60ms --max-num-batched-tokens 512"
    found = json.loads(plan(capsys, f"{words} --json").out)
    texts = [verdict["text"] for verdict in found["verdicts"]]
    assert texts[0].startswith("Cheapest: ")
    assert any("Nearest limit" in text for text in texts)
    assert any("two pools" in text.lower() for text in texts)
    assert any(line.startswith("Bands: ") for line in found["noise"])
    fleets = found["data"]["fleets"]
    holding = [one["price_per_hour"] for one in fleets if not one["missed"]]
    assert f"at {min(holding):,.4g} per hour" in texts[0]
    for one in fleets:
        band = one["bands"]["ttft"]
        assert band["low"] < one["levels_seconds"]["ttft"] < band["high"]
        assert ("ttft" in one["too_close"]) == (band["low"] <= 1.0 <= band["high"])


def test_a_level_inside_the_band_is_too_close_to_say(capsys, monkeypatch):
    monkeypatch.setattr(planning, "REQUESTS", (60, 60))
    words = f"{WORDS} {LENGTHS} --max-num-batched-tokens 512 -tp 1"
    wide = json.loads(plan(capsys, f"{words} --slo ttft=1s,itl=60ms --json").out)
    (first, *_) = wide["data"]["fleets"]
    # A level just above what was simulated is kept by the simulation alone.
    level = 1.05e3 * first["levels_seconds"]["ttft"]
    found = json.loads(plan(capsys, f"{words} --slo ttft={level:.1f}ms,itl=60ms --json").out)
    close = [one for one in found["verdicts"] if one["text"].startswith("Too close to say")]
    assert len(close) == 1 and f"around the level of {level:,.0f} ms" in close[0]["text"]
    certain = [one for one in found["data"]["fleets"] if not one["missed"] + one["too_close"]]
    assert bool(certain) == ("with its whole bands" in close[0]["reason"])
    assert all(one["bands"]["ttft"]["high"] <= level / 1e3 for one in certain)


def test_speculation_that_is_accepted_makes_a_fleet_smaller(monkeypatch):
    monkeypatch.setattr(planning, "REQUESTS", (30, 30))
    demands = Demand(Distribution.parse("50"), Distribution.parse("150"), rate=600.0)
    levels = Levels.parse("ttft=3s,itl=20ms")
    prices = {}
    for acceptance in (0.0, 0.9):
        space = Space(
            "llama-3.1-8b",
            {"h100-sxm": 1.0},
            ranks=(1,),
            seats=(64,),
            chunks=(512,),
            drafts=4,
            acceptance=acceptance,
        )
        found = proposals(space, demands, levels, [])
        prices[acceptance] = {
            one.deployment.drafts: one.price for one in found if one.layout == "one pool"
        }
    assert prices[0.0][4] == prices[0.0][0] == prices[0.9][0] > prices[0.9][4]


def test_a_fleet_that_misses_is_repaired_by_a_flag_that_was_simulated(capsys, monkeypatch):
    monkeypatch.setattr(planning, "REQUESTS", (24, 24))
    monkeypatch.setattr(planning, "MAX_WORKERS", 1)
    words = "llama-3.1-8b --hardware h100-sxm -tp 1 --request-rate 12 --max-num-batched-tokens 512"
    lengths = "--prompt-tokens 400 --output-tokens 150 --max-num-seqs 4 --slo ttft=200ms,tpot=12ms"
    found = json.loads(plan(capsys, f"{words} {lengths} --json").out)
    missed, *repairs = [verdict["text"] for verdict in found["verdicts"]]
    assert missed.startswith("No fleet")
    assert any(text.startswith("With --max-num-seqs 8 the nearest fleet") for text in repairs)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--slo ttft=1s", "needs one load"),
        ("--slo ttft=1s --users 3 --acceptance 0.5", "belong together"),
        ("--slo ttft=1s --users 3 --price b200=1", "cannot be used"),
        ("--slo ttft=1s --users 3 --hardware abacus", "no datasheet"),
        ("--slo ttft=1s --users 3 --max-num-seqs many", "--max-num-seqs is 'many'"),
    ],
)
def test_what_cannot_be_is_refused(words, what, capsys):
    assert what in plan(capsys, f"llama-3.1-8b --hardware l40s {words}", code=2).err
