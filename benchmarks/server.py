"""What the server costs and what it survives: one subcommand a question.

    python benchmarks/server.py overhead     # throughput through HTTP against the engine alone; time to the client
    python benchmarks/server.py soak         # mixed load for minutes, clients that leave: leaks, and every token right
    python benchmarks/server.py overload     # four times what it can do: refusals at once, the accepted undisturbed
    python benchmarks/server.py drain        # SIGTERM under load: nothing accepted is lost
    python benchmarks/server.py kill         # the engine's process killed under load: errors, and back again
    python benchmarks/server.py all          # each with its defaults

Prints a Markdown table; saves every value as JSON. Engine, server and client share this machine's cores. Not for
comparing servers.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from loads import Bench
from many_requests import main
from subjects import server_drain, server_kill, server_overhead, server_overload, server_soak
from subjects.server_process import Server

from twinphase.weights.hub import resolve_model

SUBJECTS = (server_overhead, server_soak, server_overload, server_drain, server_kill)


class ServerBench(Bench):
    """A subject's run that starts servers."""

    def __init__(self, args: argparse.Namespace, subject: str, method: str) -> None:
        """Nothing runs yet; `method` says how the subject measures."""
        super().__init__(args, subject)
        self.method, self.checkpoint = method, resolve_model(args.model)

    def serve(self, *flags: str, **options: Any) -> Server:
        """A server of the model, with the common options and `flags`."""
        common = [f"--threads={self.args.threads}", f"--kv-cache-dtype={self.args.kv_cache_dtype}"]
        server = Server(self.args.model, *common, *flags, **options)
        self.config = f"twinphase serve {' '.join([*common, *flags])}"
        return server


if __name__ == "__main__":
    sys.exit(main(__doc__, SUBJECTS, lambda args, module: ServerBench(args, module.SUBJECT, module.METHOD)))
