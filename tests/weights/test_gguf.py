"""GGUF files open with the content that the gguf package reads; damage is named."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiny_gguf import write_tiny_gguf

from twinphase.errors import (
    CheckpointError,
    ModelNotFoundError,
    TwinphaseError,
    UnsupportedModelError,
)
from twinphase.models.loader import open_model
from twinphase.weights import gguf as gguf_module
from twinphase.weights.block_formats import FORMATS
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.gguf import open_gguf, quantization_name
from twinphase.weights.gguf_header import read_header
from twinphase.weights.storage import last_used


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def header_bytes(
    *, tensors: int = 0, entries: bytes = b"", count: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + entries


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor_entry(name: str, shape: tuple[int, ...], type: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type, offset)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def opened(path: Path, content: bytes) -> Checkpoint:
    path.write_bytes(content)
    return open_gguf(path)


# Content
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", FORMATS)
def test_content_equals_that_of_the_gguf_package(tmp_path, type):
    size = max(64, FORMATS[type].block_size)
    path = write_tiny_gguf(tmp_path / "m.gguf", hidden=size, ffn=size, tensor_type=type, tied=False)
    checkpoint = open_gguf(path)
    reader = gguf.GGUFReader(path)
    assert checkpoint.architecture == "llama"
    assert "tokenizer.ggml.tokens" not in checkpoint.metadata
    everything = {**checkpoint.metadata, **checkpoint.vocabulary()}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert np.array_equal(everything.pop(key), field.contents()), key
    assert not everything
    assert len(checkpoint.tensors) == len(reader.tensors)
    for expected in reader.tensors:
        info = checkpoint.tensors[expected.name]
        assert info.shape == tuple(reversed(expected.shape.tolist()))
        assert (info.type, info.offset) == (expected.tensor_type.name, expected.data_offset)
        np.testing.assert_array_equal(
            checkpoint.raw(expected.name), expected.data.reshape(-1).view(np.uint8)
        )
    assert quantization_name(checkpoint) == (
        f"{type}_S" if type in ("Q3_K", "Q4_K", "Q5_K") else type
    )


def test_values_of_every_metadata_type(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    values: dict[str, object] = {
        "uint8": 200,
        "uint16": 60000,
        "uint32": 2**32 - 1,
        "uint64": 2**63,
    }
    values |= {"int8": -100, "int16": -30000, "int32": -(2**31), "int64": -(2**62)}
    values |= {"float32": 0.5, "float64": 1e300, "bool": True, "string": "ünï"}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.floats", [0.5, 1.5])
    writer.add_array("x.texts", ["a", "ü"])
    writer.add_array("x.long", list(range(5000)))
    finish(writer)
    for _ in range(2):  # from the header, then from the index
        metadata = open_gguf(tmp_path / "m.gguf").metadata
        assert {kind: metadata[f"x.{kind}"] for kind in values} == values
        assert (metadata["x.floats"], metadata["x.texts"]) == ([0.5, 1.5], ["a", "ü"])
        assert "x.long" not in metadata


def test_tensors_of_a_vision_model_in_the_same_file_are_left_out(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "gemma3")
    for name in ("token_embd.weight", "v.blk.0.attn_k.weight", "mm.mm_input_projection.weight"):
        writer.add_tensor(name, np.zeros(32, np.float32))
    finish(writer)
    assert list(open_gguf(tmp_path / "m.gguf").tensors) == ["token_embd.weight"]


# The index
# ------------------------------------------------------------------------------------------------


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return all(
        getattr(a, name) == getattr(b, name)
        for name in ("metadata", "tensors", "fingerprint", "architecture")
    )


def test_the_second_open_reads_only_the_index(tmp_path, monkeypatch):
    path = write_tiny_gguf(tmp_path / "m.gguf")
    first = open_gguf(path)
    monkeypatch.setattr(gguf_module, "read_header", lambda *_: pytest.fail("read the header"))
    second = open_gguf(path)
    assert same(first, second)
    assert first.cache_dir == second.cache_dir
    np.testing.assert_array_equal(first.files[0], second.files[0])


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"\x91\x01", b"\xc0", b"\xff\xfe", b"\x91" * 100_000, None]
)
def test_a_damaged_index_is_rebuilt(tmp_path, cache, content):
    path = write_tiny_gguf(tmp_path / "m.gguf")
    first = open_gguf(path)
    (index,) = cache.rglob("index.msgpack")
    if content is None:
        stored = msgspec.msgpack.decode(index.read_bytes())
        stored["tensors"]["token_embd.weight"]["nbytes"] = 10**15  # beyond the end of the file
        content = msgspec.msgpack.encode(stored)
    index.write_bytes(content)
    assert same(open_gguf(path), first)
    assert msgspec.msgpack.decode(index.read_bytes())["fingerprint"] == first.fingerprint


def test_a_changed_file_is_read_anew(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf")
    first = open_gguf(path)
    (first.cache_dir / "derived.json").write_text("of the former content")  # type: ignore[operator]
    write_tiny_gguf(path, seed=1)
    os.utime(path, (1, 1))
    second = open_gguf(path)
    assert second.fingerprint != first.fingerprint
    assert second.metadata == first.metadata
    assert not (second.cache_dir / "derived.json").exists()  # type: ignore[operator]


def test_the_fingerprint_is_of_the_content(tmp_path):
    a = open_gguf(write_tiny_gguf(tmp_path / "a.gguf"))
    b = open_gguf(write_tiny_gguf(tmp_path / "b.gguf"))
    c = open_gguf(write_tiny_gguf(tmp_path / "c.gguf", rope_theta=5e5))
    assert a.fingerprint == b.fingerprint != c.fingerprint


def test_an_unwritable_cache_costs_only_the_index(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "file" / "cache"))
    path = write_tiny_gguf(tmp_path / "m.gguf")
    for _ in range(2):
        checkpoint = open_gguf(path)
        assert checkpoint.cache_dir is None and checkpoint.metadata["llama.block_count"] == 2
    assert last_used(path) is None


def test_use_is_remembered_and_looking_is_no_use(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf")
    open_gguf(path, mark_used=False)
    assert last_used(path) is None
    open_gguf(path)
    assert last_used(path) is not None


def test_opening_does_not_import_the_gguf_package(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from twinphase.weights.gguf import open_gguf; open_gguf(sys.argv[1]);"
        "sys.exit('gguf' in sys.modules or 'tokenizers' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(gguf_module.__file__).parents[2])}
    assert (
        subprocess.run(
            [sys.executable, "-c", code, str(path)], env=environment, check=False
        ).returncode
        == 0
    )


# Split files
# ------------------------------------------------------------------------------------------------


def write_parts(folder: Path, count: int = 3) -> list[Path]:
    """A model in parts as llama.cpp's gguf-split makes them, by the gguf package's own writer."""
    writer = gguf.GGUFWriter(str(folder / "m.gguf"), "llama", split_max_tensors=2)
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for i in range(2 * count):
        writer.add_tensor(f"t{i}", np.full((2, 32), i, np.float32))
    finish(writer)
    return sorted(folder.glob("*.gguf"))


def test_the_first_part_opens_all(tmp_path):
    paths = write_parts(tmp_path)
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for _ in range(2):  # from the headers, then from the index
        checkpoint = open_gguf(paths[0])
        assert len(checkpoint.files) == 3 and len(checkpoint.tensors) == 6
        for i in range(6):
            np.testing.assert_array_equal(
                checkpoint.raw(f"t{i}").view(np.float32), np.full(64, i, np.float32)
            )
        assert checkpoint.vocabulary()["tokenizer.ggml.tokens"] == ["a", "b"]
    os.utime(paths[2], (1, 1))
    assert open_gguf(paths[0]).fingerprint == checkpoint.fingerprint
    with pytest.raises(CheckpointError, match="not the first part"):
        open_gguf(paths[1])


def test_parts_that_are_missing_or_do_not_fit(tmp_path):
    first, second, third = write_parts(tmp_path)
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(CheckpointError, match="lacks its part .*m-00003-of-00003.gguf"):
        open_gguf(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"part 1 \(from 0\) of 3, by its name 2 of 3"):
        open_gguf(first)
    third.write_bytes(kept.replace(b"t4", b"t0"))
    with pytest.raises(CheckpointError, match="tensor 't0' that another part has too"):
        open_gguf(first)
    third.write_bytes(kept)
    count = first.read_bytes()
    at = count.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    first.write_bytes(count[:at] + struct.pack("<i", 7) + count[at + 4 :])
    with pytest.raises(CheckpointError, match="says 7 tensors, its parts have 6"):
        open_gguf(first)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(count)
    with pytest.raises(CheckpointError, match="of 3, by its name 0 of 1"):
        open_gguf(alone)


# Damage
# ------------------------------------------------------------------------------------------------


def test_missing_files_and_directories(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFoundError, match="directory"):
        open_gguf(tmp_path)
    with pytest.raises(CheckpointError, match="null"):
        open_gguf("a\0b")


@pytest.mark.parametrize("seed", range(10))
def test_truncation(tmp_path, tiny_bytes, seed):
    # Half of the offsets in the header, which is the smaller part of the file.
    limit = len(tiny_bytes) if seed % 2 else read_header(tiny_bytes, "").data_start
    offset = random.Random(seed).randrange(limit)
    with pytest.raises(CheckpointError) as raised:
        opened(tmp_path / "m.gguf", tiny_bytes[:offset])
    assert raised.value.fix and "\n" not in str(raised.value)


ABSURD = 2**63


def one_entry(form: str, *values: int, key: str = "k", more: bytes = b"") -> bytes:
    """A header with one metadata entry, whose type and value are packed by `form`."""
    return header_bytes(count=1, entries=text(key) + struct.pack(f"<{form}", *values) + more)


def one_tensor(shape: tuple[int, ...], type: int = 0, offset: int = 0) -> bytes:
    return header_bytes(tensors=1, entries=tensor_entry("t", shape, type, offset)) + bytes(128)


def two_tensors(type: int, offset: int, more: int = 0) -> bytes:
    """Two tensors of 64 values; the first is of `type`, the second F32 at `offset`."""
    entries = tensor_entry("a", (64,), type, 0) + tensor_entry("b", (64,), 0, offset)
    content = header_bytes(tensors=2, entries=entries)
    return content + bytes(-len(content) % 32 + 512 + more)


CASES = {
    "'b' .F32. .* overlaps tensor 'a' .F32.": two_tensors(0, 0),
    "'b' .F32. .* overlaps tensor 'a'": two_tensors(0, 224),
    "'b' .F32. .* leaves a gap after tensor 'a' .F16.": two_tensors(1, 256),
    "'a' .F32. .* leaves a gap after the header": two_tensors(0, 256)[:-512]
    .replace(tensor_entry("a", (64,), 0, 0), tensor_entry("a", (64,), 0, 32))
    .replace(tensor_entry("b", (64,), 0, 256), tensor_entry("b", (64,), 0, 288))
    + bytes(544),
    "'b' .F32. ends at byte .*, the file at": two_tensors(0, 256, more=32),
    r"too short .*\(0 bytes": b"",
    r"too short .*\(23 bytes": b"GGUF" + b"x" * 19,
    "not a GGUF file": b"PK\x03\x04" + b"x" * 40,
    "version 1;": header_bytes(version=1) + b"x" * 40,
    "version 99;": header_bytes(version=99) + b"x" * 40,
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    f"{ABSURD} tensors do not fit": header_bytes(tensors=ABSURD),
    f"{ABSURD} metadata entries do not fit": header_bytes(count=ABSURD),
    "100 metadata entries do not fit": header_bytes(count=100),
    "name of metadata entry 0 needs": header_bytes(
        count=1, entries=struct.pack("<Q", ABSURD) + b"x" * 30
    ),
    "'k' needs": one_entry("IQ", 8, ABSURD),
    "strings of metadata entry 'k'": one_entry("IIQ", 9, 8, ABSURD),
    "elements of metadata entry 'k'": one_entry("IIQ", 9, 12, ABSURD),
    "a string of": one_entry("IIQQ", 9, 8, 1, ABSURD),
    "array of the unknown type 9": one_entry("IIQ", 9, 9, 0),
    "unknown type 77": one_entry("IQ", 77, 0),
    "occurs twice": header_bytes(count=2, entries=2 * (text("k") + struct.pack("<II", 4, 0))),
    "not UTF-8": header_bytes(
        count=1, entries=struct.pack("<Q", 1) + b"\xff" + struct.pack("<IQ", 4, 0)
    ),
    "alignment 3 ": one_entry("II", 4, 3, key="general.alignment"),
    "alignment 0 ": one_entry("II", 4, 0, key="general.alignment"),
    "alignment 'x'": one_entry("I", 8, key="general.alignment", more=text("x")),
    "99 dimensions": header_bytes(
        tensors=1, entries=text("t") + struct.pack("<I", 99) + b"\0" * 900
    ),
    r"shape \(4, 0\)": one_tensor((0, 4)),
    "ends at byte": one_tensor((2**62, 2**62)),
    "'t' ends at byte": one_tensor((4,), offset=2**62),
    "multiple of 32": one_tensor((4,), offset=5),
    "33 values": one_tensor((33,), type=2),
    "'t' occurs twice": header_bytes(tensors=2, entries=2 * tensor_entry("t", (4,), 0, 0))
    + bytes(128),
    "does not name its architecture": header_bytes(),
}


@pytest.mark.parametrize("more", [0, 31])
def test_tensors_without_gaps_are_read_and_padding_may_follow(more):
    header = read_header(two_tensors(0, 256, more), "whole")
    assert [info.offset - header.data_start for info in header.tensors.values()] == [0, 256]


@pytest.mark.parametrize("name", ["model.gguf", "config.json"])
def test_a_pipe_is_not_a_model_file(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a pipe, a device or a socket"):
        open_model(tmp_path / name if name.endswith("gguf") else tmp_path)


@pytest.mark.parametrize("match", CASES)
def test_each_kind_of_damage_is_named(tmp_path, match):
    with pytest.raises(CheckpointError, match=match) as raised:
        opened(tmp_path / "m.gguf", CASES[match])
    assert raised.value.fix and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("number", "name"), [(16, "IQ2_XXS"), (19, "IQ1_S"), (28, "F64"), (4242, "number 4242")]
)
def test_what_is_not_supported_is_named(tmp_path, number, name):
    with pytest.raises(UnsupportedModelError, match=f"'t' has type {name}"):
        opened(tmp_path / "m.gguf", one_tensor((256,), type=number))


@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_mutated_headers_open_or_fail_cleanly(tiny_bytes, data):
    # Written to memory only: the file system is the same for every header.
    content = bytearray(tiny_bytes)
    end = read_header(tiny_bytes, "tiny").data_start
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        extremes = st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f"])
        patch = data.draw(st.binary(min_size=1, max_size=8) | extremes)
        content[at : at + len(patch)] = patch
    try:
        header = read_header(bytes(content), "mutated")
    except TwinphaseError as error:
        assert error.cause and "\n" not in str(error)
    else:
        for info in header.tensors.values():
            assert 0 <= info.offset <= info.offset + info.nbytes <= len(content)


def test_memory_of_a_tensor_is_let_go_of_and_read_again(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", hidden=256, ffn=4096, tensor_type="F32")
    checkpoint = open_gguf(path)
    name = "blk.0.ffn_up.weight"  # 4 MB

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().partition(str(path))[2].splitlines()
        return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024

    before = checkpoint.raw(name).copy()
    held = resident()
    checkpoint.release(name)
    assert resident() < held - 4_000_000
    np.testing.assert_array_equal(checkpoint.raw(name), before)
