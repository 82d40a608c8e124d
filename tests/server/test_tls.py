"""A server with a certificate, and commands that connect to it."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress

import pytest

from certificates import Authority
from raw_client import LONG, PATH, PROBE, events, read_reply, request, tokens
from twinphase.cli import run_app
from twinphase.errors import InvalidRequestError, StorageError
from twinphase.server.config import ServerConfig
from twinphase.server.tls import Certificate
from twinphase_bench.client import client
from twinphase_bench.client.client import Address, exchange


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def trusted(authority):
    """Every client of these tests trusts the authority, by the variable that users have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority.file))
        yield


@pytest.fixture(scope="module")
def secure(start, authority, trusted):
    certificate, key = authority.issue("server")
    with start("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as running:
        yield running


@pytest.fixture
def link(secure, authority):
    """A connection to the server, encrypted."""
    context = ssl.create_default_context(cafile=str(authority.file))
    port = int(secure.url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), 60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as link,
    ):
        yield link


def test_answers_are_those_without_tls(secure, server):
    assert secure.url.startswith("https://")
    assert tokens(secure.post(PATH, PROBE)[1]) == tokens(server.post(PATH, PROBE)[1])
    with secure.client() as openai:
        stream = openai.completions.create(model=secure.model, prompt="the", stream=True)
        assert list(stream)


def test_a_client_that_leaves_is_let_go_of(secure, link):
    link.sendall(request(PATH, {**LONG, "stream": True}))
    assert next(events(link))
    link.close()
    secure.wait_until_idle()


def test_a_head_that_is_too_long_is_refused_and_the_connection_closed(link):
    link.sendall(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    assert read_reply(link)[0] == 431
    assert link.recv(10) == b""


@pytest.mark.parametrize(
    "words", [["ps"], ["status"], ["explain", "--last"], ["launch", "aider", "--show"]]
)
def test_commands_ask_a_server_with_a_certificate(secure, capsys, words):
    secure.post(PATH, PROBE)
    assert run_app([*words, "--url", secure.url]) == 0
    assert capsys.readouterr().out


def test_the_client_of_bench_checks_certificates(secure, monkeypatch):
    async def ask():
        address = await Address.parse(secure.url).resolve()
        return await exchange(address, address.head("GET", "/v1/models", {}, 0))

    client._tls.cache_clear()
    assert client.run(ask()).json()["data"]
    monkeypatch.delenv("SSL_CERT_FILE")
    client._tls.cache_clear()
    error = client.run(ask()).error
    client._tls.cache_clear()
    assert error.startswith("untrusted certificate") and "SSL_CERT_FILE" in error


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda url: url.replace("https", "http"), "give --url with https://"),
        (lambda url: url.replace("127.0.0.1", "127.1"), "a name that the certificate has"),
    ],
    ids=["http", "name"],
)
def test_another_url_of_that_server_is_an_error_that_says_so(secure, capsys, change, message):
    assert run_app(["ps", "--url", change(secure.url)]) == 1
    assert message in capsys.readouterr().err


def test_a_certificate_that_is_not_trusted_is_an_error_that_names_the_way(
    secure, capsys, monkeypatch
):
    monkeypatch.delenv("SSL_CERT_FILE")
    assert run_app(["ps", "--url", secure.url]) == 1
    error = capsys.readouterr().err
    assert "is not trusted" in error and "Set SSL_CERT_FILE" in error
    assert run_app(["launch", "aider", "--show", "--url", secure.url]) == 1
    assert "is not trusted" in capsys.readouterr().err


def test_https_to_a_server_without_a_certificate_is_an_error_that_says_so(server, capsys):
    assert run_app(["ps", "--url", server.url.replace("http", "https")]) == 1
    assert "give --url with http://" in capsys.readouterr().err.lower()


def test_clients_may_need_a_certificate_of_their_own(authority):
    certificate, key = authority.issue("mutual")
    config = ServerConfig(
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        ssl_ca_certs=str(authority.file),
        ssl_cert_reqs=2,
    )
    context = Certificate(config).context
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        meet(context, authority)
    _, server = meet(context, authority, authority.issue("client"))
    assert server.getpeercert()["subject"][0][0][1] == "client"


def test_a_renewed_certificate_is_used_and_a_bad_one_is_not(authority, tmp_path, caplog):
    files = [tmp_path / "certificate", tmp_path / "key"]

    def put(pair):
        for file, source in zip(files, pair, strict=True):
            file.write_bytes(source.read_bytes())
            put.time += 1
            os.utime(file, (put.time, put.time))

    put.time = 1_000
    first, second, third = (authority.issue(f"renewed-{number}") for number in range(3))
    put(first)
    certificate = Certificate(ServerConfig(ssl_certfile=str(files[0]), ssl_keyfile=str(files[1])))
    assert shown(certificate.context, authority) == "renewed-0"
    put(second)
    certificate.refresh()
    assert shown(certificate.context, authority) == "renewed-1"
    put((third[0], second[1]))
    certificate.refresh()
    assert "The renewed certificate is not used" in caplog.text
    assert shown(certificate.context, authority) == "renewed-1"
    put(third)
    certificate.refresh()
    assert shown(certificate.context, authority) == "renewed-2"


def meet(context, authority, own=None):
    """Both ends of a handshake, of a client that trusts the authority and of the server."""
    up = ssl.MemoryBIO()
    down = ssl.MemoryBIO()
    trusting = ssl.create_default_context(cafile=str(authority.file))
    if own:
        trusting.load_cert_chain(*own)
    ends = (
        trusting.wrap_bio(down, up, server_hostname="localhost"),
        context.wrap_bio(up, down, server_side=True),
    )
    for end in 3 * ends:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends


def shown(context, authority):
    """The name in the certificate that clients are shown."""
    return meet(context, authority)[0].getpeercert()["subject"][0][0][1]


def test_files_that_are_no_certificate_are_refused_by_name(authority, tmp_path):
    certificate, key = authority.issue("good")
    other = authority.issue("other")[1]
    locked = authority.issue("locked", password=b"secret")
    odd = tmp_path / "odd.pem"
    odd.write_text("hello")

    def read(certificate, key, **others):
        Certificate(ServerConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key), **others))

    with pytest.raises(StorageError, match="Cannot read .*none.pem: No such file"):
        read(tmp_path / "none.pem", key)
    with pytest.raises(InvalidRequestError, match="key values mismatch"):
        read(certificate, other)
    with pytest.raises(InvalidRequestError, match="do not hold a certificate and its key"):
        read(odd, key)
    with pytest.raises(InvalidRequestError, match="is encrypted"):
        read(*locked)
    with pytest.raises(InvalidRequestError, match="odd.pem holds no certificate"):
        read(certificate, key, ssl_ca_certs=str(odd), ssl_cert_reqs=2)
    for options in ({"ssl_keyfile": "a"}, {"ssl_certfile": "a", "ssl_cert_reqs": 1}):
        with pytest.raises(InvalidRequestError, match="Give"):
            ServerConfig(**options)
