"""What the `cpu` backend's int8 activations, quantized cache and attention cost: perplexity against the float32 model.

Like is compared with like: both run the same quantized weights, so the loss of quantizing the weights is not in it.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from oracle import CHUNK, Oracle, chunks, negative_log_likelihood, requantized

from steps import Piece, Steps
from twinphase.backends.cpu.backend import CpuBackend

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 0.01
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
    count = sum(len(ids) - 1 for ids in texts)
    actual = math.exp(sum(cpu_loss(steps, ids) for ids in texts) / count)
    expected = math.exp(measured[tensor_type, length] / count)
    ratio = actual / expected
    print(f"{tensor_type}, {kv_cache_dtype}: perplexity {actual:.4f}, float32 {expected:.4f}, ratio {ratio:.5f}")
    assert abs(ratio - 1) < TOLERANCE
