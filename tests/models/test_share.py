"""How ranks divide a recurrence: each value head once, with the key head that it reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.blueprint import DeltaNet
from twinphase.models.loader import open_model, read_blueprint
from twinphase.models.share import share_of
from twinphase.weights.checkpoint import Checkpoint, TensorInfo

KEY_DIM = 2
VALUE_DIM = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Checkpoint:
    path = tmp_path_factory.mktemp("share") / "deltas.gguf"
    return open_model(write_tiny_gguf(path, deltas=(0,), heads=8, kv_heads=8, hidden=256))


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_value_heads_go_with_their_key_heads(tiny, tiled, key_heads, ranks):
    sizes = {"taps": 4, "key_heads": key_heads, "value_heads": 8, "log_decay": False}
    delta = DeltaNet(key_dim=KEY_DIM, value_dim=VALUE_DIM, tiled=tiled, **sizes)
    blueprint = replace(read_blueprint(tiny), recurrence=delta)
    # Each row of a tensor is its own number.
    rows = {"attn_gate": delta.num_values, "attn_qkv": delta.channels, "ssm_alpha": 8}
    tensors = {}
    data = np.arange(delta.channels, dtype=np.float32).view(np.uint8)
    for name, count in rows.items():
        full = f"blk.0.{name}.weight"
        tensors[full] = TensorInfo(full, (count, 1), "F32", 0, 4 * count)
    checkpoint = replace(tiny, tensors=tensors, files=(data,))
    found = []
    for rank in range(ranks):
        part, local = share_of(checkpoint, blueprint, rank, ranks)
        own = local.recurrence
        gate, mixed, alpha = (
            part.raw(f"blk.0.{name}.weight").view(np.float32).astype(int) for name in rows
        )
        q, k, v = np.split(mixed, [own.num_keys, 2 * own.num_keys])
        np.testing.assert_array_equal(v - 2 * delta.num_keys, gate)
        np.testing.assert_array_equal(k - delta.num_keys, q)
        columns = [first + i for _, first, size in local.share.states.pieces for i in range(size)]
        np.testing.assert_array_equal(columns, gate)
        for head, number in enumerate(alpha.tolist()):
            found.append(number)
            assert gate[VALUE_DIM * head] == VALUE_DIM * number
            key = head % own.key_heads if tiled else head // (own.value_heads // own.key_heads)
            whole = number % key_heads if tiled else number // (8 // key_heads)
            assert q[KEY_DIM * key] == KEY_DIM * whole
    assert sorted(found) == list(range(8))
