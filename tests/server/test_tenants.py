"""Tenants of a server: names and weights of keys, limits, shares, and isolation."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dialects import bearer
from raw_client import PATH, PROBE, events, send, surviving
from twinphase.errors import InvalidRequestError, OverloadedError
from twinphase.server.access import Access, Admission
from twinphase.server.config import ServerConfig

FLOOD = bearer("flood")
QUICK = bearer("quick==")


@pytest.fixture(scope="module")
def contended(start):
    """One request at a time, two may wait of each tenant."""
    keys = (
        "--api-key",
        "flood",
        "--tenant",
        "quick=quick==",
        "--tenant",
        "quick=other",
        "--tenant-weight",
        "quick=3",
    )
    with start(
        *keys, "--max-num-seqs", "1", "--max-queued-requests", "2", "--itl-slo-ms", "off"
    ) as running:
        running.headers = QUICK
        yield running


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tenant_weights": ("a=2",)}, "no tenant here. Give keys with --api-key or --tenant"),
        (
            {"api_keys": ("k",), "tenant_weights": ("a=2",)},
            "names 'a', which is no tenant here. Use one of: key1",
        ),
        (
            {"api_keys": ("k",), "tenant_weights": ("key1=0",)},
            "--tenant-weight is 'key1=0'. Use NAME=WEIGHT",
        ),
        ({"api_keys": ("k",), "tenant_weights": ("key1=-1",)}, "--tenant-weight is 'key1=-1'"),
        ({"api_keys": ("k",), "tenant_weights": ("key1=nan",)}, "--tenant-weight is 'key1=nan'"),
        ({"api_keys": ("k",), "tenant_weights": ("key1",)}, "--tenant-weight is 'key1'"),
        ({"named_keys": ("secret",)}, "not of the form NAME=KEY"),
        ({"named_keys": ("a b=secret",)}, "not of the form NAME=KEY"),
        ({"named_keys": ("a=",)}, "not of the form NAME=KEY"),
        ({"api_keys": ("k",), "named_keys": ("key1=secret",)}, "has the name of an --api-key"),
        (
            {"api_keys": ("secret",), "named_keys": ("a=secret",)},
            "key1 and a have the same API key",
        ),
        ({"named_keys": ("a=secret", "b=secret")}, "a and b have the same API key"),
    ],
)
def test_keys_and_weights_that_make_no_sense_are_refused_and_no_key_is_told(fields, match):
    with pytest.raises(InvalidRequestError, match=match) as refused:
        ServerConfig(**fields)
    assert "secret" not in str(refused.value)


def test_keys_have_names_and_a_tenant_may_have_several():
    config = ServerConfig(
        api_keys=("x", "y"), named_keys=("team=a=b==", "team=c"), tenant_weights=("team=2.5",)
    )
    access = Access(config.keys)
    tenants = {key: access.tenant(f"Bearer {key}") for key in ("x", "y", "a=b==", "c")}
    assert tenants == {"x": "key1", "y": "key2", "a=b==": "team", "c": "team"}
    assert {name: one.weight for name, one in Admission(config).tenants.items()} == {
        "key1": 1,
        "key2": 1,
        "team": 2.5,
    }


class TestAdmission:
    @pytest.fixture
    def admission(self):
        keys = {"api_keys": ("x", "y"), "tenant_weights": ("key2=3",)}
        return Admission(ServerConfig(max_queued_requests=2, max_queued_tokens=100, **keys))

    def test_a_full_queue_refuses_only_its_owner(self, admission):
        tickets = [admission.enter("key1", 1) for _ in range(3)]
        with pytest.raises(OverloadedError, match="3 requests run or wait"):
            admission.enter("key1", 1)
        other = admission.enter("key2", 3)
        tickets[0].queue(80)
        with pytest.raises(OverloadedError, match="80 prompt tokens are queued"):
            tickets[1].queue(80)
        other.queue(80)
        tickets[0].leave()
        admission.enter("key1", 1)

    def test_retry_after_is_the_work_that_waits_at_the_tenants_share(self, admission):
        for _ in range(30):
            ticket = admission.enter("key1", 1)
            admission.step(1.0, {"key1": 2.0})
            ticket.leave(9.0)
        assert admission.tenants["key1"].usual_work == pytest.approx(2.0)
        for _ in range(3):
            admission.enter("key1", 1)
        with pytest.raises(OverloadedError) as alone:
            admission.enter("key1", 1)
        admission.enter("key2", 1)
        with pytest.raises(OverloadedError) as beside:
            admission.enter("key1", 1)
        # Two wait, of two seconds each; beside a tenant of weight 3 at a quarter of the pace.
        assert (alone.value.retry_after, beside.value.retry_after) == (4, 16)

    def test_shares_are_those_of_the_last_seconds(self, admission):
        admission.step(1.0, {"key1": 50.0})
        admission.enter("key2", 1)
        for end in range(20, 24):
            admission.step(float(end), {"key1": 0.1, "key2": 0.3})
        assert admission.share("key1") == {"had": 0.25, "due": 0.25}
        assert admission.share("key2") == {"had": 0.75, "due": 1.0}


def test_one_tenants_full_queue_is_not_anothers(contended):
    body = {**PROBE, "max_tokens": 4000, "stream": True}
    with surviving(contended, **QUICK):
        clients = [send(contended, PATH, {**body, "prompt": [9, n + 3]}, **FLOOD) for n in range(3)]
        try:
            assert next(events(clients[0]))["id"]
            status, refused = contended.post(PATH, {**PROBE, "prompt": [5]}, **FLOOD)
            assert status == 429 and "overloaded" in refused["error"]["message"]
            asked = ThreadPoolExecutor(1).submit(
                contended.post, PATH, {**PROBE, "prompt": [5], "max_tokens": 2}, **QUICK
            )
            while contended.metric("num_requests_waiting") < 3 and not asked.done():
                time.sleep(0.01)
            clients[0].close()  # who has the only seat
            status, answer = asked.result(60)
            assert status == 200
        finally:
            for client in clients:
                client.close()
        _, listed = contended.get("/v1/requests", **QUICK)
        assert (
            listed["tenant"] == "quick"
            and 0 < listed["share"]["had"] < 1
            and listed["share"]["due"] <= 1
        )
        timeline = contended.get(f"/v1/requests/{answer['id']}/timeline", **QUICK)[1]
        queue = [one for one in timeline["intervals"] if one["kind"] == "queue"]
        assert sum(one.get("other_tenants_ms", 0) for one in queue) > 0
        explanation = contended.get(f"/v1/requests/{answer['id']}/explain", **QUICK)[1]
        told = json.dumps(explanation) + json.dumps(timeline)
        assert "key1" not in told and "flood" not in told
    assert contended.metric("tenant_requests_refused_total", tenant="key1") == 1
    assert contended.metric("tenant_work_seconds_total", tenant="key1") > 0
    assert contended.metric("tenant_weight", tenant="quick") == 3
    assert "flood" not in contended.get("/metrics")[1]


def test_two_keys_of_a_tenant_share_what_it_has(contended):
    other = bearer("other")
    status, answer = contended.post(PATH, {**PROBE, "prompt": [5]}, **QUICK)
    assert status == 200
    assert contended.get(f"/v1/requests/{answer['id']}/timeline", **other)[0] == 200
    assert contended.get(f"/v1/requests/{answer['id']}/timeline", **FLOOD)[0] == 404


def test_the_start_line_says_the_pace(server, contended, limited):
    for running, words in (
        (server, "chosen by measured steps"),
        (contended, "(--itl-slo-ms off)"),
        (limited, "is less than this machine reaches"),
    ):
        (line,) = [one for one in running.log.read_text().splitlines() if one.startswith("pace ")]
        assert words in line


def test_without_keys_nobody_is_told_of_shares(server):
    assert server.get("/v1/requests")[1].keys() == {"object", "data"}
    assert "tenant" not in server.get("/metrics")[1]
    assert not math.isnan(server.metric("num_requests_running"))
