"""Isolation between users and from the server: keys, caches, code, addresses."""

import ast
import inspect
import json
import socket
from pathlib import Path

import pytest

import twinphase
from dialects import OPENAI, PATHS, bearer, dialect_of, function, message, user
from raw_client import PATH, PROBE, connect, events, read_reply, request, send, surviving
from twinphase.cache.prefix_cache import PrefixCache
from twinphase.request import Request, SamplingParams
from twinphase.server.access import Access

ROOT = Path(twinphase.__file__).parent
ALICE = bearer("alice")
BOB = bearer("bob")


def prompt(first):
    return [first, *range(5, 200)]


def ask(server, who, first, **fields):
    """(cached tokens, reason for a miss, id) of a prompt."""
    status, body = server.post(PATH, {**PROBE, "prompt": prompt(first), **fields}, **who)
    assert status == 200, body
    return (
        body["usage"]["prompt_tokens_details"]["cached_tokens"],
        body["timings"].get("prefix_miss"),
        body["id"],
    )


# Tenants.


def test_a_cached_prompt_is_nobody_elses(shared):
    with surviving(shared, **ALICE):
        assert ask(shared, ALICE, 7)[0] == 0
        assert ask(shared, ALICE, 7)[0] > 0
        seen_by_alice = ask(shared, BOB, 7)
        seen_by_nobody = ask(shared, BOB, 8)
        assert seen_by_alice[0] == seen_by_nobody[0] == 0
        # Bob learns as little from the reason as from the time.
        ask(shared, ALICE, 9)
        assert ask(shared, BOB, 9)[1] == ask(shared, BOB, 10)[1] != None  # noqa: E711
        assert ask(shared, BOB, 7)[0] > 0


def test_a_salt_divides_a_tenants_cache_and_joins_no_two(shared):
    with surviving(shared, **ALICE):
        assert ask(shared, ALICE, 11, cache_salt="a")[0] == 0
        assert ask(shared, ALICE, 11, cache_salt="b")[0] == ask(shared, ALICE, 11)[0] == 0
        assert ask(shared, BOB, 11, cache_salt="a")[0] == 0
        assert ask(shared, ALICE, 11, cache_salt="a")[0] > 0
        # Nor by a salt that looks like another tenant's.
        tenant = Access({"alice": "key1"}).tenant("Bearer alice")
        for salt in (tenant, f"{tenant}|", f"{tenant}|a"):
            assert ask(shared, BOB, 11, cache_salt=salt)[0] == 0


def test_a_request_is_seen_by_its_own_tenant_only(shared):
    def told(key, name, what):
        status, body = shared.get(f"/v1/requests/{name}/{what}", **key)
        return status, json.dumps(body).replace(name, "")

    def listed(key):
        return {one["id"]: one["finished"] for one in shared.get("/v1/requests", **key)[1]["data"]}

    with surviving(shared, **ALICE):
        *_, name = ask(shared, ALICE, 12)
        with send(shared, PATH, {**PROBE, "max_tokens": 4000, "stream": True}, **ALICE) as client:
            running = next(events(client))["id"]
            assert listed(ALICE)[running] is False and listed(ALICE)[name] is True
            assert not {name, running} & listed(BOB).keys()
            for asked, what in ((name, "timeline"), (name, "explain"), (running, "timeline")):
                assert told(ALICE, asked, what)[0] == 200
                assert told(BOB, asked, what) == told(BOB, "cmpl-" + "0" * 32, what)
                assert told(BOB, asked, what)[0] == 404
    assert shared.get("/v1/requests")[0] == shared.get(f"/v1/requests/{name}/timeline")[0] == 401


@pytest.mark.parametrize(
    "value",
    [
        "",
        "alice",
        "Bearer",
        "Bearer ",
        "Bearer alic",
        "Bearer alicee",
        "Bearer ALICE",
        "Basic alice",
    ]
    + ["Bearer \xff", "Bearer alice bob", "Bearer " + "a" * 10_000],
)
def test_without_a_key_nothing_is_told(shared, value):
    with surviving(shared, **ALICE), connect(shared) as client:
        paths = (
            PATH,
            *PATHS.values(),
            "/tokenize",
            "/detokenize",
            "/v1/requests/a/timeline",
            "/api/tags",
            "/nothing",
        )
        for path in paths:
            client.sendall(request(path, b"{", Authorization=value).decode().encode("latin-1"))
            status, headers, body = read_reply(client)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            dialect = dialect_of(path)
            assert "alice" not in message(dialect, body)
            assert dialect != OPENAI or body["error"]["code"] == "invalid_api_key"
        assert shared.get("/v1/models")[0] == 401
        assert shared.get("/health")[0] == shared.get("/metrics")[0] == 200
        assert "alice" not in shared.get("/metrics")[1]


def test_keys_are_compared_in_constant_time():
    names = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(Access))))
        if isinstance(node, ast.Attribute)
    }
    assert "compare_digest" in names
    assert not any(
        b"secret" in repr(value).encode() for value in vars(Access({"secret": "key1"})).values()
    )


# Hashes (more in tests/cache).


def test_a_blocks_hash_is_sha256_of_everything_that_matters():
    def hashes(tokens, salt=None, fingerprint=b"model", block_size=16):
        cache = PrefixCache(8, block_size, fingerprint)
        asked = Request("r", tokens, SamplingParams(), cache_salt=salt)
        return [cache.block_hash(asked, index) for index in range(2)]

    tokens = list(range(32))
    plain = hashes(tokens)
    assert all(len(digest) == 32 for digest in plain) and plain == hashes(tokens)
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    # Python's hash() takes -1 for -2: what collides there must not collide here.
    negative = hashes([-1, *tokens[1:]]), hashes([-2, *tokens[1:]])
    others = [
        hashes(swapped),
        hashes(tokens, "salt"),
        hashes(tokens, fingerprint=b"other"),
        *negative,
    ]
    digests = [tuple(plain), *map(tuple, others)]
    assert len({digest for pair in digests for digest in pair}) == 2 * len(
        digests
    )  # also of the second block


# Code and addresses.

NEVER = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
NETWORK = {
    "urllib",
    "requests",
    "httpx",
    "aiohttp",
    "http",
    "ftplib",
    "smtplib",
    "websockets",
    "webbrowser",
}
CODE = {"eval", "exec", "compile", "__import__", "os.system", "torch.load"}


def test_no_pickle_no_code_from_outside_no_fetching():
    for path in ROOT.rglob("*.py"):
        folder = path.relative_to(ROOT).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                package = module.partition(".")[0]
                assert package not in NEVER, f"{path}:{node.lineno}"
                # Models are fetched by weights; bench and explain ask the server they are given.
                reaches = package in NETWORK and module != "urllib.parse"
                assert not reaches or folder in ("weights", "bench", "commands"), (
                    f"{path}:{node.lineno}"
                )
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                # Kernels are made of the backend's own text.
                assert called not in CODE or folder == "backends", f"{path}:{node.lineno}"
                assert "trust_remote_code" not in {keyword.arg for keyword in node.keywords}, (
                    f"{path}:{node.lineno}"
                )


def test_nothing_is_fetched_for_a_schema(server):
    with socket.socket() as listener, surviving(server):
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        for schema in (
            {"$ref": url},
            {"$ref": "file:///etc/passwd"},
            {"properties": {"a": {"$ref": url + "#/a"}}},
            {"$id": url, "$ref": "other.json"},
        ):
            tool = function({"name": "f", "parameters": schema})
            messages = [user("a")]
            for path, body in (
                (PATH, {"prompt": "a", "guided_json": schema}),
                (
                    PATH,
                    {
                        "prompt": "a",
                        "guided_grammar": f"start: %json {str(schema).replace(chr(39), chr(34))}",
                    },
                ),
                (
                    "/v1/chat/completions",
                    {"messages": messages, "tools": [tool], "tool_choice": "required"},
                ),
            ):
                status, reply = server.post(path, {**body, "max_tokens": 4})
                assert status == 400, (schema, reply)
        with pytest.raises(BlockingIOError):
            listener.accept()
