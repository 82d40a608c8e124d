"""Instruction-set paths of the CPU backend: their instructions, and which this processor can run.

A path is chosen once, at run time. Forcing a lesser one (`--isa avx2`) compiles every kernel for a
processor that has nothing more, so all paths can be tested on one machine. Not for kernels: they
ask an `Isa` for its lane count and dot products.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass, replace
from functools import cache

from twinphase.backends.cpu.formats import BY_OUTPUTS, PackedFormat
from twinphase.errors import InvalidRequestError


@dataclass(frozen=True)
class Isa:
    """One instruction-set path.

    Attributes:
        name: the word for `--isa`.
        lanes: 32-bit lanes of a vector register.
        dot: how unsigned x signed bytes are multiplied and summed by fours: vnni, maddubs, sdot or
            widen.
        bf16_dot: whether attention multiplies probabilities and values in bfloat16 (else float32).
        needs: processor features without which the path cannot run.
        cpu: LLVM processor name the kernels are compiled for; "" is this machine's own.
        registers: vector registers, which bound the register tiles.
        matrix_tiles: whether attention, and linear layers of many rows and those on BF16 weights,
            multiply in matrix tiles (AMX).
        bf16_weights: whether linear layers on quantized weights of `BY_OUTPUTS`, except experts,
            multiply in bfloat16 tiles, too.
    """

    name: str
    needs: tuple[str, ...]
    lanes: int
    dot: str
    registers: int
    bf16_dot: bool = False
    cpu: str = ""
    matrix_tiles: bool = False
    bf16_weights: bool = False

    @property
    def converts_f16(self) -> bool:
        """Whether the processor converts float16 in one instruction."""
        return self.name != "generic"

    @property
    def llvm_options(self) -> tuple[str, ...]:
        """Options of LLVM's code generator."""
        # LLVM's scheduler loads all weights of a group before it multiplies the first, which spills
        # the totals.
        if self.lanes == 16:
            return ("-enable-misched=false",)
        # The combiner regroups operations for more parallelism than 16 registers hold.
        if self.lanes == 8:
            return "-enable-misched=false", "-x86-machine-combiner=false"
        return ()

    def takes_bf16(self, weights: str) -> bool:
        """Whether linear layers on such weights, except experts, take bfloat16 rows."""
        if weights == "BF16":
            return self.matrix_tiles
        return self.bf16_weights and weights in BY_OUTPUTS

    def takes_panels(self, fmt: PackedFormat) -> bool:
        """Whether weights are unpacked in panels for many rows, where that was seen to pay off."""
        return self.lanes == 8 or (self.lanes == 16 and (fmt.nested or not fmt.has_plain_codes))

    def takes_words(self, fmt: PackedFormat) -> bool:
        """Whether panels have 16-bit codes, where the dot product of bytes does not hold 8 bits."""
        return self.dot == "maddubs" and fmt.bits_multiplied == 8

    def keeps_totals_in_memory(self, rows: int) -> bool:
        """Whether a tile on packed weights has no registers for its rows' float32 totals."""
        return self.lanes == 8 and rows > 2

    def whole_scales(self, fmt: PackedFormat) -> bool:
        """Whether scales of 16 inputs are multiplied in whole numbers (`kernels/whole_tile.py`)."""
        return self.lanes == 16 and fmt.nested and fmt.group == 16 and fmt.bits == 4

    @property
    def linear_rows(self) -> int:
        """Rows of the linear kernels' largest register tile."""
        if self.registers == 32:
            return 6
        return 4 if self.lanes == 8 else 2

    @property
    def attention_rows(self) -> int:
        """Rows of the attention kernels' register tile in prefill."""
        if self.matrix_tiles:
            return 16
        return 6 if self.registers == 32 else 2


_BF16 = ("avx512f", "avx512bw", "avx512vnni", "avx512bf16")
_AMX = Isa(
    "avx512-amx",
    needs=(*_BF16, "amx-tile", "amx-int8", "amx-bf16"),
    lanes=16,
    dot="vnni",
    bf16_dot=True,
    registers=32,
    cpu="sapphirerapids",
    matrix_tiles=True,
)
ISAS = {
    isa.name: isa
    for isa in (
        _AMX,
        replace(_AMX, name="avx512-amx-bf16", bf16_weights=True),
        Isa(
            "avx512-bf16",
            needs=_BF16,
            lanes=16,
            dot="vnni",
            bf16_dot=True,
            registers=32,
            cpu="cooperlake",
        ),
        Isa(
            "avx512-vnni",
            needs=("avx512f", "avx512bw", "avx512vnni"),
            lanes=16,
            dot="vnni",
            registers=32,
            cpu="cascadelake",
        ),
        Isa(
            "avx2-vnni",
            needs=("avx2", "fma", "f16c", "avxvnni"),
            lanes=8,
            dot="vnni",
            registers=16,
            cpu="alderlake",
        ),
        Isa(
            "avx2",
            needs=("avx2", "fma", "f16c"),
            lanes=8,
            dot="maddubs",
            registers=16,
            cpu="haswell",
        ),
        Isa("neon-dot", needs=("dotprod",), lanes=4, dot="sdot", registers=32),
        Isa("generic", needs=(), lanes=4, dot="widen", registers=16),
    )
}


@cache
def _host_features() -> frozenset[str]:
    import llvmlite.binding as llvm

    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


@cache
def _tiles_granted() -> bool:
    """Ask Linux for the registers of matrix tiles, which a process has to before it uses them."""
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), see Documentation/arch/x86/xstate.rst.
    return platform.system() == "Linux" and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def available_isas() -> list[str]:
    """Names of the paths this processor can run, best first."""
    possible = [isa for isa in ISAS.values() if set(isa.needs) <= _host_features()]
    return [isa.name for isa in possible if not isa.matrix_tiles or _tiles_granted()]


def choose_isa(name: str | None) -> Isa:
    """The path called `name`, or the best this processor has when None.

    Raises:
        InvalidRequestError: the name is unknown, or the processor lacks its instructions.
    """
    possible = available_isas()
    if name is None:
        return ISAS[possible[0]]
    if name not in possible:
        what = (
            "needs instructions this processor lacks"
            if name in ISAS
            else "is not an instruction-set path"
        )
        raise InvalidRequestError(f"isa {name!r} {what}.", f"Use one of: {', '.join(possible)}.")
    return ISAS[name]


def prompt_isa(isa: Isa) -> str | None:
    """The path that is faster than `isa` for long prompts, and slower for a lone answer."""
    return "avx512-amx-bf16" if isa.matrix_tiles and not isa.bf16_weights else None


def baseline_cpu(isa: Isa) -> str:
    """LLVM processor name to compile `isa` for."""
    if isa.name == "generic":
        return "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else "generic"
    if isa.cpu:
        return isa.cpu
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_name())


def compiler_environment(isa: Isa) -> dict[str, str]:
    """This process's environment, for one whose Numba compiles for the path's processor."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if isa.cpu or isa.name == "generic":
        environment |= {"NUMBA_CPU_NAME": baseline_cpu(isa), "NUMBA_CPU_FEATURES": ""}
    return environment
