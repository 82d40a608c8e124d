"""A worker's port for KV blocks: what it is sent, and what it pushes to others, around one engine's loop."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from twinphase.cluster.intake import BlockIntake, BlockListener
from twinphase.cluster.pushes import BlockPushes
from twinphase.engine.loop import EngineLoop
from twinphase.engine.messages import FromEngine

__all__ = ["KVPort"]


class KVPort:
    """Opens an engine's loop for blocks, before the loop runs.

    Attributes:
        addresses: for `PushTo`, the nearest first.
        intake, pushes: both directions, with their counts.
    """

    def __init__(
        self,
        loop: EngineLoop,
        send: Callable[[FromEngine], None],
        key: bytes,
        *,
        host: str = "127.0.0.1",
        shared_memory: bool = True,
    ) -> None:
        """Listen on a free port of `host`, and for workers on this machine on a Unix socket; `send` is the loop's.

        Raises:
            OSError: that is not possible.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="twinphase-kv-")) if shared_memory else None
        self.intake = BlockIntake(loop.loaded, loop.between_steps)
        self._listener = BlockListener(self.intake, key, host=host, folder=self._folder)
        self.pushes = BlockPushes(loop.loaded, key, lambda: loop.between_steps(lambda engine: None), send)
        loop.pushes = self.pushes

    @property
    def addresses(self) -> list[str]:
        return self._listener.addresses

    def close(self) -> None:
        """After the loop has ended."""
        self.intake.close()
        self._listener.close()
        self.pushes.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
