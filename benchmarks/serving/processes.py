"""A server of its own, the state of its processes, and requests to it as a client."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from running import RunningServer
from twinphase.server.event_stream import read_events
from twinphase_bench.client.client import DONE, SEND_NOW, Address, Reply, exchange

COMPLETIONS = "/v1/completions"
VOCABULARY = (1000, 40000)  # ordinary tokens of the model


@contextmanager
def serving(args: argparse.Namespace, *flags: str, **options: Any) -> Iterator[RunningServer]:
    """A server of the model; options are flags of `twinphase serve`."""
    if args.threads:  # Encoders have neither threads nor sampling values.
        # The engine alone, whose answers are compared, draws from the whole distribution.
        flags += (f"--threads={args.threads}", '--override-generation-config={"top_p": 1}')
    if args.isa:
        flags += (f"--isa={args.isa}",)
    flags += tuple(f"--{name.replace('_', '-')}={value}" for name, value in options.items())
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with RunningServer(args.model, log, *flags) as server:
            yield server


async def ask(
    server: RunningServer,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    **options: Any,
) -> Reply:
    """Send a request now and take its reply to the end of the message; options of `exchange`."""
    address = Address.parse(server.url)
    data = msgspec.json.encode(body)
    request = address.head("POST", path, headers or {}, len(data)) + data
    return await exchange(address, request, intended=SEND_NOW, to_the_end=True, **options)


def events(reply: Reply) -> list[dict[str, Any]]:
    """JSON of a stream's events, without the last one, `[DONE]`."""
    return [json.loads(data) for _, data in read_events(reply.pieces) if data != DONE]


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(*VOCABULARY) for _ in range(tokens)]


@dataclass(frozen=True)
class ProcessState:
    """Resident memory in MiB, threads and open descriptors of a process."""

    resident: float
    threads: int
    descriptors: int


def process_state(pid: int) -> ProcessState:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    resident = int(fields["VmRSS"].split()[0]) / 1024
    return ProcessState(resident, int(fields["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))
