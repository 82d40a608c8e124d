"""Every architecture on the torch backend, on a processor, beside the reference.

In 16 bits it must be as near to the reference as transformers is in the same type: what either
loses is rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families_gguf import RECURRENT
from numpy.typing import NDArray
from texts import TEXTS
from tiny_families import FAMILIES, logits_of, make_model

from steps import Piece, Steps
from twinphase import LLM, SamplingParams
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.reference import ReferenceBackend
from twinphase.backends.torch.backend import TorchBackend

F32 = NDArray[np.float32]
TOKENS = np.random.default_rng(0).integers(3, 448, 70, dtype=np.int32)


# The backend refuses layers with a recurrent state, and those that differ in their heads.
REFUSED_HERE = (*RECURRENT, "granite-4-h", "falcon-h1", "nemotron-h", "gemma4")
FAMILIES_HERE = [name for name in FAMILIES if not name.startswith(REFUSED_HERE)]
# Types differ in their rounding alone: every third family has float16, finer than bfloat16.
IN_TYPES = {
    "float32": FAMILIES_HERE,
    "bfloat16": FAMILIES_HERE,
    "float16": FAMILIES_HERE[::3],
}


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        pytest.param(dtype, family, marks=() if dtype == "float32" else pytest.mark.slow)
        for dtype, families in IN_TYPES.items()
        for family in families
    ],
)
def test_logits_are_those_of_the_reference(tmp_path, family, dtype):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    expected = Steps(tmp_path, ReferenceBackend(), num_blocks=32).chunked(TOKENS, [70])
    errors = errors_of(tmp_path, dtype, expected)
    if dtype == "float32":
        assert errors.max() <= 1e-4
        return
    model.to(getattr(torch, dtype))
    theirs = error_of(logits_of(model, TOKENS.tolist()), expected)
    assert np.median(errors) <= 1.2 * np.median(theirs)


@pytest.mark.slow
def test_answers_of_a_real_model(model_path):
    """Greedy: the reference's tokens, and the cpu backend's up to what rounding to int8 changes."""
    prompts = [
        "The capital of France is",
        "def fibonacci(n):",
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    reference, cpu, ours = (
        [
            output.outputs[0]
            for output in LLM(model_path, backend=name, max_model_len=64).generate(prompts, params)
        ]
        for name in ("reference", "cpu", "torch")
    )
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in reference]
    for theirs, answer in zip(cpu, ours, strict=True):
        pairs = enumerate(zip(theirs.token_ids, answer.token_ids, strict=True))
        for at in [i for i, (one, other) in pairs if one != other][:1]:  # where they part first
            likeliest = sorted(
                (entry.logprob for entry in answer.logprobs[at].values()), reverse=True
            )
            assert likeliest[0] - likeliest[1] <= 0.3, (at, theirs.text, answer.text)
            print("parted at", at, likeliest[0] - likeliest[1])


class RoundedBackend(TorchBackend):
    """Rounds inputs of products to int8 in groups of 32, as the cpu backend does."""

    def linear(self, x: torch.Tensor, weight: Any, **terms: Any) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, 32))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        return super().linear((torch.round(groups / scales) * scales).flatten(-2), weight, **terms)


@pytest.mark.slow
def test_the_cpu_backend_loses_what_rounding_activations_loses(model_path):
    """Which answers it can change, and no more: how far the next token's distribution moves."""
    tokens = np.array(
        LLM(model_path, max_model_len=64).tokenizer.encode(" ".join(TEXTS))[:300], np.int32
    )
    exact, rounded, cpu = (
        Steps(model_path, backend, num_blocks=32).chunked(tokens, [300])
        for backend in (TorchBackend("cpu"), RoundedBackend("cpu"), CpuBackend())
    )
    lost = divergence(exact, cpu)
    theirs = divergence(exact, rounded)
    print(f"KL divergence: cpu {lost:.5f}, rounded activations {theirs:.5f} nat")
    assert 0 < lost <= 1.5 * theirs


def divergence(exact: F32, found: F32) -> float:
    """Median over rows of the Kullback-Leibler divergence, nat."""
    p, q = (torch.log_softmax(torch.from_numpy(rows).double(), -1) for rows in (exact, found))
    return float((p.exp() * (p - q)).sum(-1).median())


def errors_of(path: Path, dtype: str, expected: F32) -> F32:
    """Of each row: in chunks, then two decodes, one with a draft, and a chunk in one step."""
    steps = Steps(path, TorchBackend("cpu", dtype), num_blocks=32)
    chunked = error_of(steps.chunked(TOKENS, [33, 5, 17]), expected)
    blocks = [steps.blocks[5 * i : 5 * i + 5] for i in range(3)]
    rows = [np.arange(50, 51), np.arange(60, 62), np.arange(20, 70)]
    for at, own in zip(rows, blocks, strict=True):
        steps.run([Piece(TOKENS[: at[0]], 0, own)])
    found = steps.run(
        [Piece(TOKENS[at], int(at[0]), own) for at, own in zip(rows, blocks, strict=True)]
    )
    return np.concatenate([chunked, error_of(found, expected[np.concatenate(rows)])])


def error_of(found: F32, expected: F32) -> F32:
    error: F32 = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return error
