"""How ranks of the torch backend exchange bytes: by gloo on processors, by NCCL on GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from twinphase.backends.group import Group
from twinphase.blueprint import Span
from twinphase.errors import EngineDeadError

EXCHANGE_TIMEOUT_SECONDS = 60


class Collective:
    """The exchanges of one rank.

    It has a process group of its own, so that a process may have several in succession.
    """

    def __init__(self, group: Group | None, device: torch.device) -> None:
        """Find the other ranks, by a file; called by all of them."""
        assert group is not None, "the group is set before the backend computes"
        self._group = group
        self._meet()
        store = FileStore(str(group.meeting_place), group.ranks)
        limit = timedelta(seconds=EXCHANGE_TIMEOUT_SECONDS)
        self._processes: Any
        if device.type == "cuda":
            self._processes = dist.ProcessGroupNCCL(
                store, group.rank, group.ranks, dist.ProcessGroupNCCL.Options()
            )
        else:
            self._processes = dist.ProcessGroupGloo(store, group.rank, group.ranks, limit)

    def _meet(self) -> None:
        """Wait for all ranks here, since torch would wait in vain for one that is missing."""
        self._group.meet()
        if self._group.is_over:
            raise EngineDeadError("A rank is missing.", "Load the model again.")

    def gather(self, x: Tensor, span: Span) -> Tensor:
        """All ranks' columns of [rows, span.size] side by side; shares are padded to the widest."""
        self._meet()
        if not len(x):
            return x.new_empty(0, span.total)
        sizes = [
            end - first
            for first, end in zip(span.firsts, [*span.firsts[1:], span.total], strict=True)
        ]
        mine = F.pad(x, (0, max(sizes) - span.size)).contiguous()
        parts = [torch.empty_like(mine) for _ in sizes]
        try:
            self._processes.allgather(
                [[part.view(torch.uint8) for part in parts]], [mine.view(torch.uint8)]
            ).wait()
        except RuntimeError:
            self._meet()  # raises the better error if a rank ended meanwhile
            raise
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)
