"""An engine's process with a port for KV blocks: `python -m twinphase.cluster.ported FD`.

It extends `engine/process/child.py` by the port. The key comes in the environment.
"""

from __future__ import annotations

import sys

from twinphase.cluster.address import read_key
from twinphase.cluster.kv.port import opened_port
from twinphase.engine.process import child
from twinphase.engine.process.host import ProcessHost


class PortedHost(ProcessHost):
    """An engine in its own process that other engines can send KV blocks to."""

    module = "twinphase.cluster.ported"


def main(descriptor: int) -> int:
    """Run the process; arguments are those of `child.main`."""
    with opened_port(read_key()) as open_port:
        return child.main(descriptor, open_port)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
