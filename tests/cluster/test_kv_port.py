"""KV blocks between engines: sent during prefill, checked, and used with the same bits."""

import os
import queue
import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from kv_workers import FAULTS, KEY, FaultProxy, Worker, workers
from raw_client import until
from tiny_gguf import write_tiny_gguf
from twinphase.cluster import handshake
from twinphase.cluster.handshake import (
    GREETING_BYTES,
    NOT_NEEDED,
    PROTOCOL,
    ClusterKey,
    WrongKeyError,
    authenticate,
)
from twinphase.cluster.kv import intake
from twinphase.cluster.kv.port import opened_port
from twinphase.engine.process.messages import Pushed, PushTo
from twinphase.errors import StorageError
from twinphase.outcome import FinishReason
from twinphase.request import SamplingParams

GREETING = PROTOCOL + NOT_NEEDED + b"\n"
CONFIG = {"threads": 1, "num_kv_blocks": 40, "max_num_batched_tokens": 48, "block_size": 16}
PARAMS = SamplingParams(temperature=1.2, seed=5, max_tokens=12, logprobs=3, ignore_eos=True)
FIRST = SamplingParams(temperature=1.2, seed=5, max_tokens=1, logprobs=3, ignore_eos=True)


def prompt(length=200, seed=0):
    choose = random.Random(seed)
    return [choose.randrange(300) for _ in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory, own_cache):
    return write_tiny_gguf(tmp_path_factory.mktemp("kv") / "tiny.gguf", context=512)


@pytest.fixture(scope="module")
def pair(model):
    with workers(model, 2, **CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def alone(model):
    """The answers of an engine that receives no blocks."""
    with workers(model, 1, **CONFIG) as (worker,):
        yield worker


@pytest.fixture(autouse=True)
def fresh(pair):
    for worker in pair:
        worker.forget()


def by(worker, kind, lease=30.0):
    """A destination that is reached by one transport only."""
    return PushTo([address for address in worker.port.addresses if address.startswith(kind)], lease)


def same(answer, other):
    return (answer.tokens, answer.logprobs) == (other.tokens, other.logprobs)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("length", [15, 16, 17, 200, 208])
def test_a_prompt_is_read_here_and_answered_there(pair, alone, kind, length):
    reader, writer = pair
    expected = alone.ask(prompt(length), PARAMS)
    first = reader.ask(prompt(length), FIRST, by(writer, kind))
    answer = writer.ask(prompt(length), PARAMS)
    assert (first.tokens, first.logprobs) == (answer.tokens[:1], answer.logprobs[:1])
    assert same(answer, expected)
    assert answer.num_cached == (length - 1) // 16 * 16
    pushed = first.pushed
    blocks = length // 16
    assert (pushed.num_blocks, pushed.num_stored, pushed.problem) == (blocks, blocks, "")
    assert pushed.num_bytes == blocks * writer.port.intake.nbytes
    again = reader.ask(prompt(length), FIRST, by(writer, kind))  # nothing is sent twice
    assert (again.pushed.num_stored, again.pushed.num_bytes) == (blocks, 0)
    for worker in pair:
        worker.check()


@pytest.mark.parametrize("seed", range(10))
def test_an_answer_goes_on_where_its_blocks_went(pair, alone, seed):
    """The first token comes from the prefill engine, all others from the decode engine."""
    (reader, writer) = pair
    choose = random.Random(seed)
    one = prompt(choose.randint(20, 300), 1000 + seed)
    params = SamplingParams(
        temperature=choose.choice([0.0, 0.7, 1.5]),
        seed=seed,
        top_p=choose.choice([1.0, 0.9]),
        presence_penalty=choose.choice([0.0, 0.5]),
        max_tokens=choose.randint(2, 20),
        logprobs=2,
        ignore_eos=True,
    )
    expected = alone.ask(one, params)
    first = reader.ask(
        one, replace(params, max_tokens=1), by(writer, choose.choice(["unix", "tcp"]))
    )
    rest = writer.ask(one, params, output=first.tokens)
    assert first.tokens + rest.tokens == expected.tokens
    assert first.logprobs + rest.logprobs == expected.logprobs
    assert (
        rest.num_cached == len(one) // 16 * 16
    )  # the last prompt token's block too, where it is full


def test_blocks_leave_before_the_prompt_is_read_and_the_end_is_told_while_the_engine_computes(pair):
    """Chunks of 48 tokens.

    If the end waited for a step, an answer that goes on elsewhere would wait for it too.
    """
    reader, writer = pair
    pushes = reader.port.pushes
    moment = threading.Event()
    told = threading.Event()

    def beside(engine):
        if not engine.has_work:
            assert told.wait(20)  # as a step of the next prompt
            return
        while pushes._frames or any(push.wanted is None for push in pushes._pushes.values()):
            moment.wait(1e-3)  # until what was sent is stored
        reader.loop.between_steps(beside)

    name = reader.begin(prompt(480), FIRST, by(writer, "tcp"))
    reader.loop.between_steps(beside)
    pushed = reader.wait(name, lambda answer: answer.pushed).pushed
    told.set()
    assert (pushed.num_blocks, pushed.num_stored, pushed.num_early) == (
        30,
        30,
        27,
    )  # all but the last chunk's


def test_many_at_once_and_salts_apart(pair, alone):
    reader, writer = pair
    prompts = [prompt(50 + 10 * number, number) for number in range(5)]
    salts = [None, "a", None, "b", "a"]
    names = [
        reader.begin(one, FIRST, by(writer, kind), salt)
        for one, salt, kind in zip(prompts, salts, ["unix", "tcp"] * 3, strict=False)
    ]
    for name in names:
        reader.wait(name, lambda answer: answer.pushed)
    answers = [
        writer.begin(one, PARAMS, salt=salt) for one, salt in zip(prompts, salts, strict=True)
    ]
    for one, name in zip(prompts, answers, strict=True):
        answer = writer.wait(name, lambda answer: answer.finished)
        assert (
            same(answer, alone.ask(one, PARAMS)) and answer.num_cached == (len(one) - 1) // 16 * 16
        )
    other = writer.ask(prompts[1], PARAMS)
    assert other.num_cached == 0 and same(other, alone.ask(prompts[1], PARAMS))


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_happens_on_the_way_the_answer_is_the_same(pair, alone, fault):
    reader, writer = pair
    before = writer.port.intake.counts.copy()
    spoilt = frames = 0
    for seed in range(6):
        one = prompt(random.Random(seed).randint(60, 300), 100 + seed)
        proxy = FaultProxy(by(writer, "tcp").addresses[0], FAULTS[fault], seed)
        try:
            first = reader.ask(one, FIRST, PushTo([proxy.address], 0.3))
            answer = writer.ask(one, PARAMS)
            assert same(answer, alone.ask(one, PARAMS))
            assert first.tokens == answer.tokens[:1] and first.logprobs == answer.logprobs[:1]
            assert first.pushed.num_stored <= first.pushed.num_blocks
            for worker in pair:
                worker.check()
        finally:
            proxy.close()
        spoilt = spoilt + proxy.num_spoilt
        frames = frames + proxy.num_frames
    assert spoilt or fault == "delay"
    new = writer.port.intake.counts - before
    assert frames and sum(new.values()) > 0
    if fault == "flip":
        assert new["damaged"] > 0
    if fault == "one_nan":
        assert new["not_finite"] > 0
    if fault == "duplicate":
        assert new["known"] > 0 and new["stored"] == frames
    if fault == "reorder":
        assert new["orphan"] > 0


def test_a_lease_ends_and_late_blocks_are_ordinary_ones(pair, alone):
    reader, writer = pair
    go_on = threading.Event()

    def hold(choose, data):
        assert go_on.wait(60)
        return data

    proxy = FaultProxy(by(writer, "tcp").addresses[0], hold)
    first = reader.ask(prompt(), FIRST, PushTo([proxy.address], 0.2))
    assert first.pushed.problem == "no answer in 0.2 s" and first.pushed.num_stored == 0
    reader.check()
    answer = writer.ask(prompt(), PARAMS)
    assert answer.num_cached == 0 and same(answer, alone.ask(prompt(), PARAMS))
    go_on.set()  # now they come: what is known already is passed over
    assert same(writer.ask(prompt(), PARAMS), answer)
    proxy.close()


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:1", "unix:/nowhere", "what", "tcp:no:port"])
def test_nobody_there_costs_nothing_but_the_blocks(pair, address):
    reader, _ = pair
    first = reader.ask(prompt(), FIRST, PushTo([address], 20.0))
    assert len(first.tokens) == 1 and first.pushed.problem and first.pushed.num_stored == 0
    reader.check()


def test_a_full_cache_takes_what_it_has_room_for(pair, alone):
    """Requests hold 36 of the 40 blocks of the engine that answers."""
    reader, writer = pair
    before = writer.port.intake.counts.copy()
    held = writer.between_steps(lambda engine: engine.scheduler.kv_cache.pool.allocate(36))
    first = reader.ask(prompt(), FIRST, by(writer, "unix"))
    assert (first.pushed.num_blocks, first.pushed.num_stored) == (12, 4)
    counts = writer.port.intake.counts - before
    assert (
        counts["stored"] == 4
        and counts["no_room"] > 0
        and counts["no_room"] + counts["orphan"] == 8
    )
    writer.between_steps(lambda engine: engine.scheduler.kv_cache.pool.release(held))
    answer = writer.ask(prompt(), PARAMS)
    assert answer.num_cached == 64 and same(answer, alone.ask(prompt(), PARAMS))


def test_another_model_or_key_is_refused(pair, model, tmp_path):
    reader, _ = pair
    other = write_tiny_gguf(tmp_path / "other.gguf", context=512, seed=7)
    for path, key, problem in (
        (other, KEY, "of another kind"),
        (model, ClusterKey(b"another"), "closed|another key"),
    ):
        stranger = Worker(path, key=key, **CONFIG)
        for kind in ("unix", "tcp"):
            first = reader.ask(prompt(), FIRST, by(stranger, kind))
            assert first.pushed.num_stored == 0
            assert any(part in first.pushed.problem for part in problem.split("|")), (
                first.pushed.problem
            )
        assert not stranger.port.intake.counts
        stranger.check()
        stranger.close()


def test_a_port_that_somebody_else_has_is_refused_in_a_line(pair):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with (
            opened_port(KEY, port=port) as open_port,
            pytest.raises(StorageError, match=f"{port}.*another --kv-port"),
        ):
            open_port(pair[0].loop, print)


def test_an_aborted_request_stops_its_push(pair):
    reader, writer = pair
    name = reader.begin(prompt(400), PARAMS, by(writer, "tcp"))
    reader.between_steps(lambda engine: engine.finish(name, FinishReason.ABORT))
    assert reader.wait(name, lambda answer: answer.pushed).pushed.num_stored <= 25
    reader.check()
    writer.check()


def test_both_ends_prove_the_key():
    for keys in ((ClusterKey(b"a"),) * 2, (ClusterKey(b"a"), ClusterKey(b"b"))):
        left, right = socket.socketpair()
        found = queue.SimpleQueue()

        def other(link=right, key=keys[1], found=found):
            try:
                authenticate(link, key, listening=True)
                found.put(None)
            except (WrongKeyError, OSError) as error:
                found.put(error)
                link.close()

        thread = threading.Thread(target=other)
        thread.start()
        if keys[0] == keys[1]:
            authenticate(left, keys[0], listening=False)
            assert found.get(timeout=60) is None
        else:
            with pytest.raises((WrongKeyError, OSError)):
                authenticate(left, keys[0], listening=False)
            assert isinstance(found.get(timeout=60), (WrongKeyError, OSError))
        thread.join()
        left.close()
        right.close()


def test_a_handshake_has_one_deadline(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)
    left, right = socket.socketpair()
    num_sent = 0

    def drip():
        nonlocal num_sent
        with suppress(OSError):
            for byte in GREETING:
                right.sendall(bytes([byte]))
                num_sent += 1
                time.sleep(0.1)

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        authenticate(left, KEY, listening=True)
    left.close()
    thread.join()
    right.close()
    assert num_sent < GREETING_BYTES


def test_connections_without_a_proof_are_few(monkeypatch):
    monkeypatch.setattr(intake, "MAX_UNPROVEN_CONNECTIONS", 2)
    listener = intake.BlockListener(None, KEY, shared_memory=False)
    port = int(listener.addresses[0].rpartition(":")[2])

    def first_bytes(link):
        link.settimeout(60)
        return link.recv(GREETING_BYTES)

    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    assert [first_bytes(link) for link in links] == [GREETING, GREETING]
    with socket.create_connection(("127.0.0.1", port)) as third:
        assert first_bytes(third) == b""
    links.pop().close()

    def is_served():
        with socket.create_connection(("127.0.0.1", port)) as later:
            return first_bytes(later) == GREETING

    until(is_served, 30)
    links.pop().close()
    listener.close()


def test_an_echo_of_the_challenge_proves_nothing():
    left, right = socket.socketpair()

    def echo():
        while data := right.recv(1 << 12):
            right.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(WrongKeyError, match="another key"):
        authenticate(left, KEY, listening=False)
    left.close()
    thread.join()
    right.close()


def test_an_engine_without_a_port_refuses_to_push(pair):
    reader, writer = pair
    seen = queue.SimpleQueue()
    pushes = reader.loop.pushes
    reader.loop.pushes = None
    taker = reader.loop._send
    reader.loop._send = seen.put
    reader.begin(prompt(), FIRST, by(writer, "tcp"))
    message = seen.get(timeout=60)
    reader.loop.pushes = pushes
    reader.loop._send = taker
    assert message.kind == "InvalidRequestError" and not isinstance(message, Pushed)


def test_an_unused_connection_is_closed_and_leaves_nothing(model, monkeypatch):
    """Workers change their roles: each pair would keep a connection and its memory for ever."""
    monkeypatch.setattr("twinphase.cluster.kv.pushes.IDLE_SECONDS", 0.05)

    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with workers(model, 2, **CONFIG) as (reader, writer):
        pushes = reader.port.pushes
        for worker in (reader, writer):  # Each opens files about its own threads.
            worker.ask(prompt(seed=9), FIRST)
        before = held()
        for seed, kind in enumerate(("unix", "tcp", "unix")):
            pushed = reader.ask(prompt(seed=seed), FIRST, by(writer, kind)).pushed
            assert (pushed.num_stored, pushed.problem) == (12, "")
            until(lambda: not pushes._transports and pushes._slots is None)
            until(lambda: held() == before)
