"""Compile the kernels that a wheel brings along, so that a first run need not.

    python release/build_kernels.py                 # every path that LLVM can compile for here
    python release/build_kernels.py avx2

Each path takes some minutes on two cores; the bundles lie beside the backend, are not committed,
and are packed into the wheel by `python -m build`.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from rich.progress import Progress

from twinphase.backends.cpu.compiler import (
    compile_kernels,
    compiler_versions,
    object_path,
    sources_digest,
)
from twinphase.backends.cpu.formats import FORMATS
from twinphase.backends.cpu.isa import ISAS, Isa, baseline_cpu
from twinphase.backends.cpu.kv_layout import KV_CACHE_DTYPES
from twinphase.backends.cpu.prebuilt import FOLDER, Bundle, write_bundle

SHAPES = Path(__file__).with_name("kernel_shapes.toml")
PATHS = {
    "x86_64": (
        *("avx512-amx", "avx512-amx-bf16", "avx512-bf16"),
        *("avx512-vnni", "avx2-vnni", "avx2"),
    ),
    "aarch64": ("neon-dot",),
}
DENSE = ("F32", "F16", "BF16")
ALWAYS = (
    "run_program",
    "add",
    "add_gated",
    "add_norm",
    "combine",
    "copy_columns",
    "meet",
    "multiply",
    "norm_columns",
    "quantize",
    "route",
    "route_sigmoid",
    "sort_rows",
    "stamp",
    *(f"{name}:{kind}" for name in ("rms_norm", "pick_rows") for kind in ("q8", "f32")),
    *(f"gate_mul:{name}:{kind}" for name in ("silu", "gelu", "relu") for kind in ("q8", "f32")),
    "gate_mul:swiglu_oai:f32",
    # LFM2's convolutions have three taps, those of Qwen3.5 and Mamba-2 four.
    "keep_history:3",
    "keep_history:4",
    *(
        f"{name}:{kind}"
        for name in (
            "causal_conv:3:gated",
            "causal_conv:4:silu",
            "gate_heads:256",
            "gated_norm:128",
            "gate_norm:after_gate",
        )
        for kind in ("q8", "f32")
    ),
    # Qwen3.5's key heads, value heads and their widths; whether value heads are in GGUF's order.
    *(
        f"delta_{what}:16:{value_heads}:128:128:{tiled}"
        for what in ("gates", "scan")
        for value_heads in (16, 32)
        for tiled in (0, 1)
    ),
    "causal_conv:4:biased:f32",
    # Granite 4-H: 350M, 1B and tiny, micro, small. Falcon-H1: 0.5B, 1.5B, its deep form, 3B, 7B.
    *(
        f"space_{what}:1:{heads}:{state}:{width}:0"
        for what in ("gates", "scan")
        for heads, state, width in (
            *((48, 128, 32), (48, 128, 64), (64, 128, 64), (128, 128, 64)),
            *((24, 128, 64), (48, 256, 64), (24, 256, 64), (32, 256, 128), (24, 256, 128)),
        )
    ),
    # Nemotron-H 8B, Nemotron Nano 2.
    *(f"space_{what}:8:128:128:{width}:0" for what in ("gates", "scan") for width in (64, 80)),
    "sample_rows",
    "cap_logits:0",
    "cap_logits:1",
)


def shipped_specs(isa: Isa) -> list[str]:
    """Specs of the kernels in a path's bundle, those that take longest to compile first."""
    attention: set[str] = set()
    rope: set[str] = set()
    for family in tomllib.loads(SHAPES.read_text(encoding="utf-8")).values():
        for head_dim, group in family["heads"]:
            sinks = int(family.get("sinks", False))
            attention.add(f"attention_merge:{head_dim}:{group}:{sinks}")
            for dtype, phase in itertools.product(KV_CACHE_DTYPES, ("prefill", "decode")):
                limits = f"{family.get('softcap', 0)}:{sinks}"
                attention.add(f"attention_{phase}:{head_dim}:{group}:{dtype}:{limits}")
            rope |= set(_rope_specs(head_dim, family))
    weights = [
        *(f"quantized_{what}:{name}" for what in ("linear", "experts") for name in FORMATS),
        *(f"dense_{what}:{name}" for what in ("linear", "experts") for name in DENSE),
        *(f"embed:{name}" for name in (*FORMATS, *DENSE)),
        *(f"pack:{name}" for name in FORMATS),
        *(f"pack_tiles:{name}" for name in FORMATS if isa.takes_bf16(name)),
        *(["round_rows", "rms_norm:bf16"] if isa.matrix_tiles else []),
        *(f"gate_tile:{name}:{kind}" for name in ("silu", "gelu") for kind in _gated_kinds(isa)),
    ]
    return [*sorted(attention, reverse=True), *weights, *sorted(rope), *ALWAYS]


def _gated_kinds(isa: Isa) -> tuple[str, ...]:
    return ("q8", "f32", "bf16") if isa.matrix_tiles else ("q8", "f32")


def _rope_specs(head_dim: int, family: dict[str, object]) -> Iterator[str]:
    rotated = family.get("rotated", head_dim)
    orders = {"both": (0, 1), "always": (1,)}.get(str(family.get("interleaved")), (0,))
    for dtype, interleaved in itertools.product(KV_CACHE_DTYPES, orders):
        norm = family.get("norm", "none")
        more = "".join(f":{word}" for word in ("gated", "values") if family.get(word))
        yield f"rope_kv_write:{head_dim}:{rotated}:{interleaved}:{dtype}:{norm}{more}"


def build(isa: Isa, specs: list[str], progress: Progress) -> Path:
    """Compile a path's kernels in a folder of their own, and write their bundle."""
    task = progress.add_task(isa.name, total=len(specs))
    # An older bundle would be copied, whatever compiler made it.
    (FOLDER / f"{isa.name}.xz").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_kernels(
            folder, isa, specs, lambda done, total, spec: progress.update(task, completed=done)
        )
        objects = {spec: object_path(folder, isa, spec).read_bytes() for spec in specs}
    bundle = Bundle(sources_digest(), compiler_versions(), baseline_cpu(isa), objects)
    return write_bundle(isa.name, bundle)


def main() -> None:
    possible = PATHS.get(platform.machine(), ())
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("isa", nargs="*", default=possible, help=f"paths: {', '.join(possible)}")
    with Progress() as progress:
        for name in parser.parse_args().isa:
            specs = shipped_specs(ISAS[name])
            begin = time.perf_counter()
            path = build(ISAS[name], specs, progress)
            seconds = time.perf_counter() - begin
            kilobytes = path.stat().st_size / 1000
            progress.print(f"{name}: {len(specs)} kernels in {seconds:.0f} s, {kilobytes:.0f} kB")


if __name__ == "__main__":
    main()
