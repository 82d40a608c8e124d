"""Whatever is sent: an answer or OpenAI's error, in time, and a server that is as well as before.

FUZZ_EXAMPLES=5000 looks longer and elsewhere than the same few of every run.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dialects import OPENAI, bearer, dialect_of, message
from sound_requests import MODEL, REQUESTS, inside, places

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 0))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + EXAMPLES)]
KEY = bearer("secret")
LIMITS = ("--max-model-len", "128", "--max-num-seqs", "8", "--num-kv-blocks", "32")
# Of values that are within these, many get past the first checks.
RANGES = {
    "temperature": (0, 100),
    "top_p": (0.01, 1),
    "min_p": (0, 1),
    "top_k": (-1, 400),
    "repetition_penalty": (0.1, 9),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "n": (1, 4),
    "max_tokens": (1, 40),
    "max_completion_tokens": (1, 40),
    "min_tokens": (0, 1),
    "thinking_token_budget": (0, 9),
    "num_speculative_tokens": (0, 64),
}


@pytest.fixture(scope="module")
def fuzzed(start):
    flags = (
        "--api-key",
        "secret",
        "--served-model-name",
        MODEL,
        "--scheduling-policy",
        "priority",
    )
    with start(*LIMITS, *flags) as server:
        yield server
        server.wait_until_idle()
        assert server.get("/health/live")[0] == server.get("/health/ready")[0] == 200
        assert server.metric("engine_restarts_total") == 0
        assert server.metric("request_success_total", finished_reason="error") == 0
        assert "Traceback" not in server.log.read_text()


def each_body_once(document):
    """The document without the routes whose body an earlier route takes too."""
    seen = set()
    for path, operations in list(document["paths"].items()):
        body = json.dumps(operations.get("post", {}).get("requestBody", path))
        if body in seen:
            del document["paths"][path]
        seen.add(body)
    return document


def narrowed(document, ranges, request_id):
    """The document with names of what there is, and with ranges, without the endless stream."""
    del document["paths"]["/v1/engine/events"]
    for name, schema in document["components"]["schemas"].items():
        properties = schema.get("properties", {})
        if name.endswith("Request") and "model" in properties:
            properties["model"] = {
                "enum": [MODEL] if "model" in schema.get("required", ()) else [MODEL, None]
            }
        for field in ranges.keys() & properties.keys():
            low, high = ranges[field]
            for form in properties[field].get("anyOf", [properties[field]]):
                if form["type"] != "null":
                    form.pop("exclusiveMaximum", None)
                    form.update(minimum=low, maximum=high)
    for operations in document["paths"].values():
        for parameter in operations.get("get", {}).get("parameters", []):
            parameter["schema"]["enum"] = [MODEL if parameter["name"] == "model" else request_id]
    return document


# What can be said of a value alone is in the document; that several go together is not. Values at
# the ends of what a field takes, `coverage`, are those of the document as it is; they are thousands
# of requests, so each body is covered at one of its routes, and the others are fuzzed.
@pytest.mark.parametrize(
    "ranges, phases, unchecked",
    [
        ({}, "examples,coverage,fuzzing", "positive_data_acceptance"),
        (RANGES, "examples,fuzzing", "positive_data_acceptance,negative_data_rejection"),
    ],
)
def test_answers_are_as_the_openapi_document_says(fuzzed, tmp_path, ranges, phases, unchecked):
    _, answer = fuzzed.post("/v1/completions", {"prompt": "a"}, **KEY)
    document = narrowed(fuzzed.get("/openapi.json")[1], ranges, answer["id"])
    if "coverage" in phases:
        document = each_body_once(document)
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    command = [
        Path(sys.executable).with_name("schemathesis"),
        "run",
        "openapi.json",
        "--url",
        fuzzed.url,
        "--no-color",
        "-H",
        f"Authorization: {KEY['Authorization']}",
        "--phases",
        phases,
        "--max-examples",
        str(EXAMPLES or 4),
        *(() if EXAMPLES else ("--seed", "0")),
        "--request-timeout",
        "90",
        "--generation-database",
        "none",
        "--exclude-checks",
        unchecked,
    ]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=580 + EXAMPLES
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr


def nested(depth, kind):
    value = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"properties": value}
    return value


SCALARS = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        2**31 - 1,
        2**31,
        2**63,
        2**64,
        -(2**63),
        10**400,
        1.5,
        -0.0,
        1e308,
        5e-324,
        float("nan"),
        float("inf"),
        "",
        "\x00",
        "\ud800",
        "\udfff\ud800",
        "a",
        "1",
        "\u202e<|im_end|>\n",
        "(",
        "(a+)+$",
        "{",
        "start: start",
        "start: /(a|b)*{1000}/",
        "root ::= root",
        "A" * 2000,
        "\U0001f600" * 300,
    ]
)
VALUES = st.one_of(
    SCALARS,
    st.text(max_size=20),
    st.builds(nested, st.sampled_from([1, 40, 900]), st.sampled_from(["list", "dict"])),
    st.lists(SCALARS, max_size=3),
    st.sampled_from([50, 5000]).map(lambda count: ["a"] * count),
    st.dictionaries(
        st.sampled_from(["type", "$ref", "$defs", "properties", "json", "max_tokens", "a\x00"]),
        SCALARS,
    ),
    st.builds(lambda: {"$ref": "#"}),
)


NAMES = st.sampled_from(
    ["stop", "guided_regex", "thinking_token_budget", "tools", "response_format", "\x00"]
)


@st.composite
def mutated(draw):
    """A path and a body: a sound request with a few things wrong."""
    path, body = copy.deepcopy(draw(st.sampled_from(REQUESTS)))
    chosen = draw(st.lists(st.sampled_from(places(body)), min_size=1, max_size=3, unique=True))
    for place in sorted(chosen, reverse=True):  # what is inside before what it is in
        holder = inside(body, place[:-1])
        if not place:
            body[draw(NAMES)] = draw(VALUES)
        elif draw(st.integers(0, 3)) == 0:
            del holder[place[-1]]
        else:
            holder[place[-1]] = draw(VALUES)
    data = bytearray(json.dumps(body).encode())
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return path, bytes(data)


@settings(
    max_examples=10 * EXAMPLES or 80,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(mutated())
def test_a_request_gone_wrong_is_answered_in_its_apis_shape(fuzzed, request_):
    path, data = request_
    status, body = fuzzed.post(path, data, **KEY)
    if status == 200:
        ends = ("data: [DONE]\n\n", '"message_stop"}\n\n', "}\n")
        assert not isinstance(body, str) or body.endswith(ends) and '"error"' not in body
        return
    assert 400 <= status < 500 and message(dialect_of(path), body)
    if dialect_of(path) == OPENAI:
        error = body["error"]
        assert error["type"] in ("invalid_request_error", "not_found_error")
        assert isinstance(error["param"], str | None) and isinstance(error["code"], str | None)
