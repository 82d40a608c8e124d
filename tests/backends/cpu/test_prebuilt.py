"""Kernels that a wheel brings along: copied instead of compiled, and only where they fit."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

import msgspec
import pytest

from twinphase.backends.cpu import compiler
from twinphase.backends.cpu.isa import baseline_cpu, choose_isa
from twinphase.backends.cpu.prebuilt import Bundle, read_bundle, write_bundle
from twinphase.estimate.known_models import KNOWN_MODELS, read_shape

ISA = choose_isa(None)
SPEC = "gate_mul:silu:f32"
BUILDER = Path(__file__).parents[3] / "release" / "build_kernels.py"


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("compiled")
    compiler.compile_kernels(folder, ISA, [SPEC])
    return {SPEC: compiler.object_path(folder, ISA, SPEC).read_bytes()}


@pytest.fixture
def bundle(objects) -> Bundle:
    versions = compiler.compiler_versions()
    return Bundle(compiler.sources_digest(), versions, baseline_cpu(ISA), objects)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """Facts about bundles, computed once per process, are computed at each call here."""
    for name in ("_usable_bundle", "kernel_digest", "_base_key"):
        monkeypatch.setattr(compiler, name, getattr(compiler, name).__wrapped__)


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """Ship a bundle; returns the list of specs that are compiled from then on."""
    compiled: list[str] = []

    def ship(bundle):
        path = write_bundle(ISA.name, bundle, tmp_path / "prebuilt")
        monkeypatch.setattr(compiler, "read_bundle", lambda isa: read_bundle(isa, path.parent))
        monkeypatch.setattr(
            compiler, "_compile_in_processes", lambda *arguments: compiled.extend(arguments[2])
        )
        return compiled

    return ship


def test_what_a_bundle_has_is_not_compiled(bundle, shipped, tmp_path):
    compiled = shipped(bundle)
    compiler.compile_kernels(tmp_path, ISA, [SPEC, "add"])
    assert compiled == ["add"]
    assert compiler.object_path(tmp_path, ISA, SPEC).read_bytes() == bundle.objects[SPEC]
    assert compiler.load_kernels(tmp_path, ISA, [SPEC])[SPEC]


@pytest.mark.parametrize("other", [{"sources": "0" * 64}, {"cpu": "another"}])
def test_a_bundle_of_other_sources_or_another_processor_is_left_alone(
    bundle, shipped, tmp_path, other
):
    compiled = shipped(msgspec.structs.replace(bundle, **other))
    compiler.compile_kernels(tmp_path, ISA, [SPEC])
    assert compiled == [SPEC]


def test_a_damaged_bundle_costs_time_only(bundle, shipped, tmp_path):
    compiled = shipped(bundle)
    path = tmp_path / "prebuilt" / f"{ISA.name}.xz"
    content = path.read_bytes()
    for damaged in (b"", content[:-20], content[:60] + b"!" + content[61:]):
        read_bundle.cache_clear()
        path.write_bytes(damaged)
        compiler.compile_kernels(tmp_path, ISA, [SPEC])
        assert compiled.pop() == SPEC


def test_the_versions_that_compiled_a_bundle_decide_its_bits(bundle, shipped):
    shipped(bundle)
    digest = compiler.kernel_digest(ISA)
    read_bundle.cache_clear()
    shipped(msgspec.structs.replace(bundle, versions={**bundle.versions, "llvmlite": "0.1"}))
    assert compiler.kernel_digest(ISA) != digest


def test_a_bundle_has_every_kernel_and_the_attention_of_known_models():
    """Shapes as `estimate` knows them; in a GGUF file, Llama's pairs are adjacent."""
    spec = importlib.util.spec_from_file_location("build_kernels", BUILDER)
    builder = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = builder
    spec.loader.exec_module(builder)
    shipped = {
        isa.name: builder.shipped_specs(isa)
        for isa in compiler.ISAS.values()
        if isa.name in builder.PATHS["x86_64"]
    }
    assert all(len(set(specs)) == len(specs) for specs in shipped.values())
    # Only processors with bfloat16 tiles compile these two.
    assert not {"round_rows", "pack_tiles:Q4_0"} & set(shipped["avx2"])
    specs = set().union(*shipped.values())
    assert {spec.partition(":")[0] for spec in specs} == set(compiler.KERNELS)
    for spec in specs:
        kernel, *parameters = spec.split(":")
        module = importlib.import_module(
            f"twinphase.backends.cpu.kernels.{compiler.KERNELS[kernel]}"
        )
        inspect.signature(getattr(module, kernel)).bind(ISA, *parameters)
    for name in KNOWN_MODELS:
        b = read_shape(name).blueprint
        norm = "none" if b.qk_norm == "width" else b.qk_norm
        norm += ":gated" if b.attention_gate else ""
        norm += ":values" if b.value_norm else ""
        for layer, rope in enumerate(b.ropes):
            kv = b.kv_shape(layer)
            group = b.num_heads // kv.num_heads
            shape = f"{kv.head_dim}:{group}:auto:{b.attention_softcap or 0:g}:{int(b.sinks)}"
            assert {f"attention_prefill:{shape}", f"attention_decode:{shape}"} <= specs, name
            if rope:
                assert f"rope_kv_write:{kv.head_dim}:{rope.dim}:0:auto:{norm}" in specs, name
