"""The torch device that `--device` names, and the element type that `--dtype` names on it."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

import torch
from numpy.typing import NDArray

from twinphase.backends.base import MeasuredRates, Units
from twinphase.errors import InvalidRequestError

# What the CUDA of today's torch needs.
MIN_CAPABILITY = (7, 5)
# The first generation with bfloat16 in its tensor cores.
BF16_CAPABILITY = (8, 0)


def find_device(name: str | None) -> torch.device:
    """The device of that name; None is the first CUDA device, or the processor if there is none.

    Raises:
        InvalidRequestError: a CUDA device that does not exist, that torch cannot reach, or that is
            too old.
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
            f"device is {name!r}, but there are {count} CUDA devices.",
            f"Use cuda:0 to cuda:{count - 1}.",
        )
    return _usable(torch.device("cuda", index))


def _usable(device: torch.device) -> torch.device:
    try:
        found = torch.cuda.get_device_capability(device)
    except RuntimeError as error:  # such as a driver that is older than this torch
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise InvalidRequestError(
            f"torch {torch.__version__} cannot use {device}: {why}.",
            "Update the NVIDIA driver, or use --device cpu.",
        ) from None
    if found < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        wanted = "{}.{}".format(*MIN_CAPABILITY)
        raise InvalidRequestError(
            "{} ({}) has compute capability {}.{}; {} is needed.".format(
                device, name, *found, wanted
            ),
            "Use a GPU of the Turing generation or later, or --device cpu.",
        )
    return device


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The element type; "auto" is float32 on a processor, bfloat16 or else float16 on a GPU.

    Raises:
        InvalidRequestError: bfloat16 on a GPU without it.
    """
    has_bfloat16 = (
        device.type == "cpu" or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    )
    if name == "bfloat16" and not has_bfloat16:
        gpu = f"{device} ({torch.cuda.get_device_name(device)})"
        raise InvalidRequestError(
            f"dtype is 'bfloat16', which {gpu} does not compute in.", "Use --dtype float16."
        )
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16" if has_bfloat16 else "float16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def bind(device: torch.device) -> None:
    """Make it this thread's current device, where graphs and Triton's kernels start."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def pinned(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy to pinned memory: from other memory even a `non_blocking` copy waits for the GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def mark(device: torch.device) -> Any:
    """The device's own time: an event after all started work; on a processor, seconds."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """The time between two marks; waits for the later one."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


class TorchDevice:
    """A device of the torch backend."""

    name = "torch"
    isa = ""
    best_isa: str | None = None
    prompt_isa: str | None = None

    def __init__(
        self, device: str | None = None, dtype: str = "auto", threads: int | None = None
    ) -> None:
        self.device = find_device(device)
        self.dtype = find_dtype(dtype, self.device)
        self.threads = threads or torch.get_num_threads()
        name = "processor" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self.ceilings = f"torch on {name}"

    def units(self, weights: Set[tuple[str, int]]) -> Units:
        """Weights are dequantized to `dtype`; softmax is in float32."""
        name = str(self.dtype).removeprefix("torch.")
        return Units(name, name, name)

    def kv_head_bytes(self, head_dim: int, dtype: str) -> float:
        """2 d b, with b the bytes of the element type."""
        return 2 * head_dim * self.dtype.itemsize

    def free_memory(self) -> int | None:
        return None if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0]

    def measure(self) -> MeasuredRates:
        """Measure large products by element type, and memory streamed by working set."""
        from twinphase.backends.torch.peaks import measure

        if self.device.type == "cpu":
            torch.set_num_threads(self.threads)
        return measure(self.device)
