"""This processor as the cpu backend uses it."""

from __future__ import annotations

from collections.abc import Set

from twinphase.backends.base import MeasuredRates, Units
from twinphase.backends.cpu import ceilings, kv_layout
from twinphase.backends.cpu.isa import choose_isa, prompt_isa
from twinphase.backends.cpu.weights import DENSE_BYTES
from twinphase.config import available_cores


class CpuDevice:
    """This processor's vector units, as a `Device`."""

    name = "cpu"

    def __init__(self, threads: int | None, isa: str | None) -> None:
        self._isa = choose_isa(isa)
        self.threads = threads or available_cores()
        self.isa = self._isa.name
        self.ceilings = self.isa
        self.best_isa: str | None = choose_isa(None).name
        self.prompt_isa = prompt_isa(self._isa)

    def units(self, weights: Set[tuple[str, int]]) -> Units:
        """Quantized weights are multiplied with int8 activations, keys with int8 queries.

        Quantized weights decide where there are any. Where a path multiplies them in bfloat16, and
        the model has no experts in them, bfloat16 stands for all linear layers.
        """
        quantized = {(name, dims) for name, dims in weights if name not in DENSE_BYTES}
        linear = "int8" if quantized else "float32"
        tiled = {dims for name, dims in quantized or weights if self._isa.takes_bf16(name)}
        if tiled == {2}:
            linear = "bfloat16"
        return Units(linear, "int8", "bfloat16" if self._isa.bf16_dot else "float32")

    def kv_head_bytes(self, head_dim: int, dtype: str) -> float:
        """Keys in int8 with a scale, values in 16 bits or likewise."""
        sizes = (
            kv_layout.key_bytes(head_dim),
            kv_layout.scale_bytes(dtype),
            kv_layout.value_bytes(head_dim, dtype),
        )
        return sum(sizes) / kv_layout.CELL_TOKENS

    def free_memory(self) -> None:
        """None: the backend computes in the host's memory."""

    def measure(self) -> MeasuredRates:
        """Measure in a process of its own, which takes about four seconds."""
        return ceilings.measure(self.threads, self.isa)
