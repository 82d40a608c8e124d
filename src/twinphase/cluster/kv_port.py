"""A worker's port for KV blocks: what it is sent, and what it pushes to others, around one engine's loop."""

from __future__ import annotations

from collections.abc import Callable

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
        """Listen on a free port of `host`, and on an abstract Unix socket for workers here; `send` is the loop's.

        Raises:
            OSError: that is not possible.
        """
        self.intake = BlockIntake(loop.loaded, loop.between_steps)
        self._listener = BlockListener(self.intake, key, host=host, shared_memory=shared_memory)
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
