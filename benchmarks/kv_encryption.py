"""What encryption costs KV blocks that travel: computed blocks from one engine to another.

python benchmarks/kv_encryption.py --model smollm2 --tokens 4096 --reps 9

Two processes with one engine each, over TCP on loopback, with and without TLS in turn. Nothing is
computed meanwhile; copying out, hashing, checking and storing are included, as between workers.
The receiving end also prints the rate of the connections alone. Prints medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import threading
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

from twinphase.cluster.handshake import ClusterKey, Encryption, authenticate, receive_exactly
from twinphase.cluster.kv.intake import BlockListener
from twinphase.cluster.kv.port import KVPort
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.loop import EngineLoop
from twinphase.engine.process.messages import Add, FromEngine, Pushed, PushTo, StepUpdates, Stop
from twinphase.phases.record import RequestRecord
from twinphase.request import SamplingParams

SECRET = b"the key of this measurement"
ENCRYPTIONS: tuple[Encryption, ...] = ("off", "on")
LEASE_SECONDS = 60.0
STREAM_BYTES = 256 << 20
MESSAGE_BYTES = 1 << 18


def worker(model: str, link: Connection, tokens: int) -> None:
    """An engine that takes blocks both ways, and sends them as the other end asks."""
    config = EngineConfig(threads=1, max_model_len=tokens + 64, num_kv_blocks=2 * tokens // 16)
    loaded = LoadedEngine(model, config)

    def report(message: FromEngine) -> None:
        if isinstance(message, Pushed):
            link.send((message.num_blocks, message.num_stored, message.num_bytes))
        elif isinstance(message, StepUpdates) and any(update.ended for update in message.updates):
            link.send("ended")

    loop = EngineLoop(loaded, report)
    port = KVPort(loop, report, ClusterKey(SECRET, "off"), shared_memory=False)
    # Two ends that are both on loopback need no encryption, unless one of them demands it.
    encrypted = BlockListener(port.intake, ClusterKey(SECRET, "on"), shared_memory=False)
    port.pushes._key = ClusterKey(SECRET)
    link.send([port.addresses[0], encrypted.addresses[0]])

    def forget(engine: Any) -> None:
        pool = engine.scheduler.kv_cache.pool
        pool.release(pool.allocate(pool.num_available))
        link.send("forgotten")

    def receive() -> None:
        while not isinstance(message := link.recv(), Stop):
            if message == "forget":
                loop.between_steps(forget)
            else:
                loop.put(message)
        loop.put(message)

    threading.Thread(target=receive, daemon=True).start()
    loop.run()
    encrypted.close()
    port.close()


def add(number: int, prompt: list[int], push_to: PushTo | None) -> Add:
    record = RequestRecord.arrived(str(number), perf_counter())
    record.tokenized(len(prompt), perf_counter())
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    return Add(record, prompt, params, push_to=push_to)


def rate_of_blocks(model: str, tokens: int, reps: int) -> tuple[dict[Encryption, float], int]:
    """Median seconds of a push of a computed prompt, and its bytes."""
    context = multiprocessing.get_context("spawn")
    links = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=worker, args=(model, theirs, tokens), daemon=True).start()
        links.append(ours)
    sender, receiver = links
    sender.recv()
    addresses = dict(zip(ENCRYPTIONS, receiver.recv(), strict=True))
    draw = random.Random(1)
    prompt = [draw.randrange(9000) for _ in range(tokens)]
    sender.send(add(0, prompt, None))
    assert sender.recv() == "ended"
    seconds: dict[Encryption, list[float]] = {name: [] for name in ENCRYPTIONS}
    size = 0
    for number in range(1, 2 * reps + 3):
        encryption = ENCRYPTIONS[number % 2]
        receiver.send("forget")
        receiver.recv()
        start = perf_counter()
        sender.send(add(number, prompt, PushTo([addresses[encryption]], LEASE_SECONDS)))
        reports = [sender.recv(), sender.recv()]
        took = perf_counter() - start
        (pushed,) = (report for report in reports if report != "ended")
        assert pushed[0] == pushed[1] > 0, pushed
        size = pushed[2]
        if number > 2:  # The first of each connects.
            seconds[encryption].append(took)
    for link in links:
        link.send(Stop())
    return {name: median(values) for name, values in seconds.items()}, size


def send_stream(port: int, key: ClusterKey) -> None:
    """The sending process of `rate_of_connection`."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        stream = authenticate(link, key, listening=False)
        message = bytes(MESSAGE_BYTES)
        for _ in range(STREAM_BYTES // MESSAGE_BYTES):
            stream.sendall(message)


def rate_of_connection(encryption: Encryption) -> float:
    """Bytes per second of messages through one connection, in large messages."""
    key = ClusterKey(SECRET, encryption)
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = context.Process(target=send_stream, args=(server.getsockname()[1], key))
        process.start()
        link, _ = server.accept()
        with link:
            stream = authenticate(link, key, listening=True)
            receive_exactly(stream, MESSAGE_BYTES)
            start = perf_counter()
            for _ in range(STREAM_BYTES // MESSAGE_BYTES - 1):
                receive_exactly(stream, MESSAGE_BYTES)
            took = perf_counter() - start
        process.join()
    return (STREAM_BYTES - MESSAGE_BYTES) / took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--reps", type=int, default=9)
    args = parser.parse_args()
    seconds, size = rate_of_blocks(args.model, args.tokens, args.reps)
    rates = {name: size / took / 1e9 for name, took in seconds.items()}
    print(f"{size / 1e6:.0f} MB of KV blocks: {rates['off']:.2f} GB/s plain,", end=" ")
    print(f"{rates['on']:.2f} GB/s encrypted, ratio {rates['on'] / rates['off']:.2f}")
    found = [(rate_of_connection("off"), rate_of_connection("on")) for _ in range(args.reps)]
    plain, encrypted = (median(column) / 1e9 for column in zip(*found, strict=True))
    print(f"the connection alone: {plain:.2f} GB/s plain, {encrypted:.2f} GB/s encrypted")


if __name__ == "__main__":
    main()
