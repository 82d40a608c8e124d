"""What a backend computes on, known before any model is loaded: the only place that others ask for such facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twinphase.backends.base import Units

__all__ = ["Device", "MeasuredRates", "open_device"]


@dataclass(frozen=True)
class MeasuredRates:
    """Best rates seen, operations and bytes per second; None where the processor has no such unit.

    A multiplication and an addition are two operations. `bandwidth` is ((working set in bytes, bytes/s), ...).
    `provisional` means that others took the cores meanwhile, or that the rounds did not agree: a rate may be too low.
    """

    bandwidth: tuple[tuple[int, float], ...]
    int8_ops: float
    float32_flops: float
    bfloat16_flops: float | None
    provisional: bool


class Device(Protocol):
    """One device as one backend uses it.

    Attributes:
        name: of the backend.
        threads: compute threads.
        isa: instruction-set path that runs; "" where there is no choice of any.
        best_isa: the one that would run if none were forced; None where there is no choice.
        has_ceilings: whether its ceilings can be measured. Without them MFU and MBU are unknown.
    """

    name: str
    threads: int
    isa: str
    best_isa: str | None
    has_ceilings: bool

    def units(self, *, dense: bool) -> Units:
        """Which arithmetic unit does what; `dense` says that the weights of the layers are not quantized."""

    def kv_head_bytes(self, head_dim: int, dtype: str) -> float:
        """Bytes of one token's key and value in one KV head of one layer, with a `kv_cache_dtype`."""

    def measure(self) -> MeasuredRates:
        """What the device can do at best just now (some seconds)."""


def open_device(backend: str, threads: int | None = None, isa: str | None = None) -> Device:
    """The device of a backend; None is as many threads, and the best path, as there are.

    Raises:
        InvalidRequestError: this processor cannot run `isa`.
    """
    if backend == "reference":
        from twinphase.backends.reference import ReferenceDevice

        return ReferenceDevice()
    from twinphase.backends.cpu.device import CpuDevice

    return CpuDevice(threads, isa)
