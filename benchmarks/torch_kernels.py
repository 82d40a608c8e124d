"""The Triton kernels compiled for GPUs that are not here: registers, shared memory, tensor cores.

python benchmarks/torch_kernels.py            # the table of docs/devices.md; --json for all of it

No GPU and no driver is needed: Triton compiles for a given target and brings its own ptxas. Shapes
are those of Llama-3.1-8B, and of Qwen3-30B-A3B for mixtures. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from dataclasses import asdict, dataclass
from itertools import product
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinphase.backends.torch.kernels import attention, elementwise, experts, linear, rope, tiles

HIDDEN = 4096
HEADS = 32
KV_HEADS = 8
DIM = 128
BLOCK = 16
ROWS = {"decode": 1, "prefill": 2048}
# Limits of a multiprocessor, shared memory in bytes (CUDA C++ Programming Guide, compute
# capabilities).
SHARED = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
REGISTERS = 65536
THREADS = {80: 2048, 90: 2048, 120: 1536}
FORMATS = {
    "BF16": (0, 0, False),
    "Q4_0": (4, 8, False),
    "Q4_K": (4, 0, True),
    "Q8_0": (8, 0, False),
    "MXFP4": (4, 0, False),
}


class Mixture(NamedTuple):
    """The experts of Qwen3-30B-A3B."""

    count: int = 128
    used: int = 8


MOE = Mixture()
# Triton prints what ptxas says, where it does not take a kernel from its cache.
triton.knobs.nvidia.dump_ptxas_log = True
triton.knobs.compilation.always_compile = True
ALIGNED = [["tt.divisibility", 16]]


@dataclass
class Compiled:
    """One kernel for one compute capability."""

    kernel: str
    phase: str
    capability: int
    registers: int
    spilled: int  # bytes
    shared: int
    shared_limit: int
    blocks: int  # that fit on a multiprocessor, by registers and shared memory
    tensor_cores: str


def compiled(name, phase, capability, fn, types, constants, tile) -> Compiled:
    """Compile `fn`; `types` are those of its first arguments, None for one that is not given."""
    names = fn.arg_names
    signature = {**dict(zip(names, types, strict=False)), **dict.fromkeys(constants, "constexpr")}
    missing = {key: None for key, kind in signature.items() if kind is None}
    signature |= dict.fromkeys(missing, "constexpr")
    aligned = {(i,): ALIGNED for i, key in enumerate(names) if str(signature[key]).startswith("*")}
    aligned |= {
        (names.index(key),): ALIGNED
        for key in ("num_outputs", "num_inputs", "padded", "width")
        if key in names
    }
    source = ASTSource(
        fn=fn, signature=signature, constexprs={**constants, **missing}, attrs=aligned
    )
    warps, stages = tile
    options = {"num_warps": warps, "num_stages": stages}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    shared = made.metadata.shared
    registers, spilled = assembled(said.getvalue())
    threads = 32 * warps
    limits = [
        REGISTERS // (threads * registers),
        THREADS[capability] // threads,
        24 if capability == 120 else 32,
    ]
    limits += [SHARED[capability] // shared] if shared else []
    found = [word for word in ("wgmma", "mma.sync") if word in ptx]
    cores = found[0] if found else ""
    limit = SHARED[capability]
    return Compiled(
        name,
        phase,
        capability,
        registers,
        spilled,
        shared,
        limit,
        blocks=min(limits),
        tensor_cores=cores,
    )


def assembled(log: str) -> tuple[int, int]:
    """Registers of a thread and spilled bytes, as ptxas says."""
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    return int(re.search(r"Used (\d+) registers", log)[1]), spilled


def linears(capability: int) -> list[Compiled]:
    """The gate and up matrices, dense and of the experts that the rows of a step choose."""
    each = [(phase, rows, kind, None) for (phase, rows), kind in product(ROWS.items(), FORMATS)]
    each += [("decode of 64", 64, kind, None) for kind in ("BF16", "Q4_K")]
    each += [
        (phase, rows, kind, MOE)
        for (phase, rows), kind in product(ROWS.items(), ("BF16", "Q4_K", "MXFP4"))
    ]
    return [product_of(capability, *one) for one in each]


def product_of(capability: int, phase: str, rows: int, kind: str, moe: Mixture | None) -> Compiled:
    bits, offset, minimum = FORMATS[kind]
    own = rows
    if moe is not None:
        own = max(1, rows * moe.used // moe.count)
    tile = tiles.tile_of(tiles.TILES[own <= tiles.FEW], capability)
    scale = None if bits == 0 else "*fp16"
    weights = [{0: "*bf16", 4: "*u8", 8: "*i8"}[bits], scale, scale if minimum else None]
    types = [
        "*bf16",
        *weights,
        None,
        None,
        "*bf16",
        *(["*i32"] * 2 if moe else [None] * 2),
        "*fp32",
        None,
        *["i32"] * 4,
    ]
    constants = {
        "BITS": bits,
        "GROUP": 32,
        "OFFSET": offset,
        "FLOAT4": kind == "MXFP4",
        "HAS_MINIMUM": minimum,
        "HAS_BIAS": False,
        "HAS_RESIDUAL": False,
        "USED": moe.used if moe else 0,
        "ROWS": tiles.rows_of_program(own, tile),
        "OUTPUTS": tile.outputs,
        "CHUNKS": 1,
        "CHUNK_SIZE": linear.CHUNK,
        "DIVIDED": False,
        "PRECISION": "tf32",
    }
    name = f"{'experts' if moe else 'linear'} {kind}"
    kernel = linear.linear_kernel
    shape = tile.num_warps, tile.num_stages
    return compiled(name, phase, capability, kernel, types, constants, shape)


def routings(capability: int) -> list[Compiled]:
    """Which experts the rows of a prefill choose, their order, and the sum of what they give."""
    moe = MOE
    block = experts.BLOCK
    choice = {"USED": moe.used, "RENORMALIZE": True, "CHOICES": 8, "BLOCK": moe.count}
    order = {"ROWS": 128, "BINS": 2 * moe.count, "BLOCK": block}
    types = ["*bf16", "*fp32", "*fp32", "i32"]
    each = (
        (
            "choose",
            experts.choose_kernel,
            ["*bf16", "*i32", "*fp32", "i32"],
            choice,
            1,
        ),
        ("sort", experts.sort_kernel, ["*i32", "*i32", "*i32", "i32", "i32"], order, 4),
        (
            "combine",
            experts.combine_kernel,
            types,
            {"USED": moe.used, "BLOCK": block},
            4,
        ),
    )
    return [
        compiled(f"experts, {name}", "both", capability, fn, types, constants, (warps, 3))
        for name, fn, types, constants, warps in each
    ]


def attentions(capability: int, dim: int) -> list[Compiled]:
    found = []
    where = ["*i64"] * 5 + ["i32", "fp32"]
    for phase in ROWS:
        decode = phase == "decode"
        layer = {
            "HEADS": HEADS,
            "KV_HEADS": KV_HEADS,
            "DIM": dim,
            "BLOCK_SIZE": BLOCK,
            "SOFTCAP": 0.0,
            "WINDOW": 0,
            "ROWS": attention.rows_of_tile(HEADS // KV_HEADS, dim, decode, capability),
            "COLUMNS": dim,
            "TILE": attention.KEYS,
            "SPAN_SIZE": attention.SPAN,
            "PRECISION": "tf32",
        }
        results = ["*fp32"] * 3 if decode else [None, "*bf16"]
        fn = attention.decode_kernel if decode else attention.prefill_kernel
        constants = layer if decode else layer | {"HAS_SINKS": False}
        tile = attention.WARPS[decode], attention.STAGES
        types = ["*bf16"] * 3 + results + where
        found.append(
            compiled(
                f"attention, {dim} wide",
                phase,
                capability,
                fn,
                types,
                constants,
                tile,
            )
        )
        if decode:
            for name in ("BLOCK_SIZE", "SOFTCAP", "PRECISION"):
                constants.pop(name)
            types = [*results, None, "*bf16", *["*i64"] * 3, "i32"]
            fn = attention.merge_kernel
            constants = constants | {"HAS_SINKS": False}
            found.append(
                compiled(f"merge, {dim} wide", phase, capability, fn, types, constants, tile)
            )
    return found


def rows_of_a_step(capability: int) -> list[Compiled]:
    """The kernels that are the same in both phases, with the rows of a prefill."""
    block = triton.next_power_of_2(HIDDEN)
    norm = ["*fp32", "*fp32", None, "*bf16", "i32", "i32", "fp32", "fp32"]
    turn = [
        "*bf16",
        "*fp32",
        "*fp32",
        None,
        None,
        None,
        "*i64",
        "*i64",
        "*bf16",
        "*bf16",
        "*bf16",
        "fp32",
    ]
    head = {
        "HEADS": HEADS,
        "KV_HEADS": KV_HEADS,
        "DIM": DIM,
        "HALF": DIM // 2,
        "INTERLEAVED": False,
        "HAS_NORM": False,
        "HAS_SCALE": False,
    }
    gate = {"ACTIVATION": "silu", "BLOCK": elementwise.GATE_BLOCK}
    each = (
        (
            "rms_norm",
            elementwise.rms_norm_kernel,
            norm,
            {"HAS_ADD": False, "BLOCK": block},
            (4, 3),
        ),
        ("rope, KV write", rope.rope_kernel, turn, {**head, "BLOCK": DIM}, (1, 3)),
        ("gate_mul", elementwise.gate_mul_kernel, ["*bf16", "*bf16", "i32"], gate, (4, 3)),
    )
    return [
        compiled(name, "both", capability, fn, types, constants, tile)
        for name, fn, types, constants, tile in each
    ]


def table(found: list[Compiled]) -> str:
    """Markdown: a row for each kernel, a column for each capability."""
    capabilities = sorted(SHARED)
    heads = [f"sm_{one}: registers, shared KB, blocks" for one in capabilities]
    lines = [
        "| kernel | phase | " + " | ".join(heads) + " |",
        "|---|---|" + "---|" * 3,
    ]
    for key in dict.fromkeys((one.kernel, one.phase) for one in found):
        own = {one.capability: one for one in found if (one.kernel, one.phase) == key}
        cells = [
            f"{one.registers}, {one.shared / 1024:.0f}, {one.blocks}"
            + (f", {one.tensor_cores}" if one.tensor_cores else "")
            for one in own.values()
        ]
        lines.append("| " + " | ".join([*key, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    wanted = parser.parse_args()
    found = [
        one
        for each in (linears, routings, rows_of_a_step)
        for capability in SHARED
        for one in each(capability)
    ]
    found += [
        one
        for width in (64, 128, 256)
        for capability in SHARED
        for one in attentions(capability, width)
    ]
    print(json.dumps([asdict(one) for one in found], indent=1) if wanted.json else table(found))


if __name__ == "__main__":
    main()
