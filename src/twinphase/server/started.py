"""Finds this user's running servers by a small file for each in the cache folder.

`twinphase stop` and the commands with `--url` use it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from twinphase.weights.storage import atomically, cache_root

EVERYWHERE = {"0.0.0.0", "::"}
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class StartedServer(msgspec.Struct, frozen=True):
    """A server's process and address; `ticks` is its start time as the kernel counts it."""

    pid: int
    url: str
    ticks: int | None

    @property
    def is_running(self) -> bool:
        return self.ticks == _start_ticks(self.pid) and _is_alive(self.pid)

    def answers_at(self, url: str) -> bool:
        """Whether this server listens at `url`."""
        own = urlsplit(self.url)
        asked = urlsplit(url)
        try:
            if own.port != (asked.port or (443 if asked.scheme == "https" else 80)):
                return False
        except ValueError:  # The port is not a number.
            return False
        is_local = asked.hostname in LOOPBACK and own.hostname in LOOPBACK | EVERYWHERE
        return asked.hostname == own.hostname or is_local


@contextlib.contextmanager
def noted(url: str) -> Iterator[None]:
    """Keep a file about this process, which serves at `url`, until the block ends.

    An error in writing the file is ignored.
    """
    pid = os.getpid()
    path = _folder() / f"{pid}.json"
    content = {"pid": pid, "url": url, "ticks": _start_ticks(pid)}
    with contextlib.suppress(OSError), atomically(path) as temporary:
        temporary.write_text(json.dumps(content))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def started_servers() -> list[StartedServer]:
    """The running servers; files of ended servers are removed."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        try:
            server = msgspec.json.decode(path.read_bytes(), type=StartedServer)
        except (OSError, msgspec.MsgspecError):
            continue
        if server.is_running:
            found.append(server)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return found


def _folder() -> Path:
    return cache_root() / "servers"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _start_ticks(pid: int) -> int | None:
    """The start time of a process, which distinguishes reused ids; None if unknown."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if words[0] == "Z" else int(words[19])
    except (OSError, ValueError, IndexError):
        return None
