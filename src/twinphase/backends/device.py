"""Opens the device of a backend: the only place that asks a backend for facts without a model."""

from __future__ import annotations

from importlib.util import find_spec

from twinphase.backends.base import Device
from twinphase.errors import InvalidRequestError
from twinphase.installed import install_command


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
        from twinphase.backends.reference_device import ReferenceDevice

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
            f"Run `{install_command('torch')}`.",
        )
