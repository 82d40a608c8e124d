"""KV blocks move from one backend to another, with other ids and the same bits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from steps import Piece, Steps, own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.backends.base import Backend
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.reference import ReferenceBackend
from twinphase.backends.torch.backend import TorchBackend
from twinphase.errors import KVFrameError

PROMPT = 75
STEPS = 30
BLOCKS = 48
Make = Callable[[], Backend]

BACKENDS = {
    "reference": (ReferenceBackend, 16),
    "reference-5": (ReferenceBackend, 5),
    "cpu": (lambda: CpuBackend(threads=2), 16),
    "cpu-48": (
        lambda: CpuBackend(threads=2),
        48,
    ),  # three cells, and more blocks than one chunk of cells holds
    "torch-bfloat16": (lambda: TorchBackend("cpu", "bfloat16"), 5),
    "cpu-int8": (lambda: CpuBackend(threads=2, kv_cache_dtype="int8"), 32),
    # The heads differ between layers, and some layers share keys and values.
    "reference-shared": (ReferenceBackend, 5),
    "cpu-shared": (lambda: CpuBackend(threads=2), 16),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("frames")
    with own_cache(folder / "cache"):
        yield folder


@pytest.fixture(scope="module")
def path(folder) -> Path:
    return write_tiny_gguf(folder / "tiny.gguf", context=256)


def decode(steps: Steps, tokens: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Logits of the tokens behind the prompt, one step each."""
    positions = range(PROMPT, len(tokens))
    return np.concatenate([steps.run([Piece(tokens[i : i + 1], i, blocks)]) for i in positions])


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_sequence_goes_on_elsewhere_with_the_same_bits(path, kind):
    make, block_size = BACKENDS[kind]
    if kind.endswith("shared"):
        path = write_tiny_gguf(path.with_name("shared.gguf"), layers=5, shared_kv=2, window=40)
    one, other = (Steps(path, make(), num_blocks=BLOCKS, block_size=block_size) for _ in range(2))
    rng = np.random.default_rng(0)
    count = -(-(PROMPT + STEPS) // block_size)
    here = rng.permutation(BLOCKS)[:count].astype(np.int32)
    there = rng.permutation(BLOCKS)[:count].astype(np.int32)
    assert set(here.tolist()) != set(there.tolist())
    tokens, noise = rng.integers(0, one.vocab_size, (2, PROMPT + STEPS)).astype(np.int32)
    one.run([Piece(tokens[:PROMPT], 0, here)])
    other.run([Piece(noise, 0, there)])  # what was there before does not matter
    used = -(-PROMPT // block_size)
    frames = one.backend.read_blocks(here[:used].tolist())
    fingerprint = one.backend.kv_fingerprint.encode()
    payload = one.backend.kv_bytes_per_token() * block_size
    assert [len(frame) for frame in frames] == [4 + len(fingerprint) + payload] * used
    before = other.backend.read_blocks(range(BLOCKS))
    other.backend.write_blocks(there[:used].tolist(), [memoryview(frame) for frame in frames])
    after = other.backend.read_blocks(range(BLOCKS))
    assert {i for i in range(BLOCKS) if before[i] != after[i]} == set(
        there[:used].tolist()
    )  # and no other block
    assert [after[i] for i in there[:used]] == frames
    for frame in frames:  # an infinity in bfloat16; NaN; NaN as scales too
        spoilt = [
            frame[:-2] + b"\x80\x7f",
            frame[:-2] + b"\xff\xff",
            frame[:-payload] + b"\xff" * payload,
        ]
        finite = [True, kind == "cpu-int8", kind == "cpu-int8", False]
        assert [other.backend.has_finite_numbers(one) for one in (frame, *spoilt)] == finite
    expected = decode(one, tokens, here)
    logits = decode(other, tokens, there)
    assert len(np.unique(expected, axis=0)) > STEPS // 2
    assert (expected.view(np.int32) == logits.view(np.int32)).all()


def test_frames_of_another_kind_are_refused_and_nothing_is_written(path, folder):
    model = write_tiny_gguf(folder / "other.gguf", context=256, seed=7)
    steps = Steps(path, CpuBackend(threads=1), num_blocks=4)
    others = {
        "model is": Steps(model, CpuBackend(threads=1), num_blocks=4),
        "block_size is 32, not 16": Steps(path, CpuBackend(threads=1), num_blocks=4, block_size=32),
        "kv_cache_dtype is int8, not auto": Steps(
            path, CpuBackend(threads=1, kv_cache_dtype="int8"), num_blocks=4
        ),
        "does not begin with": Steps(path, ReferenceBackend(), num_blocks=4),
    }
    steps.run([Piece(np.arange(40, dtype=np.int32), 0, steps.blocks[:3])])
    before = steps.backend.read_blocks([0, 1, 2, 3])
    for reason, other in others.items():
        (frame,) = other.backend.read_blocks([0])
        with pytest.raises(KVFrameError, match=reason):
            steps.backend.write_blocks([1, 2], [before[0], frame])
    whole = before[0]
    isa = steps.backend.kv_fingerprint.split("isa=")[1].split(";")[0].encode()
    for damaged, reason in {
        whole[:-1]: "bytes, not",
        whole + b"\0": "bytes, not",
        whole[:3]: "does not begin",
        b"": "does not begin",
        whole.replace(isa, b"x" * len(isa), 1): f"its isa is x+, not {isa.decode()}",
    }.items():
        with pytest.raises(KVFrameError, match=reason):
            steps.backend.write_blocks([1], [damaged])
    assert steps.backend.read_blocks([0, 1, 2, 3]) == before
