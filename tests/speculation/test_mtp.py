"""A model's own layer for further tokens drafts: answers stay equal, its drafts right or wrong."""

from __future__ import annotations

import pytest
from tests.speculation.answering import answers

from tiny_gguf import write_tiny_gguf
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.errors import InvalidRequestError
from twinphase.speculation.mtp import Mtp
from twinphase.speculation.speculator import Speculator

MODEL = {"layers": 4, "deltas": (0, 1, 3), "heads": 2, "kv_heads": 1, "tied": False}
# Few blocks and slots: requests are preempted, and wait for slots.
FEW = {"num_kv_blocks": 32, "max_num_batched_tokens": 48, "max_model_len": 256}
FEW |= {"num_state_slots": 12, "state_interval": 16}
THREE = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.mark.parametrize("right", [False, True])
def test_answers_are_those_without_it(tmp_path, right):
    path = write_tiny_gguf(tmp_path / "m.gguf", next_token=True, passes_on=right, **MODEL)
    plain = answers(LoadedEngine(path, EngineConfig(threads=1)))[0]
    loaded = LoadedEngine(path, EngineConfig(threads=2, speculative_config=THREE, **FEW))
    engine = loaded.engine
    mtp = engine.executor.reader
    assert isinstance(mtp, Mtp) and mtp in engine.drafter.proposers
    engine.drafter = Speculator([mtp], engine.cost_model, most=3, always=True)
    for _ in range(2):  # The second time the prompts are cached.
        engine.scheduler.usual_output = 0.0  # so that blocks run out
        found, drafted, accepted = answers(loaded)
        assert found == plain
        assert drafted > 100 and (accepted > 50 if right else accepted < drafted / 4)
    assert len(mtp._free) == FEW["num_kv_blocks"]


def test_it_drafts_where_the_model_has_it(tmp_path):
    with_it, without = (
        write_tiny_gguf(tmp_path / f"{has}.gguf", next_token=has, **MODEL) for has in (True, False)
    )
    auto = EngineConfig(speculative_config="auto")
    drafters = LoadedEngine(with_it, auto).engine.drafter.proposers
    assert [type(one).__name__ for one in drafters][-2:] == ["SuffixProposer", "Mtp"]
    assert LoadedEngine(without, auto).engine.executor.reader is None
    with pytest.raises(InvalidRequestError, match="no layer that predicts further tokens"):
        LoadedEngine(without, EngineConfig(speculative_config=THREE))
