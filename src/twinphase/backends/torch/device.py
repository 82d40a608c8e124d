"""The device that `--device` names, as torch sees it, and the element type that `--dtype` names on it."""

from __future__ import annotations

import time
from typing import Any

import torch

from twinphase.backends.base import Units
from twinphase.backends.device import MeasuredRates
from twinphase.errors import InvalidRequestError

__all__ = ["TorchDevice", "find_device", "find_dtype", "mark", "seconds_between"]

BF16_CAPABILITY = (8, 0)  # the first with bfloat16 in its tensor cores


def find_device(name: str | None) -> torch.device:
    """The device of that name; None is the first CUDA device, or the processor where there is none.

    Raises:
        InvalidRequestError: a CUDA device that does not exist, or that torch cannot reach.
    """
    count = torch.cuda.device_count()
    device = torch.device(name or ("cuda" if count else "cpu"))
    if device.type == "cpu":
        return device
    if torch.version.cuda is None:
        raise InvalidRequestError(
            f"device is {name!r}, but torch {torch.__version__} is built for CPUs only.",
            "Install torch with CUDA (pytorch.org/get-started), or use --device cpu.",
        )
    if not count:
        raise InvalidRequestError(
            f"device is {name!r}, but there is no NVIDIA driver, or no GPU.",
            "See what `nvidia-smi` says, or use --device cpu.",
        )
    index = device.index or 0
    if index >= count:
        raise InvalidRequestError(
            f"device is {name!r}, but there are {count} CUDA devices.", f"Use cuda:0 to cuda:{count - 1}."
        )
    return torch.device("cuda", index)


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The element type; "auto" is float32 on a processor, bfloat16 on a GPU that has it, else float16."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= BF16_CAPABILITY else torch.float16


def mark(device: torch.device) -> Any:
    """Now, on the device's own clock: an event behind what was started so far, on a processor seconds."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Of two marks; waits for the later one."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


class TorchDevice:
    """See `Device`."""

    name, isa = "torch", ""
    best_isa: str | None = None

    def __init__(self, device: str | None = None, dtype: str = "auto", threads: int | None = None) -> None:
        self.device = find_device(device)
        self.dtype = find_dtype(dtype, self.device)
        self.threads = threads or torch.get_num_threads()
        name = "processor" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self.ceilings = f"torch on {name}"

    def units(self, *, dense: bool) -> Units:
        """Weights are dequantized to `dtype`; softmax is in float32."""
        name = str(self.dtype).removeprefix("torch.")
        return Units(name, name, name)

    def kv_head_bytes(self, head_dim: int, dtype: str) -> float:
        """2 d b, with b the bytes of the element type."""
        return 2 * head_dim * self.dtype.itemsize

    def free_memory(self) -> int | None:
        """See `Device`."""
        return None if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0]

    def measure(self) -> MeasuredRates:
        """In this process: large products by element type, and memory streamed by working set."""
        from twinphase.backends.torch.peaks import measure

        return measure(self.device)
