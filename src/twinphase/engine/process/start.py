"""Starts the processes of engines and ranks, each with a link to its parent."""

from __future__ import annotations

import socket
import subprocess

from twinphase import lifeline
from twinphase.config import module_command


def start_process(module: str, *descriptors: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that runs a module, and our end of the link to it.

    The module's arguments are the link's other end and the `descriptors`, which it inherits.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        inherited = [theirs.fileno(), *descriptors]
        command = [*module_command(module), *map(str, inherited)]
        try:
            # A session of its own: Ctrl-C in the terminal is the parent's business, which lets
            # answers finish.
            process = lifeline.start(command, pass_fds=inherited, start_new_session=True)
        except OSError:
            ours.close()
            raise
    return process, ours


def how_it_ended(process: subprocess.Popen[bytes], seconds: float | None = None) -> str:
    """How a process ended that has closed its link; waits `seconds` for it to end."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
