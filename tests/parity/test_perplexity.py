"""Real weights beside transformers in float32: the reference's logits, the `cpu` backend's loss.

Int8 activations, a quantized cache and its attention cost perplexity. Like is compared with like:
both run the same quantized weights, so the loss of quantizing the weights is not in it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

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
# Such as `qwen2.5-coder:0.5b`, a file of Q5_0, Q8_0, Q6_K and Q4_K matrices with biases, and
# `gemma3:270m-pt`, whose vocabulary has 262 thousand tokens and whose KV head is 256 wide.
OTHER = os.environ.get("PERPLEXITY_MODEL", "")
# tokens of a text that show what a format of weights costs; what a cache costs, grows with the
# context, so that one text is as long as this
BEGINNING = 96
LONGEST = 1000
# tokens of a text whose logits are compared one by one, in NumPy
FEW = 32


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
    """The beginning of each text, and more of the longest.

    Most of the time goes to transformers' float32 logits, so only one text is long.
    """
    longest = max(token_ids.values(), key=len)
    return [ids[: LONGEST if ids is longest else BEGINNING] for ids in token_ids.values()]


@pytest.fixture(scope="module")
def bare(model_path, tmp_path_factory) -> Path:
    """The model without its vocabulary, which takes the `gguf` package longer than the weights."""
    return rewritten(model_path, tmp_path_factory.mktemp("bare") / "model.gguf")


@pytest.fixture(scope="module")
def shipped(model_path, bare, texts) -> tuple[float, list[float]]:
    """The float32 model's loss, and the reference's largest error by text and on the longest."""
    oracle = Oracle(bare)
    reference = Steps(model_path, ReferenceBackend(), num_blocks=125)
    loss = 0.0
    errors = []
    longest = max(map(len, texts))
    for ids in texts:
        worst = 0.0
        length = len(ids) if len(ids) == longest else FEW
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
    """Only the long text shows what the length does."""
    _, errors = shipped
    print([f"{error:.1e}" for error in errors])
    assert len(errors) == 20 and 0 < max(errors) < LOGITS_TOLERANCE


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
def test_within_one_percent_in_other_formats(tensor_type, bare, texts, tmp_path):
    path = rewritten(bare, tmp_path / "model.gguf", tensor_type)
    beginnings = [ids[:BEGINNING] for ids in texts]
    oracle = Oracle(path)
    steps = Steps(path, CpuBackend(max_num_batched_tokens=CHUNK), num_blocks=125)
    assert_close(
        tensor_type, steps, beginnings, sum(oracle_loss(oracle, ids) for ids in beginnings)
    )


@pytest.mark.skipif(not OTHER, reason="PERPLEXITY_MODEL names a model")
def test_within_one_percent_on_another_model(tmp_path):
    """The beginnings of texts, and of the longest 1,000 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINPHASE_CACHE", str(USER_CACHE))
        path = cached_model(OTHER)
    assert path is not None, f"{OTHER} is not in the cache: twinphase pull {OTHER}"
    tokenizer = Tokenizer.from_checkpoint(open_gguf(path))
    whole = [tokenizer.encode(text)[:1000] for text in TEXTS.values()]
    longest = max(whole, key=len)
    texts = [ids if ids is longest else ids[:BEGINNING] for ids in whole]
    oracle = Oracle(rewritten(path, tmp_path / "model.gguf"))
    steps = Steps(path, CpuBackend(max_num_batched_tokens=CHUNK), num_blocks=125)
    assert_close(OTHER, steps, texts, sum(oracle_loss(oracle, ids) for ids in texts))


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
