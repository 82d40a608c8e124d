"""`twinphase serve` that notes when each token's step ended and when the token was with the socket.

    python benchmarks/subjects/server_probe.py FILE serve MODEL ...

Writes FILE when the server ends: by request id, a list of [tokens, step end, handed over], seconds on the clock
`time.perf_counter`. Costs a call and an append for each event. Not for production: it wraps a private method.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from twinphase.cli import run_app
from twinphase.server.generation import Generation


def main(path: Path, arguments: list[str]) -> int:
    """Run the command line with the probe in place; returns the exit code."""
    found: dict[str, list[tuple[int, float | None, float]]] = {}
    handed_over = Generation._handed_over

    def noting(self: Generation, delta: Any) -> None:
        stream = delta.choice.stream
        entry = len(delta.token_ids), stream.last_step_end, time.perf_counter()
        found.setdefault(stream.request_id, []).append(entry)
        handed_over(self, delta)

    Generation._handed_over = noting  # type: ignore[method-assign]
    try:
        return run_app(arguments)
    finally:
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
