"""Real weights beside transformers in float32: the reference's logits, the `cpu` backend's loss.

Int8 activations, a quantized cache and its attention cost perplexity. Like is compared with like:
both run the same quantized weights, so the loss of quantizing the weights is not in it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracle import CHUNK, Oracle, chunks, negative_log_likelihood, rewritten
from texts import TEXTS

from steps import USER_CACHE, Piece, Steps
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.reference import ReferenceBackend
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import cached_model

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

LOGITS_TOLERANCE = 1e-3  # relative norm of the logits
TOLERANCE = 0.01  # of perplexity
# Files of Q5_0, Q8_0, Q6_K and Q4_K matrices: one with biases and 152 thousand tokens; one with 262
# thousand, a window of 512 and a KV head of 256.
OTHERS = ("qwen2.5-coder:0.5b", "gemma3:270m-pt")
# tokens of a text that show what a format of weights costs; what a cache costs, grows with the
# context
BEGINNING = 128


def cpu_loss(steps: Steps, ids: list[int]) -> float:
    """Sum of -log p over a text."""
    tokens = np.array(ids, np.int32)
    steps_of_text = (
        (at, steps.run([Piece(tokens[at], at.start, steps.blocks)])) for at in chunks(len(ids))
    )
    return sum(negative_log_likelihood(ids, at, logits) for at, logits in steps_of_text)


def oracle_loss(oracle: Oracle, ids: list[int]) -> float:
    """The same by the float32 model."""
    return sum(negative_log_likelihood(ids, at, logits) for at, logits in oracle.logits(ids))


@pytest.fixture(scope="module")
def texts(token_ids) -> list[list[int]]:
    """The longest text, up to 2,000 tokens, and the beginnings of some others."""
    return some_texts(list(token_ids.values()))


def some_texts(ids_of_texts: list[list[int]]) -> list[list[int]]:
    """The longest text whole, and the beginning of every second one.

    Most of the time goes to transformers' float32 logits.
    """
    longest = max(ids_of_texts, key=len)
    return [longest, *(ids[:BEGINNING] for ids in ids_of_texts[::2] if ids is not longest)]


@pytest.fixture(scope="module")
def shipped(model_path, texts, tmp_path_factory) -> tuple[float, list[float]]:
    """The float32 model's loss, and the reference's largest error by text and on the longest."""
    oracle = Oracle(rewritten(model_path, tmp_path_factory.mktemp("shipped") / "model.gguf"))
    reference = Steps(model_path, ReferenceBackend(), num_blocks=125)
    loss = 0.0
    errors = []
    longest = max(map(len, texts))
    for ids in texts:
        worst = 0.0
        length = len(ids) if len(ids) == longest else BEGINNING
        for at, expected in oracle.logits(ids):
            loss += negative_log_likelihood(ids, at, expected)
            tokens = np.array(ids[at][: max(0, length - at.start)], np.int32)
            if len(tokens):
                own = reference.run([Piece(tokens, at.start, reference.blocks)])
                wanted = expected[: len(tokens)]
                error = np.linalg.norm(own - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
                worst = max(worst, float(error.max()))
        errors.append(worst)
    return loss, errors


def test_logits_of_the_reference(shipped):
    """Only the whole text, of up to 2,000 tokens, shows what the length does."""
    _, errors = shipped
    print([f"{error:.1e}" for error in errors])
    assert len(errors) >= 10 and 0 < max(errors) < LOGITS_TOLERANCE


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_within_one_percent(
    kv_cache_dtype,
    model_path,
    texts,
    shipped,
):
    steps = Steps(
        model_path,
        CpuBackend(max_num_batched_tokens=CHUNK, kv_cache_dtype=kv_cache_dtype),
        num_blocks=125,
    )
    assert_close(f"Q4_1, {kv_cache_dtype}", steps, texts, shipped[0])


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q8_0"])
def test_within_one_percent_in_other_formats(tensor_type, model_path, texts, tmp_path):
    path = rewritten(model_path, tmp_path / "model.gguf", tensor_type)
    beginnings = [ids[:BEGINNING] for ids in texts]
    oracle = Oracle(path)
    steps = Steps(path, CpuBackend(max_num_batched_tokens=CHUNK), num_blocks=125)
    assert_close(
        tensor_type, steps, beginnings, sum(oracle_loss(oracle, ids) for ids in beginnings)
    )


@pytest.mark.parametrize("name", OTHERS)
def test_within_one_percent_on_others(name, monkeypatch, tmp_path):
    """The beginnings of some texts, and of the longest 700 tokens."""
    with monkeypatch.context() as patch:
        patch.setenv("TWINPHASE_CACHE", str(USER_CACHE))
        path = cached_model(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache: twinphase pull {name}")
    tokenizer = Tokenizer.from_checkpoint(open_gguf(path))
    texts = some_texts([tokenizer.encode(text)[:700] for text in TEXTS.values()])
    oracle = Oracle(rewritten(path, tmp_path / "model.gguf"))
    steps = Steps(path, CpuBackend(max_num_batched_tokens=CHUNK), num_blocks=125)
    assert_close(name, steps, texts, sum(oracle_loss(oracle, ids) for ids in texts))


def assert_close(what: str, steps: Steps, texts: list[list[int]], expected_loss: float) -> None:
    count = sum(len(ids) - 1 for ids in texts)
    actual = math.exp(sum(cpu_loss(steps, ids) for ids in texts) / count)
    expected = math.exp(expected_loss / count)
    ratio = actual / expected
    print(
        f"{what}: perplexity {actual:.4f} on {count} tokens, float32 {expected:.4f}, ratio "
        f"{ratio:.5f}"
    )
    assert abs(ratio - 1) < TOLERANCE
