"""A graph that records torch operations and Triton launches, and replays them.

It knows what a CUDA graph knows: memory. Numbers that the host put into an operation are those of
the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

NEEDS_HOST = {"aten::_local_scalar_dense", "aten::nonzero"}


class Recorder(TorchDispatchMode):
    """A `Graph` on a processor."""

    recording: ClassVar[list[Recorder]] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name().split(".")[0] not in NEEDS_HOST, (
            f"{func} waits for the device: it cannot be captured"
        )
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def capture(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.recording.append(self)
        try:
            with self:
                return compute()
        finally:
            self.recording.pop()

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            pairs = zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True)
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let recorders see launches in Triton's interpreter, which copies its tensors."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def seen(executor: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            launch(executor, *args, **kwargs)
        for recorder in Recorder.recording:
            recorder.calls.append((partial(launch, executor), args, kwargs, None))

    patch.setattr(GridExecutor, "__call__", seen)
