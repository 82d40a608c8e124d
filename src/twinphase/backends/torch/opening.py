"""Which torch backend a device gets."""

from __future__ import annotations

from importlib.util import find_spec

from twinphase.backends.torch.backend import TorchBackend
from twinphase.backends.torch.device import find_device, find_dtype


def open_backend(
    device: str | None, dtype: str, threads: int | None, enforce_eager: bool, dequantize: bool
) -> TorchBackend:
    """The backend of a device: with Triton kernels for 16 bits on a GPU, if Triton is installed.

    In float32 tensor cores are of no use, and Triton takes minutes to compile products without
    them.
    """
    found = find_device(device)
    is_narrow = find_dtype(dtype, found).itemsize == 2
    if found.type == "cuda" and is_narrow and find_spec("triton") is not None:
        from twinphase.backends.torch.kernel_backend import KernelBackend

        return KernelBackend(device, dtype, enforce_eager, dequantize)
    return TorchBackend(device, dtype, threads, enforce_eager)
