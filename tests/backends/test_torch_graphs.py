"""The bookkeeping of captured decode steps, with a graph that records and repeats calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recorded_graph import Recorder
from steps import Piece, Steps
from tiny_gguf import write_tiny_gguf
from twinphase.backends.torch.backend import TorchBackend
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.errors import OutOfMemoryError
from twinphase.request import Request, SamplingParams

TOKENS = np.random.default_rng(0).integers(3, 300, 60, dtype=np.int32)


def captured(path: Path, sequences: int = 4, kept: tuple[int, ...] = ()) -> Steps:
    backend = TorchBackend("cpu", "float64")
    backend.make_graph = Recorder
    steps = Steps(path, backend, num_blocks=32)
    steps.model.kept = kept
    backend.capture(steps.model.forward, sequences, 64, None)
    return steps


def decodes(steps: Steps, starts: list[int]) -> Any:
    """Prefill sequences up to `starts`, then one step in which each decodes a token."""
    own = [steps.blocks[4 * i : 4 * i + 4] for i in range(len(starts))]
    for start, blocks in zip(starts, own, strict=True):
        steps.run([Piece(TOKENS[:start], 0, blocks)])
    return steps.run(
        [Piece(TOKENS[at : at + 1], at, blocks) for at, blocks in zip(starts, own, strict=True)]
    )


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("twinphase.backends.torch.graphs.MIN_CONTEXT_TOKENS", 64)
    return write_tiny_gguf(tmp_path / "tiny.gguf", window=40)


@pytest.mark.parametrize("starts", [[5], [7, 50, 21], [3, 9, 30, 44]])
def test_a_replay_gives_what_the_step_gives(path, starts):
    kept = (1, 2)  # the second layer's input and what the head reads, for a drafter
    steps = captured(path, kept=kept)
    eager = Steps(path, TorchBackend("cpu", "float64"), num_blocks=32)
    eager.model.kept = kept
    found = decodes(steps, starts)
    expected = decodes(eager, starts)
    hidden = steps.backend.kept()
    assert [x.shape for x in hidden] == [(len(starts), 64)] * 2
    np.testing.assert_allclose(hidden, eager.backend.kept(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    backend = steps.backend
    assert sum(size.graph.replays for size in backend.graphs.sizes) == 1
    used = next(size for size in backend.graphs.sizes if size.graph.replays)
    assert used.rows == {1: 1, 3: 4, 4: 4}[len(starts)]
    # Rows that fill up write to the spare block alone.
    torch.testing.assert_close(
        backend.kv[:, :, :32], eager.backend.kv[:, :, :32], rtol=1e-12, atol=1e-12
    )
    untouched = np.setdiff1d(
        np.arange(32), [4 * i + at // 16 for i, s in enumerate(starts) for at in range(s + 1)]
    )
    assert not backend.kv[:, :, untouched].any()


def test_the_rows_that_fill_up_change_no_bit(path):
    steps = captured(path)
    starts = [7, 50, 21]
    alone = decodes(steps, starts)
    steps.backend.kv[:, :, 32:] = torch.randn_like(steps.backend.kv[:, :, 32:])
    assert decodes(steps, starts).tobytes() == alone.tobytes()


def test_what_a_replay_reads_is_this_steps(path, monkeypatch):
    """A replay reads this step's inputs: leaving out any of them would fail the test above."""
    expected = decodes(captured(path), [7, 50, 21])
    for name in ("token_ids", "positions", "slot_mapping", "block_tables"):
        steps = captured(path)
        backend = steps.backend
        fresh = steps.backend._arrays

        def stale(inputs: Any, name: str = name, backend: Any = backend, fresh: Any = fresh) -> Any:
            old = backend.graphs.find(inputs).padded(None) if inputs.num_decodes else inputs
            return {**fresh(inputs), name: getattr(old, name)}

        monkeypatch.setattr(backend, "_arrays", stale)
        assert not np.allclose(decodes(steps, [7, 50, 21]), expected, rtol=1e-6, atol=1e-6), name


def test_steps_of_other_kinds_are_not_replayed(path):
    steps = captured(path, sequences=2)
    blocks = [steps.blocks[4 * i : 4 * i + 4] for i in range(3)]
    steps.run([Piece(TOKENS[:9], 0, own) for own in blocks])
    decode = [Piece(TOKENS[9:10], 9, own) for own in blocks]
    steps.run(decode)  # more rows than any
    steps.run([*decode[:1], Piece(TOKENS[:5], 0, blocks[1])])
    steps.run(decode[:1], logit_rows=[])
    assert not any(size.graph.replays for size in steps.backend.graphs.sizes)


def test_an_engine_captures_and_replays(path, monkeypatch):
    told: list[tuple[int, int, str]] = []
    tokens = []
    for eager in (False, True):
        backend = TorchBackend("cpu", "float64", enforce_eager=eager)
        backend.make_graph = None if eager else Recorder
        monkeypatch.setattr(
            "twinphase.engine.loading.loading.make_backend", lambda *_, backend=backend: backend
        )
        options = {
            "backend": "torch",
            "enforce_eager": eager,
            "max_num_seqs": 3,
            "max_model_len": 64,
        }
        loaded = LoadedEngine(
            path,
            EngineConfig(num_kv_blocks=20, **options),
            compile_progress=lambda *step: told.append(step),
        )
        engine = loaded.engine
        answers = dict[str, list[int]]()
        for i in range(3):
            params = SamplingParams(seed=i, max_tokens=5 + 4 * i, temperature=0.8, ignore_eos=True)
            engine.add_request(Request(str(i), TOKENS[: 5 + 7 * i].tolist(), params))
        while engine.has_work:
            for name, ids in engine.step().output.token_ids.items():
                answers.setdefault(name, []).extend(ids)
        tokens.append(answers)
        if not eager:
            assert sum(size.graph.replays for size in backend.graphs.sizes) >= 10
    assert tokens[0] == tokens[1] and [len(tokens[0][str(i)]) for i in range(3)] == [5, 9, 13]
    assert told[0] == (0, 3, "graph of 4 rows") and told[-1] == (3, 3, "graphs")


def test_memory_for_graphs_that_is_not_there(path):
    class Full(Recorder):
        def capture(self, compute: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    backend = TorchBackend("cpu")
    backend.make_graph = Full
    steps = Steps(path, backend, num_blocks=8)
    with pytest.raises(
        OutOfMemoryError,
        match=r"the graphs: [\d.]+ GB.*, beside the weights \(.*the KV cache.*Use --enforce-eager",
    ):
        backend.capture(steps.model.forward, 4, 64, None)
