"""Tensor parallelism: any number of ranks gives the same bits; a lost rank ends the step."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mix_engines import VOCAB, Alone, load
from mixes import run_mixes
from numpy.typing import NDArray

from added import greedy
from children import descendants
from steps import Piece, SequenceStates, Steps, own_cache
from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams
from twinphase.backends.reference import ReferenceBackend
from twinphase.config import EngineConfig
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.loading.loading import allocate_kv_cache, make_backend
from twinphase.engine.ranks.backend import load_on_ranks
from twinphase.errors import EngineDeadError, InvalidRequestError, OutOfMemoryError
from twinphase.models.loader import open_model, read_blueprint
from twinphase.numa import Place
from twinphase.request import STATE_LOG_ROWS

F32 = NDArray[np.float32]
TOKENS = np.random.default_rng(0).integers(3, 300, 150, dtype=np.int32)
BLOCKS = 64
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)


class Ranked(Steps):
    """A model on some ranks of one thread each."""

    def __init__(self, path: Path, ranks: int, **options: Any) -> None:
        sizes = {
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "num_kv_blocks": BLOCKS,
            "threads": 1,
        }
        checkpoint = open_model(path)
        blueprint = read_blueprint(checkpoint)
        state_bytes = blueprint.state_bytes(STATE_LOG_ROWS)
        if state_bytes:
            self._states = SequenceStates()
            sizes["num_state_slots"] = SequenceStates.SLOTS
        config = EngineConfig(tensor_parallel_size=ranks, **sizes | options).resolve(
            blueprint.context_length, state_bytes=state_bytes
        )
        self.model, self.backend = load_on_ranks(
            checkpoint, blueprint, config, make_backend(config)
        )
        self.block_size = 16
        self.blocks = np.arange(BLOCKS, dtype=np.int32)
        allocate_kv_cache(self.backend, self.model.blueprint, config)

    def answers(self) -> tuple[F32, list[bytes]]:
        """Logits of chunks, decodes and drafts, and what the first blocks hold."""
        logits = [self.chunked(TOKENS[:130], [100, 1, 1, 4])]
        other = Piece(TOKENS[:40], 0, self.blocks[20:])
        logits.append(
            self.run([Piece(TOKENS[130:131], 130, self.blocks), other])
        )  # a decode beside a prefill
        return np.concatenate(logits), self.backend.read_blocks([0, 3, 20])


def ranks_of_this_process() -> list[int]:
    gc.collect()  # engines that nobody has any more
    return descendants(os.getpid(), lambda words: b"twinphase.engine.ranks.rank" in words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("ranks")
    with own_cache(path / "cache"):
        yield path
    assert not ranks_of_this_process()


@pytest.fixture(autouse=True)
def one_rank_multiplies_as_several_do(monkeypatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "in_blocks", True)


TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
CASES = [
    pytest.param("cpu", 2, {}, "Q4_0", id="cpu-2"),
    pytest.param(
        "cpu", 3, {"kv_cache_dtype": "int8"}, "Q8_0", id="cpu-3-int8"
    ),  # one KV head is in two ranks
    pytest.param("reference", 3, {}, "F32", id="reference-3"),
    pytest.param("torch", 3, {}, "Q4_0", marks=[TORCH, pytest.mark.slow], id="torch-3"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "ranks", "options", "tensor_type"), CASES)
def test_bits_are_those_of_one_rank(folder, backend, ranks, options, tensor_type):
    # Deep enough for shared memory to be used again and again.
    path = write_tiny_gguf(
        folder / f"{tensor_type}.gguf", layers=16, hidden=128, ffn=256, tensor_type=tensor_type
    )
    one = Ranked(path, 1, backend=backend, threads=2, **options)
    logits, frames = one.answers()
    several = Ranked(path, ranks, backend=backend, **options)
    found, found_frames = several.answers()
    np.testing.assert_array_equal(found.view(np.uint32), logits.view(np.uint32))
    assert found_frames == frames
    assert (
        several.backend.group is not None and sum(several.backend.group.waits()) > 0
    )  # one is always first
    assert all(several.backend.has_finite_numbers(frame) for frame in frames)
    # Blocks that one rank computed are those of several, at other places.
    several.backend.write_blocks([40, 41], one.backend.read_blocks([0, 1]))
    rest = several.run([Piece(TOKENS[32:130], 32, np.array([40, 41, *range(42, 50)], np.int32))])
    expected = one.run([Piece(TOKENS[32:130], 32, one.blocks)])
    np.testing.assert_array_equal(rest.view(np.uint32), expected.view(np.uint32))


FAMILIES = ("gemma2", "qwen3-moe", "gpt-oss", "phi3", "granite", "glm4", "olmo2", "olmoe")
# Convolutions, delta rules, Mamba-2, also beside attention, layers of one half, and layers with
# different heads; two of them with experts.
HYBRIDS = (
    *("lfm2-moe", "qwen35", "granite-4-h", "granite-4-h-moe", "falcon-h1", "falcon-h1-norm"),
    *("nemotron-h", "gemma4", "gemma4-12b"),
)
# Elsewhere than on the cpu those whose layers differ in what ranks exchange: how a model is divided
# is the same everywhere.
FAMILIES_ON = [
    *((family, "cpu") for family in (*FAMILIES, *HYBRIDS)),
    *((family, "reference") for family in ("gemma2", "gpt-oss", "qwen35")),
    *(pytest.param(family, "torch", marks=TORCH) for family in ("gemma2", "gpt-oss", "olmo2")),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "backend"), FAMILIES_ON)
def test_families(folder, family, backend):
    """Windows, softcaps, experts, sinks, biases, fused matrices, norms behind a half, states.

    Three ranks have uneven shares, and a KV head that two of them need.
    """
    tiny_families = pytest.importorskip("tiny_families")
    if not (folder / family).exists():
        tiny_families.make_model(family).save_pretrained(folder / family)
    expected, frames = Ranked(folder / family, 1, backend=backend).answers()
    logits, found = Ranked(folder / family, 3, backend=backend).answers()
    np.testing.assert_array_equal(logits.view(np.uint32), expected.view(np.uint32))
    assert found == frames


def test_vectors_are_those_of_one_rank(folder):
    path = write_tiny_gguf(folder / "Q4_0.gguf", layers=16, hidden=128, ffn=256, tensor_type="Q4_0")
    texts = ["hello", "the world " * 100]
    options = {"task": "embed", "threads": 1, "max_num_batched_tokens": 64}
    expected, found = (
        LLM(path, tensor_parallel_size=ranks, **options).embed(texts) for ranks in (1, 2)
    )
    assert [one.outputs.embedding for one in found] == [one.outputs.embedding for one in expected]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "options", "num_mixes"),
    [(2, {}, 3), pytest.param(3, {"kv_cache_dtype": "int8"}, 2, marks=pytest.mark.slow)],
)
def test_mixes(folder, ranks, options, num_mixes):
    """Random mixes, with the prefix cache and drafts, beside one rank."""
    path = write_tiny_gguf(folder / "mixed.gguf", vocab=VOCAB)
    alone = Alone(load(path, threads=1, **options))
    several = load(path, threads=1, tensor_parallel_size=ranks, **options)
    tally = run_mixes(num_mixes, several, alone)
    assert tally["compared"] >= 2 * num_mixes and tally["mixed steps"] >= num_mixes, tally


DELTAS = {"deltas": (0, 1, 3), "heads": 2, "kv_heads": 1}
NEXT_TOKEN = {**DELTAS, "tied": False, "next_token": True, "passes_on": True}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "layers", "ranks", "num_mixes"),
    [
        ("next-token", NEXT_TOKEN, 2, 1),
        pytest.param("convolutions", {"convolutions": (0, 1, 3)}, 3, 2, marks=pytest.mark.slow),
        pytest.param("spaces", {"spaces": (0, 1, 3)}, 3, 2, marks=pytest.mark.slow),
        pytest.param("shared", {"shared_kv": 2, "window": 40}, 3, 2, marks=pytest.mark.slow),
    ],
)
def test_mixes_of_hybrids(folder, name, layers, ranks, num_mixes):
    """States with logs and snapshots, preempted; the first rank drafts with the model's layer."""
    path = write_tiny_gguf(folder / f"{name}.gguf", vocab=VOCAB, layers=4, **layers)
    drafting = ["mtp"] if name == "next-token" else []
    options = {"speculative_config": '{"method": "mtp"}'} if drafting else {}
    alone = Alone(load(path, threads=1))
    several = load(path, threads=1, tensor_parallel_size=ranks, **options)
    tally = run_mixes(num_mixes, several, alone, *drafting)
    assert tally["compared"] >= 2 * num_mixes and tally["mixed steps"] >= num_mixes, tally
    assert not drafting or tally["accepted drafts"] > 20, tally


@pytest.mark.parametrize(
    ("backend", "number", "words"),
    [
        ("reference", signal.SIGKILL, "Rank 1 of 2 was killed by signal 9"),
        ("reference", signal.SIGSTOP, "no further for 1 s"),
        pytest.param(
            "torch", signal.SIGSTOP, "no further for 1 s", marks=[TORCH, pytest.mark.slow]
        ),
    ],
)
def test_a_missing_rank_ends_the_step(folder, backend, number, words):
    path = write_tiny_gguf(folder / "F32.gguf", hidden=128, ffn=256, tensor_type="F32")
    llm = LLM(path, backend=backend, tensor_parallel_size=2, tensor_parallel_timeout=1.0)
    expected = llm.generate(["hello"], PARAMS)[0].outputs[0].token_ids
    (rank,) = ranks_of_this_process()
    os.kill(rank, number)
    for _ in range(2):  # nor can it go on later
        with pytest.raises(EngineDeadError, match=words):
            llm.generate(["hello world"], PARAMS)
    assert not ranks_of_this_process()
    again = LLM(path, backend=backend, tensor_parallel_size=2)
    assert again.generate(["hello"], PARAMS)[0].outputs[0].token_ids == expected


def test_an_error_of_the_first_rank_ends_all_with_its_words(folder, monkeypatch):
    path = write_tiny_gguf(folder / "F32.gguf", hidden=128, ffn=256, tensor_type="F32")
    llm = LLM(path, backend="reference", tensor_parallel_size=2)

    def fail(*step: Any) -> Any:
        raise OutOfMemoryError("No memory for the step.", "Lower --max-num-batched-tokens.")

    monkeypatch.setattr(ReferenceBackend, "execute", fail)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="Rank 0 of 2 failed: No memory for the step"):
            llm.generate(["hello", "world"], PARAMS)
    assert not ranks_of_this_process()


@pytest.mark.timeout(600)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound here")
def test_ranks_compute_on_their_nodes(folder, monkeypatch):
    usable = os.sched_getaffinity(0)
    # the same, where there is but one core
    mine = frozenset({min(usable)})
    other = frozenset({max(usable)})
    monkeypatch.setattr(
        "twinphase.engine.ranks.ranks.rank_places",
        lambda count: [Place((0,), mine), Place((1,), other)],
    )
    threads = set(threading.enumerate())
    path = write_tiny_gguf(folder / "Q4_0.gguf", layers=16, hidden=128, ffn=256, tensor_type="Q4_0")
    model = Ranked(path, 2, backend="cpu", threads=2)
    model.answers()
    started = [
        thread
        for thread in threading.enumerate()
        if thread not in threads and thread.name == "twinphase-1"
    ]
    assert [os.sched_getaffinity(thread.native_id or 0) for thread in started] == [mine]
    (rank,) = ranks_of_this_process()
    assert all(
        os.sched_getaffinity(int(task.name)) == other
        for task in Path(f"/proc/{rank}/task").iterdir()
    )
    assert os.sched_getaffinity(0) == usable


@pytest.mark.slow
def test_a_server_starts_its_ranks_again(folder):
    path = write_tiny_gguf(folder / "long.gguf", tensor_type="F32", context=8192)

    async def ready(engine: AsyncEngine) -> None:
        while not engine.is_running:
            await asyncio.sleep(0.01)

    async def main() -> None:
        engine = AsyncEngine.in_process(path, backend="reference", tensor_parallel_size=2)
        try:
            await ready(engine)
            stream = await engine.submit("hello", greedy(8000))
            await anext(aiter(stream))
            for rank in ranks_of_this_process():
                os.kill(rank, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="Rank 1 of 2 was killed by signal 9"):
                async for _ in stream:
                    pass
            await ready(engine)
            updates = [update async for update in await engine.submit("hello", PARAMS)]
            assert len(updates[-1].output.outputs[0].token_ids) == PARAMS.max_tokens
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tensor_parallel_size": 0}, InvalidRequestError, "tensor_parallel_size is 0"),
        ({"tensor_parallel_size": 5}, InvalidRequestError, "4 attention heads"),
    ],
)
def test_what_cannot_be_divided_is_refused(folder, options, error, words):
    path = write_tiny_gguf(folder / "F32.gguf", hidden=128, ffn=256, tensor_type="F32")
    with pytest.raises(error, match=words):
        LLM(path, backend="reference", **options)
