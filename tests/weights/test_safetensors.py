"""Hugging Face folders open under GGUF's names with the values that were saved; damage is named."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinphase.errors import (
    CheckpointError,
    ModelNotFoundError,
    TwinphaseError,
    UnsupportedModelError,
)
from twinphase.weights import made
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.gguf import quantization_name
from twinphase.weights.quant import dequantize
from twinphase.weights.safetensors import open_safetensors, read_folder_config
from twinphase.weights.safetensors_header import read_safetensors_header
from twinphase.weights.storage import last_used

HIDDEN = 32
FFN = 64
EXPERTS = 3
Tensors = dict[str, np.ndarray]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def layer(prefix: str = "model.") -> Tensors:
    names = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN),
        "input_layernorm": (HIDDEN,),
    }
    tensors = {f"{prefix}layers.0.{name}.weight": random(*shape) for name, shape in names.items()}
    return {**tensors, f"{prefix}embed_tokens.weight": random(100, HIDDEN)}


def write(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None
) -> Path:
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **(config or {})}))
    safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_shards(folder: Path, *shards: Tensors) -> Path:
    places = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        safetensors.numpy.save_file(tensors, folder / name)
        places |= dict.fromkeys(tensors, name)
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    return folder


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    info = checkpoint.tensors[name]
    return dequantize(checkpoint.raw(name), info.shape, info.type)


def holds(checkpoint: Checkpoint, expected: Tensors) -> None:
    assert checkpoint.tensors.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(values(checkpoint, name), value)


def refused(folder: Path, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as raised:
        open_safetensors(folder, "llama")
    assert isinstance(raised.value, TwinphaseError) and raised.value.fix
    assert "\n" not in str(raised.value)


# Content
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_tensors_are_views_of_the_file_under_their_gguf_names(folder, dtype):
    tensors = {
        name: value.astype({"F32": "f4", "F16": "f2"}[dtype]) for name, value in layer().items()
    }
    checkpoint = open_safetensors(write(folder, tensors), "llama")
    expected = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    }
    assert checkpoint.tensors.keys() == expected.keys()
    for name, original in expected.items():
        assert checkpoint.tensors[name].type == dtype and np.shares_memory(
            checkpoint.raw(name), checkpoint.files[0]
        )
        np.testing.assert_array_equal(values(checkpoint, name), tensors[original])
    assert len(checkpoint.files) == 1 and quantization_name(checkpoint) == dtype


def test_bfloat16(folder):
    value = (random(8, HIDDEN).view(np.uint32) & 0xFFFF0000).view(np.float32)
    write(folder, {})
    halves = (value.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    content = header(
        {"model.embed_tokens.weight": entry("BF16", [8, HIDDEN], [0, len(halves)])}, halves
    )
    (folder / "model.safetensors").write_bytes(content)
    checkpoint = open_safetensors(folder, "llama")
    assert checkpoint.tensors["token_embd.weight"].type == "BF16"
    np.testing.assert_array_equal(values(checkpoint, "token_embd.weight"), value)


def test_shards(folder):
    tensors = layer()
    (a, first), *rest = tensors.items()
    checkpoint = open_safetensors(write_shards(folder, {a: first}, dict(rest)), "llama")
    assert len(checkpoint.files) == 2 and {t.file for t in checkpoint.tensors.values()} == {0, 1}
    np.testing.assert_array_equal(
        values(checkpoint, "token_embd.weight"), tensors["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_the_text_model_within_a_larger_one(folder, prefix):
    others = {
        "vision_tower.layers.0.mlp.fc1.weight": random(4),
        "model.visual.patch_embed.weight": random(4),
    }
    others["model.multi_modal_projector.linear.weight"] = random(4)
    config = {
        "text_config": {"num_hidden_layers": 1, "hidden_size": HIDDEN},
        "hidden_size": 7,
        "model_type": "outer",
    }
    checkpoint = open_safetensors(write(folder, {**layer(prefix), **others}, config), "llama")
    assert "blk.0.attn_q.weight" in checkpoint.tensors and len(checkpoint.tensors) == 4
    assert checkpoint.config is not None
    assert (checkpoint.config["hidden_size"], checkpoint.config["model_type"]) == (HIDDEN, "outer")


def test_buffers_and_tied_heads_are_left_out_and_the_unknown_stays(folder):
    tensors = layer() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": random(8),
        "lm_head.weight": random(100, 8),
    }
    tensors["model.layers.0.mystery.weight"] = random(8)
    open_untied = open_safetensors(write(folder, tensors), "llama")
    assert {"output.weight", "model.layers.0.mystery.weight"} <= open_untied.tensors.keys()
    assert not any("inv_freq" in name for name in open_untied.tensors)
    tied = open_safetensors(write(folder, tensors, {"tie_word_embeddings": True}), "llama")
    assert "output.weight" not in tied.tensors


# Experts
# ------------------------------------------------------------------------------------------------


def experts_one_by_one(names: Mapping[str, str]) -> tuple[Tensors, Tensors]:
    """Tensors by a folder's names, and what must come of them by GGUF's."""
    tensors = {}
    expected = {}
    for part, name in names.items():
        shape = (HIDDEN, FFN) if part == "down" else (FFN, HIDDEN)
        matrices = [random(*shape, seed=i + len(part) * 10) for i in range(EXPERTS)]
        tensors |= {
            f"model.layers.0.{name.format(i)}.weight": matrix for i, matrix in enumerate(matrices)
        }
        expected[f"blk.0.ffn_{part}_exps.weight"] = np.stack(matrices)
    return tensors, expected


QWEN = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
MIXTRAL = {
    part: f"block_sparse_moe.experts.{{}}.{w}"
    for part, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
SINGLE = [("qwen3moe", QWEN), ("olmoe", QWEN), ("llama", MIXTRAL)]


@pytest.mark.parametrize(("architecture", "names"), SINGLE)
def test_experts_are_stacked_and_kept(
    folder,
    cache,
    monkeypatch,
    architecture,
    names,
):
    monkeypatch.setattr(made, "_SMALL_BYTES", 0)
    tensors, expected = experts_one_by_one(names)
    write(folder, tensors)
    reports: list[tuple[str, int, int | None]] = []
    for _ in range(2):
        checkpoint = open_safetensors(
            folder, architecture, progress=lambda *report: reports.append(report)
        )
        holds(checkpoint, expected)
    assert len(list(cache.rglob("tensors-none.gguf"))) == 1 and not list(cache.rglob(".tensors*"))
    total = sum(value.nbytes for value in expected.values())
    assert [done for _, done, _ in reports] == [
        0,
        total // 3,
        2 * total // 3,
        total,
    ]  # the second open made nothing
    assert reports[-1][2] == total
    tensors["model.layers.0." + names["up"].format(1) + ".weight"] *= 2
    write(folder, tensors)
    os.utime(folder / "model.safetensors", (1, 1))
    changed = open_safetensors(folder, architecture)
    np.testing.assert_array_equal(
        values(changed, "blk.0.ffn_up_exps.weight")[1], 2 * expected["blk.0.ffn_up_exps.weight"][1]
    )
    assert changed.fingerprint != checkpoint.fingerprint


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"x" * 5000])
def test_a_damaged_file_of_made_tensors_is_made_anew(folder, cache, monkeypatch, damage):
    monkeypatch.setattr(made, "_SMALL_BYTES", 0)
    tensors, expected = experts_one_by_one(QWEN)
    open_safetensors(write(folder, tensors), "qwen3moe")
    (kept,) = cache.rglob("tensors-none.gguf")
    kept.write_bytes(damage)
    killed = kept.with_name(f".tensors-none.gguf-{2**22 + 1}-x")  # no process has that id
    killed.touch()
    checkpoint = open_safetensors(folder, "qwen3moe")
    holds(checkpoint, expected)
    assert kept.stat().st_size > 5000 and not killed.exists()


def test_what_was_made_goes_when_the_model_is_gone_and_another_comes(
    folder, tmp_path, cache, monkeypatch
):
    monkeypatch.setattr(made, "_SMALL_BYTES", 0)
    tensors, _ = experts_one_by_one(QWEN)
    open_safetensors(write(folder, tensors), "qwen3moe")
    (kept,) = cache.rglob("tensors-none.gguf")
    second = tmp_path / "second"
    third = tmp_path / "third"
    for place in (second, third):
        place.mkdir()
        write(place, tensors)
    open_safetensors(second, "qwen3moe")
    assert kept.exists()
    shutil.rmtree(folder)
    open_safetensors(third, "qwen3moe")
    assert not kept.exists() and len(list(cache.rglob("tensors-none.gguf"))) == 2


def test_without_a_cache_they_are_made_in_memory(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(made, "_SMALL_BYTES", 0)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "file" / "cache"))
    tensors, expected = experts_one_by_one(QWEN)
    checkpoint = open_safetensors(write(folder, tensors), "qwen3moe")
    assert checkpoint.cache_dir is None
    holds(checkpoint, expected)


def test_gpt_oss_experts_are_taken_apart(folder):
    gate_up = random(EXPERTS, HIDDEN, 2 * FFN)
    down = random(EXPERTS, FFN, HIDDEN)
    biases = random(EXPERTS, 2 * FFN), random(EXPERTS, HIDDEN)
    prefix = "model.layers.0.mlp.experts."
    tensors = {
        "gate_up_proj": gate_up,
        "gate_up_proj_bias": biases[0],
        "down_proj": down,
        "down_proj_bias": biases[1],
    }
    tensors = {prefix + name: value for name, value in tensors.items()}
    tensors["model.layers.0.self_attn.sinks"] = random(4)
    checkpoint = open_safetensors(write(folder, tensors), "gpt-oss")
    expected = {
        "ffn_gate_exps.weight": gate_up[..., ::2].transpose(0, 2, 1),
        "ffn_up_exps.weight": gate_up[..., 1::2].transpose(0, 2, 1),
        "ffn_down_exps.weight": down.transpose(0, 2, 1),
        "ffn_gate_exps.bias": biases[0][:, ::2],
        "ffn_up_exps.bias": biases[0][:, 1::2],
        "ffn_down_exps.bias": biases[1],
        "attn_sinks.weight": tensors["model.layers.0.self_attn.sinks"],
    }
    holds(checkpoint, {f"blk.0.{name}": value for name, value in expected.items()})


def test_stacked_experts_of_other_models(folder):
    gate_up = random(EXPERTS, 2 * FFN, HIDDEN)
    down = random(EXPERTS, HIDDEN, FFN)
    prefix = "model.layers.0.mlp.experts."
    checkpoint = open_safetensors(
        write(folder, {prefix + "gate_up_proj": gate_up, prefix + "down_proj": down}), "qwen3moe"
    )
    expected = {"gate": gate_up[:, :FFN], "up": gate_up[:, FFN:], "down": down}
    holds(checkpoint, {f"blk.0.ffn_{part}_exps.weight": value for part, value in expected.items()})


def test_missing_and_unequal_experts(folder):
    tensors, _ = experts_one_by_one(QWEN)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    with pytest.raises(CheckpointError, match="differ in shape"):
        open_safetensors(write(folder, tensors | {name: random(8, 8)}), "qwen3moe")
    del tensors[name]
    with pytest.raises(CheckpointError, match="no expert 1 of 3"):
        open_safetensors(write(folder, tensors), "qwen3moe")


# The cache
# ------------------------------------------------------------------------------------------------


def test_fingerprint_and_use(folder, tmp_path):
    first = open_safetensors(write(folder, layer()), "llama", mark_used=False)
    assert last_used(folder) is None
    assert open_safetensors(folder, "llama").fingerprint == first.fingerprint
    assert last_used(folder) is not None
    assert first.cache_dir is not None
    (first.cache_dir / "derived").write_text("of this folder")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "vocab.json").symlink_to(tmp_path / "nowhere")
    second = open_safetensors(folder, "llama")
    assert second.fingerprint == first.fingerprint and not (first.cache_dir / "derived").exists()
    write(folder, layer(), {"rope_theta": 5e5})
    assert open_safetensors(folder, "llama").fingerprint != first.fingerprint
    (tmp_path / "moved").mkdir()
    assert (
        open_safetensors(write(tmp_path / "moved", layer()), "llama").fingerprint
        == first.fingerprint
    )


# Damage
# ------------------------------------------------------------------------------------------------


def header(content: object, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(
    dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGE = {
    "too short": b"1234567",
    "header of 9223372036854775808 bytes": struct.pack("<Q", 1 << 63),
    "header of 99 bytes": struct.pack("<Q", 99) + b"{}",
    "not valid JSON": header(b"{"),
    "not valid JSON: 'utf-8'": header(b'{"\xff": 1}'),
    "not a JSON object": header([]),
    "nested too deeply": header(b'{"a":' + b"[" * 100_000),
    "a key occurs twice": header(b'{"a": 1, "a": 2}'),
    "lacks a dtype": header({"a": {"dtype": "F32"}}),
    "'a' lacks": header({"a": 3}),
    "unknown dtype 'F99'": header({"a": entry("F99")}, bytes(8)),
    "unknown dtype '7'": header({"a": entry(7)}, bytes(8)),
    "absurd shape": header({"a": entry(shape=[-1])}, bytes(8)),
    "'b' has an absurd shape": header({"b": entry(shape=[True, 2])}, bytes(8)),
    "'c' has an absurd shape": header({"c": entry(shape=[1] * 9)}, bytes(8)),
    "absurd offsets": header({"a": entry(offsets=[0])}, bytes(8)),
    "'b' has absurd offsets": header({"b": entry(offsets=[0, 1 << 70])}, bytes(8)),
    "takes 16": header({"a": entry(shape=[4])}, bytes(8)),
    "has -8 bytes": header({"a": entry(offsets=[8, 0])}, bytes(8)),
    "'b' starts at byte": header({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
    "but the header ends at": header({"a": entry(offsets=[8, 16])}, bytes(16)),
    "the tensors end at byte": header({"a": entry()}, bytes(7)),
    "tensors end at byte .*, the file at": header({"a": entry()}, bytes(9)),
}


@pytest.mark.parametrize("match", DAMAGE)
def test_each_kind_of_damage_is_named(folder, match):
    write(folder, {})
    (folder / "model.safetensors").write_bytes(DAMAGE[match])
    with pytest.raises(CheckpointError, match=match) as raised:
        open_safetensors(folder, "llama")
    assert raised.value.fix and "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_what_the_package_refuses_is_refused():
    for content in DAMAGE.values():
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)


def test_damaged_folders(folder, tmp_path):
    with pytest.raises(ModelNotFoundError, match="no folder"):
        read_folder_config(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match=r"no config.json"):
        read_folder_config(folder)
    for text, match in (
        ("[]", "not a JSON object"),
        ("{", "not valid JSON"),
        ('{"num_hidden_layers": -1}', "-1"),
    ):
        (folder / "config.json").write_text(text)
        refused(folder, CheckpointError, match)
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    refused(folder, ModelNotFoundError, r"no model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    (folder / "pytorch_model.bin").chmod(0)
    refused(folder, UnsupportedModelError, r"pytorch_model.bin.*runs code.*not opened")
    write(folder, {"model.embed_tokens.weight": np.zeros((4, 4), np.int64)})
    refused(folder, UnsupportedModelError, "token_embd.weight.*I64")
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, CheckpointError, "is empty")


def test_damaged_indexes(folder):
    write_shards(
        folder, {"model.embed_tokens.weight": random(4, 4)}, {"model.norm.weight": random(4)}
    )
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    for places, match in (
        (
            {**good, "model.norm.weight": "model-00003-of-00003.safetensors"},
            r"lacks model-00003-of-00003.safetensors",
        ),
        (
            {**good, "lm_head.weight": "model-00001-of-00002.safetensors"},
            "no tensor 'lm_head.weight'",
        ),
        ({"a": "../../etc/passwd"}, "not a file beside it"),
        ({"a": "/x.safetensors"}, "not a file beside it"),
        ({"a": 3}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        refused(folder, CheckpointError, match)


@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_mutated_headers_open_or_fail_cleanly(data):
    content = bytearray(
        safetensors.numpy.save({"a": random(4, 4), "b.weight": random(8), "c": random(2, 3, 4)})
    )
    end = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        likely = st.sampled_from(
            [b"0", b"9", b"-", b"[", b"]", b'"', b"{", b"}", b",", b"e9", b"\xff", b"null"]
        )
        patch = data.draw(st.binary(min_size=1, max_size=8) | likely)
        content[at : at + len(patch)] = patch
    try:
        entries = read_safetensors_header(bytes(content), "mutated")
    except TwinphaseError as error:
        assert error.cause and "\n" not in str(error)
    else:
        for found in entries.values():
            assert end <= found.offset <= found.offset + found.nbytes <= len(content)
