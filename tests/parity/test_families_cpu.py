"""Every architecture on the cpu backend beside the reference (compared in test_families.py).

And the cpu beside itself: the same bits in one chunk, in several, as decodes of a batch, on one
thread and on two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_families import FAMILIES, make_model

from steps import Piece, Steps, compile_together, isas_that_differ, own_cache
from twinphase.backends.base import Array, Backend
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.cpu.isa import choose_isa
from twinphase.backends.reference import ReferenceBackend
from twinphase.errors import InvalidRequestError
from twinphase.models.decoder import Decoder

pytestmark = pytest.mark.timeout(600)  # kernels are compiled

F32 = NDArray[np.float32]
LENGTH = 300  # behind every window, three KV tiles
TOKENS = np.random.default_rng(0).integers(3, 320, LENGTH, dtype=np.int32)
# Relative root mean square of the logits' error: queries and keys are int8 with a scale for each
# token and head.
TOLERANCE = 0.03
MIXTURES = ("qwen3-moe", "mixtral", "olmoe", "gpt-oss", "lfm2-moe", "qwen35-moe", "granite-4-h-moe")


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Iterator[Path]:
    """Where the models of the chosen tests are, their kernels compiled together."""
    path = tmp_path_factory.mktemp("families")
    here = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    chosen = {item.callspec.params["family"] for item in here}
    for family in chosen:
        make_model(family).save_pretrained(path / family)
    with own_cache(path / "cache"):
        compile_together(
            choose_isa(None).name, [partial(on_cpu, path / family) for family in chosen]
        )
        yield path


def on_cpu(path: Path, threads: int = 2, **options: Any) -> Steps:
    return Steps(
        path, CpuBackend(threads=threads, max_num_batched_tokens=512, max_num_seqs=32, **options)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_reference(folder, family):
    found = on_cpu(folder / family).chunked(TOKENS, [LENGTH])
    expected = Steps(folder / family, ReferenceBackend()).chunked(TOKENS, [LENGTH])
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    if family in MIXTURES:
        # Where two experts' logits are nearly equal, the least error chooses the other one: a few
        # rows differ much.
        error = np.median(
            np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
        )
    assert error <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_depend_on_the_tokens_alone(folder, family):
    steps = on_cpu(folder / family)
    expected = steps.chunked(TOKENS, [LENGTH])
    for sizes in ([1, 2, 7], [64], [130, 1, 1]):
        if steps.model.blueprint.recurrent_layers:
            _spoil_states(steps.backend)
        _same_bits(steps.chunked(TOKENS, sizes), expected)
    _same_bits(on_cpu(folder / family, threads=1).chunked(TOKENS, [77]), expected)
    _few_rows_have_the_same_bits(steps, expected)


@pytest.mark.slow
# Soft caps, sinks and recurrences are float32 on every path, even where products are not.
@pytest.mark.parametrize("isa", isas_that_differ("lanes")[1:])
@pytest.mark.parametrize(("family", "dtype"), (("gemma2", "auto"), ("gpt-oss", "int8")))
def test_bits_of_other_paths_with_caps_and_sinks(folder, family, dtype, isa):
    steps = on_cpu(folder / family, isa=isa, kv_cache_dtype=dtype)
    _few_rows_have_the_same_bits(steps, steps.chunked(TOKENS, [LENGTH]))


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas_that_differ("lanes")[1:])
@pytest.mark.parametrize("family", ("lfm2", "qwen35", "granite-4-h"))
def test_bits_of_other_paths_with_recurrence(folder, family, isa):
    steps = on_cpu(folder / family, isa=isa)
    expected = steps.chunked(TOKENS, [LENGTH])
    _same_bits(steps.chunked(TOKENS, [1, 2, 7, 64]), expected)
    _few_rows_have_the_same_bits(steps, expected)


def _spoil_states(backend: CpuBackend) -> None:
    """Every slot but the zeros is full of NaN, as a request that overflowed may leave it."""
    states = backend._states
    states.slots[states.layout.nbytes :] = 0xFF


def _few_rows_have_the_same_bits(steps: Steps, expected: F32) -> None:
    """Decodes of one row, and of several as for drafts; the KV cache holds `TOKENS`."""
    rng = np.random.default_rng(1)
    if steps.model.blueprint.recurrent_layers:
        steps.chunked(TOKENS, [1])  # leaves the state at every position
    for most in (1, 8):  # rows of a sequence
        starts = rng.integers(1, LENGTH - most, 24)
        sizes = rng.integers(1, most + 1, 24)
        rows = [np.arange(start, start + n) for start, n in zip(starts, sizes, strict=True)]
        decodes = [Piece(TOKENS[at], int(at[0]), steps.blocks) for at in rows]
        _same_bits(steps.run(decodes), expected[np.concatenate(rows)])


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_alone_are_those_of_the_reference(folder, family):
    """Between an RMSNorm of embeddings and the head, in float32: only the order of sums differs."""
    results = []
    for steps in (on_cpu(folder / family), Steps(folder / family, ReferenceBackend())):

        def forward(backend: Backend, model: Decoder = steps.model) -> Array:
            layer = model.layers[-1]  # The first ones may have no experts.
            experts = model.blueprint.experts
            assert experts is not None
            h = backend.rms_norm(backend.embed(model.embedding), layer.ffn_norm, 1e-5)
            names = ("router_bias", "choice_bias", "gate_up_bias", "down_bias")
            biases = {name: getattr(layer, name) for name in names}
            mixed = backend.moe(h, layer.router, layer.gate_up, layer.down, experts, **biases)
            if layer.shared is not None and layer.shared.gate is not None:
                mixed = backend.add_gated(mixed, h, h, layer.shared.gate)
            return backend.linear(mixed, model.head)

        steps.model.forward = forward
        results.append(steps.run([Piece(TOKENS, 0, steps.blocks)]))
    found, expected = results
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() <= 1e-5


@pytest.mark.parametrize(("family", "most"), (("gemma2", 32767), ("mixtral", 65535)))
def test_more_rows_than_tiles_are_refused(folder, family, most):
    with pytest.raises(InvalidRequestError, match="max_num_batched_tokens") as caught:
        Steps(folder / family, CpuBackend(max_num_batched_tokens=65536))
    assert str(most) in caught.value.fix


def _same_bits(found: F32, expected: F32) -> None:
    assert np.isfinite(expected).all()
    differs = (found.view(np.int32) != expected.view(np.int32)).any(axis=1)
    assert not differs.any(), f"{differs.sum()} rows differ, the first is {differs.argmax()}"
