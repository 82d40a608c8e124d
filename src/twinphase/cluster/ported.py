"""An engine's own process with a port for KV blocks: `python -m twinphase.cluster.ported FD`, started by `PortedHost`.

As `engine/child.py`, whose process has none. The key comes in the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from twinphase.cluster.address import read_key
from twinphase.cluster.kv_port import KVPort
from twinphase.engine import child
from twinphase.engine.host import ProcessHost
from twinphase.engine.loop import EngineLoop
from twinphase.engine.messages import FromEngine

__all__ = ["PortedHost"]


class PortedHost(ProcessHost):
    """An engine in a process of its own, which other engines can send KV blocks."""

    module = "twinphase.cluster.ported"


def main(descriptor: int) -> int:
    """See `child.main`."""
    ports: list[KVPort] = []

    def open_port(loop: EngineLoop, send: Callable[[FromEngine], None]) -> list[str]:
        ports.append(KVPort(loop, send, read_key()))
        return ports[0].addresses

    try:
        return child.main(descriptor, open_port)
    finally:
        for port in ports:
            port.close()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
