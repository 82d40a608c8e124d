"""Models whose parts differ in type, and files that must be refused before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from steps import Piece, own_cache, step_inputs
from tiny_gguf import write_tiny_gguf
from twinphase.backends.base import Backend, KVCacheSpec
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.cpu.weights import Vector
from twinphase.backends.reference import ReferenceBackend
from twinphase.backends.states import refuse_unlike_layers
from twinphase.blueprint import KVShape
from twinphase.errors import (
    CheckpointError,
    InvalidRequestError,
    OutOfMemoryError,
    TwinphaseError,
    UnsupportedModelError,
)
from twinphase.models.loader import load_model, read_blueprint
from twinphase.models.share import share_of
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.gguf import open_gguf


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory) -> Iterator[None]:
    with own_cache(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return open_gguf(
        write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tensor_type="F32")
    )


def logits(checkpoint: Checkpoint, backend: Backend) -> np.ndarray:
    model = load_model(checkpoint, backend)
    config = model.blueprint
    backend.allocate_kv_cache(KVCacheSpec.of(config, 8))
    tokens = np.arange(3, 53, dtype=np.int32)
    piece = Piece(tokens, 0, np.array([5, 0, 2, 7], np.int32))
    return backend.execute(model.forward, step_inputs([piece])).copy()


@pytest.mark.parametrize(
    ("tensor_type", "types", "hidden", "heads"),
    [
        ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K"}, 256, 2),  # what llama.cpp calls Q4_K_M
        ("Q8_0", {"attn_v": "F16", "ffn_up": "BF16"}, 64, 2),  # quantized and dense in one layer
        ("F32", {"attn_k": "Q4_0"}, 96, 6),
    ],
)
def test_a_layer_of_several_types(tmp_path, tensor_type, types, hidden, heads):
    path = write_tiny_gguf(
        tmp_path / "mixed.gguf",
        hidden=hidden,
        heads=heads,
        kv_heads=heads // 2,
        ffn=256,
        tensor_type=tensor_type,
        embedding_type="Q8_0" if hidden % 256 else None,
        types=types,
    )
    expected, found = (
        logits(open_gguf(path), backend) for backend in (ReferenceBackend(), CpuBackend(threads=2))
    )
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 0.05  # int8 activations and keys; a wrong column or type would be of order 1


def test_norms_and_logits_have_the_width_of_what_they_are_given(tmp_path):
    """A model may norm other things, and its logits need not come from the last layer called."""
    checkpoint = open_gguf(
        write_tiny_gguf(tmp_path / "wide.gguf", hidden=64, ffn=160, tensor_type="F32")
    )
    weights = np.linspace(0.5, 2, 160, dtype=np.float32)

    def logits_of(backend: Backend, norm: object) -> np.ndarray:
        model = load_model(checkpoint, backend)
        backend.allocate_kv_cache(KVCacheSpec((KVShape(2, 16),) * 2, 4))

        def forward(backend: Backend) -> object:
            x = backend.logit_rows(backend.embed(model.embedding))
            wide = backend.gated_linear(x, model.layers[0].gate_up)
            wanted = backend.linear(backend.rms_norm(wide, norm, 1e-5), model.layers[0].down)
            backend.linear(x, model.head)
            return wanted

        piece = Piece(np.array([7, 8, 9], np.int32), 0, np.arange(1, dtype=np.int32))
        return backend.execute(forward, step_inputs([piece])).copy()

    expected = logits_of(ReferenceBackend(), weights)
    found = logits_of(CpuBackend(threads=2), Vector(weights, 160))
    assert found.shape == expected.shape == (3, 64)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "error", "says"),
    [
        ("blk.0.attn_q.bias", (64,), UnsupportedModelError, "attn_q.bias"),
        ("blk.1.ffn_gate_exps.weight", (4, 128, 64), UnsupportedModelError, "ffn_gate_exps"),
        ("output.weight", (320, 128), CheckpointError, "output.weight"),
        ("rope_freqs.weight", (3,), CheckpointError, "rope_freqs.weight"),
        ("blk.0.attn_q.weight", (64, 32), CheckpointError, "attn_q.weight"),
    ],
)
def test_tensors_that_are_wrong_or_would_be_ignored(
    checkpoint,
    name,
    shape,
    error,
    says,
):
    known = checkpoint.tensors["token_embd.weight"]
    wrong = replace(known, name=name, shape=shape, nbytes=known.nbytes // 2)
    with pytest.raises(error, match=says):
        read_blueprint(replace(checkpoint, tensors={**checkpoint.tensors, name: wrong}))


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("rope.dimension_count", 128, CheckpointError),
        ("rope.dimension_count", 7, CheckpointError),
        ("context_length", 900_000_000, CheckpointError),
        ("rope.scaling.type", "dynamic", UnsupportedModelError),
    ],
)
def test_hyper_parameters_that_cannot_be_honoured(checkpoint, key, value, error):
    with pytest.raises(error, match=key.rpartition(".")[2]):
        read_blueprint(replace(checkpoint, metadata={**checkpoint.metadata, f"llama.{key}": value}))


def test_a_kv_cache_beyond_all_memory(checkpoint):
    backend = CpuBackend(threads=1)
    load_model(checkpoint, backend)
    with pytest.raises(OutOfMemoryError, match="KV cache"):
        backend.allocate_kv_cache(KVCacheSpec((KVShape(2, 16),) * 2, 1 << 40))


def test_layers_with_different_heads_are_refused_where_they_are_not_computed(tmp_path):
    checkpoint = open_gguf(
        write_tiny_gguf(tmp_path / "shared.gguf", layers=5, shared_kv=2, window=40)
    )
    blueprint = read_blueprint(checkpoint)
    with pytest.raises(TwinphaseError, match="shared.gguf has layers with different heads"):
        refuse_unlike_layers(checkpoint, blueprint, "torch")
    uneven = replace(blueprint, num_heads=6, num_kv_heads=3, full_kv=KVShape(2, 32))
    with pytest.raises(InvalidRequestError, match="3 KV heads of 16 and 2 of 32, which ranks do"):
        share_of(checkpoint, uneven, 0, 2)
