"""Workloads from published files."""

import itertools
import json
from pathlib import Path

import pytest

from twinphase.errors import InvalidRequestError
from twinphase.workload.traces import Scaling, read_trace
from twinphase_bench.load.traces import trace_workload
from twinphase_bench.load.workload import Sizing

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1200, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 3]},
    {"timestamp": 4000, "input_length": 600, "output_length": 40, "hash_ids": [9, 10]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46,5,1
"""
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "what is a prefix"},
            {"from": "gpt", "value": "a start"},
        ],
    },
    {"id": "b", "conversations": [{"from": "human", "value": "only one turn"}]},
    {
        "id": "c",
        "conversations": [
            {"from": "human", "value": "x " * 40},
            {"from": "gpt", "value": "y " * 30},
        ],
    },
]


def write(tmp_path: Path, kind: str, text: str | None = None) -> Path:
    if kind == "mooncake":
        text = text or "\n".join(map(json.dumps, MOONCAKE)) + "\n"
    text = text or (AZURE if kind == "azure" else json.dumps(SHAREGPT))
    path = tmp_path / f"trace.{'csv' if kind == 'azure' else 'json'}"
    path.write_text(text)
    return path


def shared(a: str, b: str) -> int:
    return len(
        list(
            itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(a.split(), b.split(), strict=False)
            )
        )
    )


def test_mooncake_prefixes_are_shared_by_their_ids(tmp_path):
    workload = trace_workload(write(tmp_path, "mooncake"), Sizing(tokens_per_word=2.0))
    first, second, third = workload.requests
    assert [r.timestamp for r in workload.requests] == [0.0, 0.5, 3.0]
    assert [len(r.prompt.text.split()) for r in workload.requests] == [600, 550, 300]
    assert 512 <= shared(first.prompt.text, second.prompt.text) <= 514, (
        "two blocks of 512 tokens are 512 words"
    )
    assert shared(first.prompt.text, third.prompt.text) <= 2
    assert "share prefixes" in workload.notes[0]


def test_mooncake_as_ids(tmp_path):
    workload = trace_workload(
        write(tmp_path, "mooncake"), Sizing(vocab_size=5000), Scaling(lengths=0.25)
    )
    first, second, _ = (r.prompt.token_ids for r in workload.requests)
    assert (
        (len(first), len(second)) == (300, 275)
        and first[:256] == second[:256]
        and first[256:] != second[256:275]
    )
    assert "blocks of 128 tokens" in workload.notes[0]


def test_scaling_is_applied_and_told(tmp_path):
    scaling = Scaling(lengths=0.1, time=2.0, num_prompts=2)
    workload = trace_workload(write(tmp_path, "mooncake"), Sizing(), scaling)
    assert [(r.prompt.num_tokens, r.max_tokens, r.timestamp) for r in workload.requests] == [
        (120, 2, 0.0),
        (110, 3, 1.0),
    ]
    assert "x 0.1" in workload.description and workload.conditions["--time-scale"] == "2"
    for bad in ({"lengths": 0}, {"time": -1}, {"num_prompts": 0}, {"lengths": float("nan")}):
        with pytest.raises(InvalidRequestError):
            Scaling(**bad)


def test_azure(tmp_path):
    kind, lines = read_trace(write(tmp_path, "azure"))
    assert kind == "azure" and [line.num_prompt_tokens for line in lines] == [374, 396, 5]
    assert lines[1].timestamp == pytest.approx(4.314579) and lines[2].timestamp == pytest.approx(
        59.31941
    )
    zone = (
        AZURE.splitlines()[0]
        + "\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,7,8\n"
    )
    assert read_trace(write(tmp_path, "azure", zone))[1][1].timestamp == pytest.approx(0.99007)


def test_sharegpt(tmp_path):
    workload = trace_workload(write(tmp_path, "sharegpt"), Sizing(tokens_per_word=1.5, overhead=4))
    assert [r.prompt.text for r in workload.requests] == ["what is a prefix", "x " * 40]
    assert [(r.prompt.num_tokens, r.max_tokens) for r in workload.requests] == [(10, 3), (64, 45)]
    half = trace_workload(write(tmp_path, "sharegpt"), Sizing(), Scaling(lengths=0.5))
    assert (
        half.requests[0].prompt.text == "what is"
        and "estimate" in half.notes[0]
        and "0.5" in half.notes[1]
    )


def test_questions_for_a_model_in_this_process(tmp_path):
    """With a tokenizer the questions are kept; without one only their lengths are, as reported."""
    path = write(tmp_path, "sharegpt")
    letters = Sizing(vocab_size=300, encode=lambda text: [ord(letter) for letter in text])
    first = trace_workload(path, letters).requests[0]
    assert bytes(first.prompt.token_ids) == b"what is a prefix" and first.prompt.num_tokens == 16
    assert first.max_tokens == len("a start")
    half = trace_workload(path, letters, Scaling(lengths=0.5))
    assert (
        bytes(half.requests[0].prompt.token_ids) == b"what is "
        and "cut to 0.5 of their tokens" in half.notes[1]
    )
    blind = trace_workload(path, Sizing(vocab_size=300))
    assert len(blind.requests[0].prompt.token_ids) == 4
    assert "words count as tokens" in blind.notes[0] and "random token ids" in blind.notes[0]


@pytest.mark.parametrize("kind", ["mooncake", "azure"])
def test_lines_out_of_order_are_sorted_and_told(tmp_path, kind):
    if kind == "mooncake":
        text = "\n".join(
            json.dumps({**MOONCAKE[0], "timestamp": t, "output_length": t})
            for t in (2000, 500, 1500)
        )
    else:
        head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        text = head + "".join(
            f"2023-11-16 18:15:{t / 1000:06.3f},9,{t}\n" for t in (2000, 500, 1500)
        )
    workload = trace_workload(write(tmp_path, kind, text), Sizing())
    assert [(r.timestamp, r.max_tokens) for r in workload.requests] == [
        (0.0, 500),
        (1.0, 1500),
        (1.5, 2000),
    ]
    assert "3 lines of the file are out of the order" in workload.notes[0]
    assert not any(
        "order" in note for note in trace_workload(write(tmp_path, kind), Sizing()).notes
    )


GOOD = json.dumps(MOONCAKE[0])


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("mooncake", f"{GOOD}\n{{broken\n", "line 2: JSON is malformed"),
        ("mooncake", f"{GOOD}\n\n[1]\n", "line 3: Expected `object`"),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": 3}\n',
            "line 1: Object missing required field `output_length`",
        ),
        (
            "mooncake",
            GOOD.replace("1200", "-1"),
            "line 1: Expected `int` >= 0 - at `$.input_length`",
        ),
        (
            "mooncake",
            GOOD.replace("1200", "true"),
            "line 1: Expected `int`, got `bool` - at `$.input_length`",
        ),
        (
            "mooncake",
            GOOD.replace("1000", '"now"'),
            "line 1: Expected `float`, got `str` - at `$.timestamp`",
        ),
        (
            "mooncake",
            GOOD.replace("[0, 1, 2]", '"0"'),
            "line 1: Expected `array`, got `str` - at `$.hash_ids`",
        ),
        ("azure", "TIMESTAMP,Context\n", "line 1: the columns"),
        ("azure", AZURE + "yesterday,1,2\n", "line 5"),
        ("azure", AZURE + "2023-11-16 18:17:46,one,2\n", "line 5"),
        ("azure", AZURE + "2023-11-16 18:17:46\n", "line 5"),
        (
            "azure",
            AZURE + "2023-11-16 18:17:46,5,-2\n",
            "line 5: Expected `int` >= 0 - at `$.GeneratedTokens`",
        ),
        ("sharegpt", "[1]", "entry 1: Expected `object`"),
        ("sharegpt", '[{"id": "a"}]', "entry 1: it has no list 'conversations'"),
        (
            "sharegpt",
            '[{"conversations": [{"from": "human"}, {"value": "x"}]}]',
            "entry 1: Object missing",
        ),
        ("sharegpt", "[", "a list of conversations: Input data was truncated"),
        ("sharegpt", "[]", "no request"),
        ("mooncake", "hello", "does not begin like a trace. Give a Mooncake file"),
    ],
)
def test_bad_lines_are_told_with_their_number(tmp_path, kind, text, told):
    with pytest.raises(InvalidRequestError) as error:
        read_trace(write(tmp_path, kind, text))
    assert told in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidRequestError, match="Cannot read"):
        read_trace(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"{\xff\xfe")
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        read_trace(tmp_path / "bytes")
