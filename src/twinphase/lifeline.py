"""Child processes that the kernel kills when their parent ends, even if they are stopped or busy.

The parent alone holds the writing end of a pipe, and the child its reading end. When the parent
ends, however it does, the last writing end closes, and the kernel sends SIGKILL to the child
(fcntl(2), O_ASYNC and F_SETSIG). A child that is stopped, ignores SIGTERM or holds Python's
interpreter lock ends too. PR_SET_PDEATHSIG would follow the thread that started the child, which
may end long before its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Collection, Sequence
from typing import Any


def start(
    command: Sequence[str], *, pass_fds: Collection[int] = (), **options: Any
) -> subprocess.Popen[Any]:
    """`subprocess.Popen`; on Linux the child does not outlive this process.

    It ends, too, when the returned object is no longer referenced.

    Raises:
        OSError: the process cannot be started.
    """
    if sys.platform != "linux":
        return subprocess.Popen(command, pass_fds=pass_fds, **options)
    import fcntl
    import signal

    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(command, pass_fds=[*pass_fds, reading], **options)
        # Both processes share the open pipe and its flags, so that the child needs no code of its
        # own for this, and is bound before it runs its first line.
        fcntl.fcntl(reading, fcntl.F_SETOWN, process.pid)
        fcntl.fcntl(reading, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    # At the end of this process the kernel closes it, after every other clean-up.
    weakref.finalize(process, os.close, writing).atexit = False
    return process
