"""Instruction-set paths: which are offered and chosen, and what instructions each emits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from twinphase.backends.cpu import isa as isa_module
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.cpu.emit import I8, I32, I64, Emit, Value, vector
from twinphase.backends.cpu.formats import FORMATS
from twinphase.backends.cpu.isa import (
    ISAS,
    Isa,
    available_isas,
    baseline_cpu,
    choose_isa,
    prompt_isa,
)
from twinphase.errors import InvalidRequestError

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vnni"}


AMX = {"avx512bf16", "amx-tile", "amx-int8", "amx-bf16"}


@pytest.fixture
def features(monkeypatch) -> Iterator[set[str]]:
    """Features of the processor that is pretended to be here."""
    present: set[str] = set()
    monkeypatch.setattr(isa_module, "_host_features", lambda: frozenset(present))
    monkeypatch.setattr(isa_module, "_tiles_granted", lambda: "refused" not in present)
    yield present


@pytest.mark.parametrize(
    ("present", "expected"),
    (
        (set(), ["generic"]),
        ({"avx2", "fma"}, ["generic"]),
        (AVX2, ["avx2", "generic"]),
        (AVX2 | {"avxvnni"}, ["avx2-vnni", "avx2", "generic"]),
        (AVX512, ["avx512-vnni", "avx2", "generic"]),
        (AVX512 | {"avx512bf16"}, ["avx512-bf16", "avx512-vnni", "avx2", "generic"]),
        (
            AVX512 | AMX,
            ["avx512-amx", "avx512-amx-bf16", "avx512-bf16", "avx512-vnni", "avx2", "generic"],
        ),
        (AVX512 | AMX | {"refused"}, ["avx512-bf16", "avx512-vnni", "avx2", "generic"]),
        ({"neon", "dotprod"}, ["neon-dot", "generic"]),
    ),
    ids=("none", "half of avx2", "avx2", "avx-vnni", "vnni", "bf16", "amx", "amx refused", "arm"),
)
def test_best_first(features, present, expected):
    features |= present
    assert available_isas() == expected
    assert choose_isa(None).name == expected[0]
    assert [choose_isa(name) for name in expected] == [ISAS[name] for name in expected], (
        "a lesser path can be forced"
    )


@pytest.mark.parametrize(
    ("name", "why"),
    (("avx512-bf16", "lacks"), ("AVX2", "is not an instruction-set path"), ("", "is not")),
)
def test_what_is_not_here_is_refused(features, name, why):
    features |= AVX2
    with pytest.raises(InvalidRequestError, match=why) as caught:
        CpuBackend(isa=name)
    assert caught.value.fix == "Use one of: avx2, generic."


def _assembly(isa: Isa, triple: str, cpu: str, features: str, write: Callable[..., Value]) -> str:
    """Assembly of (emit, three registers) -> register, for another processor."""
    module = ir.Module("dot")
    module.triple = triple
    ty = vector(I32, isa.lanes)
    function = ir.Function(module, ir.FunctionType(ty, [ty, ty, ty]), "dot")
    e = Emit(ir.IRBuilder(function.append_basic_block()), isa)
    e.b.ret(write(e, *function.args))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3
    )
    return str(machine.emit_assembly(parsed))


X86 = "x86_64-unknown-linux-gnu"
ARM = "aarch64-unknown-linux-gnu"


# Triple, processor and features; the instructions of dot products and of lookups.
PROCESSORS = {
    "avx512-amx": (X86, "sapphirerapids", "", "vpdpbusd", "vpshufb"),
    "avx512-amx-bf16": (X86, "sapphirerapids", "", "vpdpbusd", "vpshufb"),
    "avx512-bf16": (X86, "znver4", "", "vpdpbusd", "vpshufb"),
    "avx512-vnni": (X86, "cascadelake", "", "vpdpbusd", "vpshufb"),
    "avx2-vnni": (X86, "alderlake", "", "vpdpbusd", "vpshufb"),
    "avx2": (X86, "haswell", "", "vpmaddubsw", "vpshufb"),
    "neon-dot": (ARM, "generic", "+dotprod", "sdot", "tbl"),
}


def lookup(e: Emit, codes: Value, *others: Value) -> Value:
    return e.lookup(codes, [value + 128 for value in FORMATS["IQ4_NL"].values])


@pytest.mark.parametrize(
    "write",
    (Emit.dot, partial(Emit.dot, signed=True), lookup),
    ids=("dot product", "signed dot product", "lookup"),
)
@pytest.mark.parametrize("name", PROCESSORS)
def test_an_operation_is_one_instruction(name, write):
    triple, cpu, features, dot_product, table_lookup = PROCESSORS[name]
    lines = _assembly(ISAS[name], triple, cpu, features, write).splitlines()
    instruction = table_lookup if write is lookup else dot_product
    assert sum(instruction in line.split()[:2] for line in lines) == 1
    assert not any(line.split()[:1] in (["bl"], ["callq"]) for line in lines), "a library call"


def test_matrix_tiles_are_the_instructions():
    def write(e: Emit, *vectors: Value) -> Value:
        place = e.b.ptrtoint(e.b.alloca(ir.ArrayType(I8, 1024)), I64)
        e.shape_tiles(((16, 64), (16, 32), (8, 64)), place)
        e.matrix("tilezero", 0)
        e.matrix("tileloadd64", 1, at=(place, e.i64(32)))
        e.matrix("tileloadd64", 2, at=(place, e.i64(64)))
        e.matrix("tdpbssd", 0, 1, 2)
        e.matrix("tilestored64", 0, at=(place, e.i64(64)))
        e.matrix("tilerelease")
        return vectors[0]

    lines = _assembly(ISAS["avx512-amx"], X86, "sapphirerapids", "", write).splitlines()
    found = [
        line.split()[0]
        for line in lines
        if line.split() and ("tile" in line.split()[0] or "tdp" in line.split()[0])
    ]
    want = [
        "ldtilecfg",
        "tilezero",
        "tileloadd",
        "tileloadd",
        "tdpbssd",
        "tilestored",
        "tilerelease",
    ]
    assert found == want


@pytest.mark.parametrize(("triple", "cpu"), ((X86, "x86-64"), (ARM, "generic")))
def test_the_generic_path_compiles_for_any_processor(triple, cpu):
    text = _assembly(ISAS["generic"], triple, cpu, "", Emit.dot)
    assert "dot" in text and not any(word in text for word in ("vpdp", "sdot", "callq"))


@pytest.mark.parametrize(
    ("name", "found"),
    [("avx512-amx", "avx512-amx-bf16"), ("avx512-amx-bf16", None), ("avx512-vnni", None)],
)
def test_the_path_for_prompts(name, found):
    assert prompt_isa(ISAS[name]) == found


def test_paths_are_told_apart_by_name():
    assert all(name == isa.name for name, isa in ISAS.items())
    assert len({dataclasses.astuple(isa) for isa in ISAS.values()}) == len(ISAS)
    assert all(baseline_cpu(isa) for isa in ISAS.values())
