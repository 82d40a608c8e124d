"""A worker's port for KV blocks: receives and pushes blocks for one engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twinphase.cluster.handshake import ClusterKey
from twinphase.cluster.kv.intake import BlockIntake, BlockListener
from twinphase.cluster.kv.pushes import BlockPushes
from twinphase.engine.process.loop import EngineLoop
from twinphase.engine.process.messages import FromEngine
from twinphase.errors import StorageError

if TYPE_CHECKING:
    from twinphase.engine.process.child import OpenPort


class KVPort:
    """The KV port of an engine's loop; it opens before the loop runs.

    Attributes:
        addresses: addresses for `PushTo`, the fastest first.
        intake, pushes: both directions, with their counts.
    """

    def __init__(
        self,
        loop: EngineLoop,
        send: Callable[[FromEngine], None],
        key: ClusterKey,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        shared_memory: bool = True,
    ) -> None:
        """Listen as `BlockListener` does; `send` sends a message from the loop.

        Raises:
            OSError: the address is in use or not available.
        """
        self.intake = BlockIntake(loop.loaded, loop.between_steps)
        self._listener = BlockListener(
            self.intake, key, host=host, port=port, shared_memory=shared_memory
        )
        self.pushes = BlockPushes(
            loop.loaded, key, lambda: loop.between_steps(lambda engine: None), send
        )
        loop.pushes = self.pushes
        loop.block_counts = self.intake.counts

    @property
    def addresses(self) -> list[str]:
        return self._listener.addresses

    def close(self) -> None:
        """Close the port, after the loop has ended."""
        self.intake.close()
        self._listener.close()
        self.pushes.close()


@contextmanager
def opened_port(key: ClusterKey, host: str = "127.0.0.1", port: int = 0) -> Iterator[OpenPort]:
    """Yield the function that `child.serve` calls to open a port; the port closes with the block.

    That function raises `StorageError` if another process uses the port.
    """
    ports: list[KVPort] = []

    def open_port(loop: EngineLoop, send: Callable[[FromEngine], None]) -> list[str]:
        try:
            ports.append(KVPort(loop, send, key, host=host, port=port))
        except OSError as error:
            cause = f"Cannot listen for KV blocks on {host}:{port}: {error.strerror or error}."
            raise StorageError(cause, "Choose another --kv-port.") from None
        return ports[0].addresses

    try:
        yield open_port
    finally:
        for opened in ports:
            opened.close()
