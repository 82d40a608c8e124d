"""A rank's process: `python -m twinphase.engine.ranks.rank SOCKET MEMORY`, from `ranks.py`.

It computes its share of every step, and ends when rank 0 has ended.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from pathlib import Path

from twinphase.backends.base import Backend
from twinphase.backends.group import Group
from twinphase.engine.loading.loading import allocate_kv_cache, make_backend
from twinphase.engine.process.wire import Decoder, encode
from twinphase.engine.ranks.messages import (
    Blocks,
    Failed,
    LoadShare,
    Read,
    Ready,
    Step,
    ToRank,
    Write,
)
from twinphase.errors import TwinphaseError
from twinphase.models.decoder import Decoder as Model
from twinphase.models.loader import load_model, open_model, read_blueprint
from twinphase.models.share import share_of

RECEIVE_BYTES = 1 << 20


def main(descriptor: int, memory: int) -> int:
    """Serve rank 0; returns the exit code."""
    link = socket.socket(fileno=descriptor)
    inbox = queue.SimpleQueue[ToRank]()
    threading.Thread(
        target=_receive, args=(link, inbox), name="twinphase-receive", daemon=True
    ).start()
    first = inbox.get()
    assert isinstance(first, LoadShare)
    try:
        model, backend = _load(first, memory)
    except TwinphaseError as error:
        link.sendall(encode(Failed(type(error).__name__, error.cause, error.fix)))
        return error.exit_code
    forward = model.hidden if first.config.task == "embed" else model.forward
    link.sendall(encode(Ready()))
    while True:
        message = inbox.get()
        if isinstance(message, Step):
            model.kept = message.kept
            backend.execute(forward, message.inputs())
        elif isinstance(message, Read):
            link.sendall(encode(Blocks(backend.read_blocks(message.block_ids))))
        elif isinstance(message, Write):
            backend.write_blocks(message.block_ids, message.frames)


def _receive(link: socket.socket, inbox: queue.SimpleQueue[ToRank]) -> None:
    """Receive messages; end the process with rank 0, even while a step waits for it."""
    decoder: Decoder[ToRank] = Decoder(ToRank)
    while True:
        try:
            data = link.recv(RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        for message in decoder.feed(data):
            inbox.put(message)


def _load(wanted: LoadShare, memory: int) -> tuple[Model, Backend]:
    config = wanted.config
    path = Path(wanted.model)
    count = config.tensor_parallel_size
    checkpoint = open_model(path, quantization=config.quantization)
    part, b = share_of(
        checkpoint, read_blueprint(checkpoint, config.max_model_len), wanted.rank, count
    )
    backend = make_backend(config)
    backend.group = Group(wanted.rank, count, memory, Path(wanted.meeting_place))
    model = load_model(part, backend, config.max_model_len, blueprint=b)
    allocate_kv_cache(backend, b, config)
    return model, backend


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
