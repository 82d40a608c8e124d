"""What the `cpu` backend's int8 activations, quantized cache and attention cost: perplexity against the float32 model.

Like is compared with like: both run the same quantized weights, so the loss of quantizing the weights is not in it.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from oracle import CHUNK, Oracle, chunks, negative_log_likelihood, requantized
from texts import TEXTS

from steps import USER_CACHE, Piece, Steps
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import cached_model

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 0.01
QWEN = "qwen2.5-coder:0.5b"
BEGINNING = 128  # tokens of a text that show what a format of weights costs; what a cache costs, grows with the context
Measured = dict[tuple[str, int], float]


def cpu_loss(steps: Steps, ids: list[int]) -> float:
    """Sum of -log p over a text."""
    tokens = np.array(ids, np.int32)
    steps_of_text = ((at, steps.run([Piece(tokens[at], at.start, steps.blocks)])) for at in chunks(len(ids)))
    return sum(negative_log_likelihood(ids, at, logits) for at, logits in steps_of_text)


def oracle_loss(oracle: Oracle, ids: list[int]) -> float:
    """The same by the float32 model."""
    return sum(negative_log_likelihood(ids, at, logits) for at, logits in oracle.logits(ids))


@pytest.fixture(scope="module")
def measured() -> Measured:
    """The float32 model's losses, by format and length of the texts: two caches are compared with one of them."""
    return {}


@pytest.mark.parametrize(
    ("tensor_type", "kv_cache_dtype", "length"),
    (("Q4_1", "auto", 1000), ("Q4_1", "int8", 1000), ("Q4_0", "auto", BEGINNING), ("Q8_0", "auto", BEGINNING)),
)
def test_within_one_percent(
    tensor_type: str,
    kv_cache_dtype: str,
    length: int,
    model_path: Path,
    token_ids: dict[str, list[int]],
    tmp_path: Path,
    measured: Measured,
) -> None:
    shipped = "Q4_1"
    path = model_path if tensor_type == shipped else requantized(model_path, tmp_path / "model.gguf", tensor_type)
    steps = Steps(path, CpuBackend(max_num_batched_tokens=CHUNK, kv_cache_dtype=kv_cache_dtype), num_blocks=125)
    texts = [ids[:length] for ids in token_ids.values()]
    if (tensor_type, length) not in measured:
        oracle = Oracle(path)
        measured[tensor_type, length] = sum(oracle_loss(oracle, ids) for ids in texts)
    assert_close(f"{tensor_type}, {kv_cache_dtype}", steps, texts, measured[tensor_type, length])


def test_within_one_percent_on_a_qwen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of Q5_0, Q8_0, Q6_K and Q4_K matrices, as users have them; biases, and 152 thousand tokens."""
    with monkeypatch.context() as patch:
        patch.setenv("TWINPHASE_CACHE", str(USER_CACHE))
        path = cached_model(QWEN)
    if path is None:
        pytest.skip(f"{QWEN} is not in the cache: twinphase pull {QWEN}")
    steps = Steps(path, CpuBackend(max_num_batched_tokens=CHUNK), num_blocks=125)
    tokenizer = Tokenizer.from_checkpoint(open_gguf(path))
    texts = [tokenizer.encode(text)[:1000] for text in TEXTS.values()]
    oracle = Oracle(path)
    assert_close(QWEN, steps, texts, sum(oracle_loss(oracle, ids) for ids in texts))


def assert_close(what: str, steps: Steps, texts: list[list[int]], expected_loss: float) -> None:
    count = sum(len(ids) - 1 for ids in texts)
    actual = math.exp(sum(cpu_loss(steps, ids) for ids in texts) / count)
    expected = math.exp(expected_loss / count)
    ratio = actual / expected
    print(f"{what}: perplexity {actual:.4f} on {count} tokens, float32 {expected:.4f}, ratio {ratio:.5f}")
    assert abs(ratio - 1) < TOLERANCE
