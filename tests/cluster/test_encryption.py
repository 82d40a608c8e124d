"""Connections within a cluster: authentication, encryption, and what a man in the middle sees."""

from __future__ import annotations

import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kv_workers import Worker
from routed import CONFIG, KEY, WorkerProcess, check_answers
from twinphase.cluster import encryption
from twinphase.cluster.encryption import TlsSession, TlsSocket
from twinphase.cluster.handshake import (
    DEMANDED,
    GREETING_BYTES,
    NOT_NEEDED,
    ClusterKey,
    EncryptionMismatchError,
    WrongKeyError,
    authenticate,
    receive_exactly,
)
from twinphase.cluster.remote import RemoteHost
from twinphase.config import EngineConfig
from twinphase.engine.process.messages import PushTo
from twinphase.request import SamplingParams

SECRET = KEY.encode()
ON = ClusterKey(SECRET, "on")
AUTO = ClusterKey(SECRET)
OFF = ClusterKey(SECRET, "off")
# As token ids of MessagePack, which has a byte for each, it is the text itself.
SECRET_TEXT = b"attack at dawn, from the hills by the river."
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)


@contextmanager
def pair():
    """Both ends of a TCP connection on loopback: the one that listens, the one that connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = socket.create_connection(server.getsockname())
        listens, _ = server.accept()
    with listens, connects:
        yield listens, connects


def met(listens, connects, listening_key, connecting_key):
    """The result or the error of `authenticate` at each end."""

    def end(link, key, listening):
        try:
            return authenticate(link, key, listening=listening)
        except Exception as error:
            link.close()
            return error

    with ThreadPoolExecutor(2) as pool:
        ends = ((listens, listening_key, True), (connects, connecting_key, False))
        return [one.result(30) for one in [pool.submit(end, *each) for each in ends]]


@pytest.mark.parametrize(
    "listening, connecting, encrypted",
    [(AUTO, AUTO, False), (ON, AUTO, True), (AUTO, ON, True), (OFF, AUTO, False)],
)
def test_either_end_may_demand_encryption_and_loopback_needs_none(listening, connecting, encrypted):
    with pair() as links:
        streams = met(*links, listening, connecting)
        assert [isinstance(stream, TlsSocket) for stream in streams] == [encrypted] * 2
        for sender, receiver in (streams, reversed(streams)):
            sender.sendall(b"abc")
            assert receive_exactly(receiver, 3) == b"abc"


def test_connections_that_leave_the_machine_demand_encryption(monkeypatch):
    """Encryption is required for other addresses, not for loopback and Unix sockets."""
    ends = {"getsockname": ("10.0.0.1", 1), "getpeername": ("10.0.0.2", 2)}

    class Link:
        family = socket.AF_INET

        def __getattr__(self, name):
            return lambda: ends[name]

    assert AUTO.stance(Link()) == DEMANDED
    ends["getsockname"] = ("127.0.0.1", 1)  # a tunnel's end
    assert AUTO.stance(Link()) == DEMANDED
    ends["getpeername"] = ("::1", 2)
    assert AUTO.stance(Link()) == NOT_NEEDED
    left, right = socket.socketpair()
    with left, right:
        assert ON.stance(left) == NOT_NEEDED


@pytest.mark.parametrize("listening, connecting", [(ON, OFF), (OFF, ON)])
def test_an_end_without_encryption_is_refused_by_both(listening, connecting):
    with pair() as links:
        for error, key in zip(
            met(*links, listening, connecting), (listening, connecting), strict=True
        ):
            assert isinstance(error, EncryptionMismatchError) and "--cluster-encryption" in str(
                error
            )
            assert ("this end, and the other" in str(error)) == (key == OFF)


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_another_key_is_refused_by_both(encryption):
    with pair() as links:
        keys = ClusterKey(b"a" * 16, encryption), ClusterKey(b"b" * 16, encryption)
        errors = met(*links, *keys)
        # The first end that notices closes the connection, perhaps before the other end does.
        assert all(isinstance(error, (WrongKeyError, OSError)) for error in errors)
        assert "another key" in str(errors)


@contextmanager
def attacker(listening_key, connecting_key, attack):
    """The results at both ends with `attack(to_listening, to_connecting)` in between."""
    with pair() as (listens, to_listening), pair() as (to_connecting, connects):

        def run():
            with suppress(OSError):
                attack(to_listening, to_connecting)
            for link in (to_listening, to_connecting):
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield met(listens, connects, listening_key, connecting_key)
        finally:
            thread.join()


def relay(source, sink, size):
    sink.sendall(receive_exactly(source, size))


def decrypting(context):
    """An attack that decrypts and encrypts again, and passes challenges and proofs on.

    `context` has the certificate that the connecting end is shown.
    """

    def attack(to_listening, to_connecting):
        relay(to_connecting, to_listening, GREETING_BYTES)
        relay(to_listening, to_connecting, GREETING_BYTES)
        streams = []
        for link, listening in ((to_listening, False), (to_connecting, True)):
            session = TlsSession(listening=listening)
            if listening:
                bios = session._incoming, session._outgoing
                session._object = context.wrap_bio(*bios, server_side=True)
            session.handshake(link, lambda link=link: link.settimeout(10))
            streams.append(TlsSocket(link, session))
        for _ in ("challenge", "proof"):
            relay(streams[1], streams[0], 32)
            relay(streams[0], streams[1], 32)

    return attack


def test_an_attacker_between_who_shows_another_certificate_is_noticed():
    another, _ = encryption._listening_context.__wrapped__()
    with attacker(ON, ON, decrypting(another)) as errors:
        assert all(isinstance(error, (WrongKeyError, OSError)) for error in errors)
        assert "something between both ends decrypts the connection" in str(errors)


def test_the_certificate_alone_gives_that_attacker_away():
    stolen, _ = encryption._listening_context()
    with attacker(ON, ON, decrypting(stolen)) as streams:
        assert all(isinstance(stream, TlsSocket) for stream in streams)


def test_an_attacker_between_cannot_talk_an_end_out_of_encryption():
    def strip(to_listening, to_connecting):
        greeting = receive_exactly(to_connecting, GREETING_BYTES)
        assert DEMANDED in greeting
        to_listening.sendall(greeting.replace(DEMANDED, NOT_NEEDED))
        relay(to_listening, to_connecting, GREETING_BYTES)
        threading.Thread(target=pump, args=(to_connecting, to_listening), daemon=True).start()
        pump(to_listening, to_connecting)

    with attacker(AUTO, ON, strip) as errors:
        assert all(isinstance(error, (WrongKeyError, OSError)) for error in errors)


def pump(source, sink, seen=None):
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if seen is not None:
                seen.extend(data)
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def test_what_is_not_a_worker_is_named_by_what_it_sent():
    with pair() as (listens, connects):
        connects.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        with pytest.raises(WrongKeyError, match="GET / HTTP/1.1"):
            authenticate(listens, ON, listening=True)
    with pair() as (listens, connects):
        context = ssl.create_default_context()
        outcome = []

        def speak_tls():
            try:
                context.wrap_socket(connects, server_hostname="a")
            except OSError as error:
                outcome.append(error)

        thread = threading.Thread(target=speak_tls)
        thread.start()
        with pytest.raises(WrongKeyError, match=r"it sent b['\"]\\x16\\x03"):
            authenticate(listens, AUTO, listening=True)
        listens.close()
        thread.join()
        assert isinstance(outcome[0], ssl.SSLError)


def test_both_directions_carry_large_messages_at_once():
    sizes = 5_000_000, 5_000_001
    with pair() as links, ThreadPoolExecutor(4) as pool:
        ends = met(*links, ON, ON)
        for end, size in zip(ends, sizes, strict=True):
            pool.submit(end.sendall, bytes([size % 2]) * size)
        received = [
            pool.submit(receive_exactly, end, size)
            for end, size in zip(reversed(ends), sizes, strict=True)
        ]
        for one, size in zip(received, sizes, strict=True):
            assert one.result(60) == bytes([size % 2]) * size


def test_bytes_that_were_changed_on_the_way_end_the_connection():
    with pair() as links:
        sender, receiver = met(*links, ON, ON)
        data = bytearray(sender.session.encrypt(b"a token"))
        data[-3] ^= 1
        sender.link.sendall(data)
        with pytest.raises(OSError):
            receiver.recv(100)


class Recorder:
    """Passes a TCP connection on, and keeps its bytes."""

    def __init__(self, host, port):
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.seen = bytearray()
        self._links = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                link, _ = self._server.accept()
                there = socket.create_connection(self._target)
                self._links += [link, there]
                for ends in ((link, there), (there, link)):
                    threading.Thread(target=pump, args=(*ends, self.seen), daemon=True).start()

    def close(self):
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        for link in (self._server, *self._links):
            link.close()


@pytest.mark.parametrize("key, readable", [(ON, False), (OFF, True)], ids=["on", "off"])
def test_the_bytes_between_server_and_worker_show_no_prompt(serve, lone, tiny_path, key, readable):
    with ExitStack() as stack:
        worker = stack.enter_context(
            WorkerProcess("127.0.0.1:0", "--cluster-encryption", key.encryption)
        )
        recorder = Recorder(*worker.address.rsplit(":", 1))
        stack.callback(recorder.close)

        def hosts():
            address = f"127.0.0.1:{recorder.port}"
            return {"worker": RemoteHost(address, key, tiny_path, EngineConfig(**CONFIG), 2.0)}

        async def body(engine):
            await check_answers(engine, [(list(SECRET_TEXT), PARAMS)], lone)

        serve(body, hosts=hosts)
        assert (SECRET_TEXT in recorder.seen) == readable
        assert (tiny_path.name.encode() in recorder.seen) == readable
        assert len(recorder.seen) > 1000


@pytest.mark.parametrize("key, readable", [(ON, False), (OFF, True)], ids=["on", "off"])
def test_the_bytes_between_workers_show_no_prompt_and_the_blocks_arrive(tiny_path, key, readable):
    config = {**CONFIG, "speculative_config": None}
    ids = list(SECRET_TEXT)
    with ExitStack() as stack:
        reader, writer = (Worker(tiny_path, key=key, **config) for _ in range(2))
        stack.callback(reader.close)
        stack.callback(writer.close)
        recorder = Recorder("127.0.0.1", writer.port.addresses[-1].rpartition(":")[2])
        stack.callback(recorder.close)
        to = PushTo([f"tcp:127.0.0.1:{recorder.port}"], 20.0)
        pushed = reader.ask(ids, PARAMS, to).pushed
        assert (pushed.num_blocks, pushed.num_stored, pushed.problem) == (2, 2, "")
        assert writer.ask(ids, PARAMS).num_cached == 32
        assert (SECRET_TEXT[:16] in recorder.seen) == readable
        assert len(recorder.seen) > pushed.num_bytes
