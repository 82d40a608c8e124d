"""Costs of a model with windowed layers, compared with a sum that is written out."""

from dataclasses import replace

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.models import loader
from twinphase.request import Request, SamplingParams

WINDOWS = (8, None, 8)
PROMPT = 40
OUTPUT = 12
CHUNK = 16


@pytest.fixture
def engine(tmp_path, monkeypatch):
    plain = loader.read_blueprint

    def windowed(*arguments):
        return replace(plain(*arguments), windows=WINDOWS)

    for module in ("twinphase.models.loader", "twinphase.engine.loading.loading"):
        monkeypatch.setattr(f"{module}.read_blueprint", windowed)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", layers=3, tensor_type="F32")
    return LoadedEngine(
        path, EngineConfig(backend="reference", max_num_batched_tokens=CHUNK)
    ).engine


def attended(positions):
    return sum(
        min(position + 1, window or position + 1) for position in positions for window in WINDOWS
    )


def test_flops_and_bytes_of_both_phases(engine):
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    timeline = engine.add_request(
        Request("r", list(range(5, 5 + PROMPT)), params, arrival_time=engine.clock())
    )
    while engine.has_work:
        engine.step()
    heads = 4
    head_dim = 16
    shape = engine.shape
    assert (shape.window, shape.windowed_layers, engine.cost_model.window) == (8, 2, 8)
    decoded = range(PROMPT, PROMPT + OUTPUT - 1)
    assert timeline.prefill.attention_flops == 4 * heads * head_dim * attended(range(PROMPT))
    assert timeline.decode.attention_flops == 4 * heads * head_dim * attended(decoded)
    each = shape.kv_token_bytes // 3  # of a token in one layer
    weights = shape.weight_bytes * len(decoded)
    assert timeline.decode.bytes == weights + each * attended(decoded)
    assert engine.cost_model.windowed_share == pytest.approx(2 / 3)
