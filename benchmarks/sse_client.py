"""What the benchmarks of the server send, and read of it, by the product's client (`twinphase.bench.client.client`).

    python benchmarks/sse_client.py PORT < BODIES > REPLIES     # completions, all at once, from a process of its own

Tokens are counted by the server's usage and token ids, never by events.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import sys
import time
from typing import Any

import msgspec

from twinphase.bench.client.client import DONE, SEND_NOW, Address, Reply, exchange, run
from twinphase.bench.client.sse import read_events

__all__ = ["ask", "events"]


async def ask(port: int, path: str, body: dict[str, Any] | bytes, *, due: float = SEND_NOW, **options: Any) -> Reply:
    """Send a request when it is due, and take all that comes back; `Reply.whole` if its HTTP message ended too.

    Args:
        port: of the server.
        path: of the API.
        body: to be sent as JSON; bytes are JSON already, which takes no time any more when the request is due.
        due: seconds of `time.perf_counter`; at once unless told. `Reply.intended` is this moment, and the connection
            is asked for only then: times that count from it have its opening in them, as a user's have.
        options: of `exchange`.
    """
    address = Address("http", "127.0.0.1", port, "")
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    request = address.head("POST", path, {}, len(data)) + data
    if math.isnan(due):
        due = time.perf_counter()
    else:
        await asyncio.sleep(due - time.perf_counter())
    return await exchange(address, request, intended=due, to_the_end=True, **options)


def events(reply: Reply) -> list[tuple[float, dict[str, Any]]]:
    """Of a stream, when each had come, and its JSON; the last one (`[DONE]`) is left out."""
    return [(moment, json.loads(data)) for moment, data in read_events(reply.pieces) if data != DONE]


async def _main(port: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    gc.disable()
    cpu = time.process_time()
    replies = await asyncio.gather(*(ask(port, "/v1/completions", body) for body in bodies))
    cpu = time.process_time() - cpu
    shown = [
        {
            "began": reply.intended,
            "ended": reply.ended,
            "status": reply.status,
            "error": reply.error,
            "whole": reply.whole,
            "events": events(reply),
        }
        for reply in replies
    ]
    return {"cpu_seconds": cpu, "replies": shown}


if __name__ == "__main__":
    json.dump(run(_main(int(sys.argv[1]), json.load(sys.stdin))), sys.stdout)
