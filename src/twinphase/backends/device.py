"""What a backend computes on, known before any model is loaded: the only place that others ask for such facts."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from twinphase.backends.base import Units
from twinphase.errors import InvalidRequestError


@dataclass(frozen=True)
class MeasuredRates:
    """Best rates seen, operations and bytes per second; None where the processor has no such unit.

    A multiplication and an addition are two operations. `bandwidth` is ((working set in bytes,
    bytes/s), ...). `provisional` means that others took the cores meanwhile, or that the rounds did
    not agree: a rate may be too low.
    """

    bandwidth: tuple[tuple[int, float], ...]
    int8_ops: float | None
    float32_flops: float
    bfloat16_flops: float | None
    provisional: bool
    float16_flops: float | None = None


class Device(Protocol):
    """One device as one backend uses it.

    Attributes:
        name: of the backend.
        threads: compute threads.
        isa: instruction-set path that runs; "" where there is no choice of any.
        best_isa: the one that would run if none were forced; None where there is no choice.
        ceilings: what its ceilings are kept as; "" where they cannot be measured, and MFU and MBU
            are unknown.
    """

    name: str
    threads: int
    isa: str
    best_isa: str | None
    ceilings: str

    def units(self, weights: Set[tuple[str, int]]) -> Units:
        """Which arithmetic unit does what, by the types and dimensions (3 of experts) of the layers' weights."""

    def kv_head_bytes(self, head_dim: int, dtype: str) -> float:
        """Bytes of one token's key and value in one KV head of one layer, with a `kv_cache_dtype`."""

    def free_memory(self) -> int | None:
        """Bytes of its own memory that could be taken now; None where it computes in the host's."""

    def measure(self) -> MeasuredRates:
        """What the device can do at best just now (some seconds)."""


def open_device(
    backend: str,
    threads: int | None = None,
    isa: str | None = None,
    device: str | None = None,
    dtype: str = "auto",
) -> Device:
    """The device of a backend; None is as many threads, and the best path, as there are.

    Raises:
        InvalidRequestError: this processor cannot run `isa`, or there is no such `device`.
    """
    if backend == "reference":
        from twinphase.backends.reference import ReferenceDevice

        return ReferenceDevice()
    if backend == "torch":
        require_torch()
        from twinphase.backends.torch.device import TorchDevice

        return TorchDevice(device, dtype, threads)
    from twinphase.backends.cpu.device import CpuDevice

    return CpuDevice(threads, isa)


def require_torch() -> None:
    """Raises InvalidRequestError, which names the extra, where torch is not installed."""
    if find_spec("torch") is None:
        raise InvalidRequestError(
            "The torch backend needs torch, which is not installed.",
            "Run `pip install 'twinphase[torch]'`.",
        )
