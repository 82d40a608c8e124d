from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.server.answers import Delta
from twinphase.server.dialects.anthropic import MessageReplies
from twinphase.server.dialects.responses import ResponseReplies
from twinphase.server.dialects.responses_types import ResponsesRequest
from twinphase.server.jobs import Reader
from twinphase.server.tool_calls import ToolCallDelta, ToolCallParser, join_deltas
from twinphase.server.tools import HERMES, LLAMA3_JSON, MISTRAL, ToolFormat

FORMATS = st.sampled_from([HERMES, LLAMA3_JSON, MISTRAL])
# Sound and broken calls arise from these, and texts that only look like the beginning of one.
BITS = st.sampled_from(
    [
        '{"name": "f", "arguments": ',
        '{"arguments": {}, "name": "g"}',
        '{"name": "h"}',
        '{"a": "}"}',
        '{"x\\": [1]}',
    ]
    + [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "<tool",
        "\n",
        " ",
        "; ",
        "]",
        "}",
        '"',
        "hi",
    ]
)
CALL = '{"name": "f", "arguments": {"a": "}\\"<"}}'


def read(format: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str, str]]]:
    parser = ToolCallParser(format, map("id{}".format, count()).__next__)
    parts = [*(parser.feed(piece) for piece in pieces), parser.flush()]
    calls = join_deltas(delta for _, deltas in parts for delta in deltas)
    return "".join(content for content, _ in parts), [
        (call.id, call.name, call.arguments) for call in calls
    ]


@given(FORMATS, st.lists(BITS, max_size=10), st.data())
def test_pieces_do_not_matter(format, bits, data):
    text = "".join(bits)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(format, pieces) == read(format, [text]) == read(format, list(text))


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", ["f"]),
        (
            HERMES,
            f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n",
            "I look.",
            ["f", "f"],
        ),
        (
            HERMES,
            f"<tool_call>\n{CALL}}}\n<tool_call>\n{CALL[:-1]}\n</tool_call> So.",
            "So.",
            ["f", "f"],
        ),
        (HERMES, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", ["f", "f"]),
        (HERMES, f'<tool_call>{CALL[:-1]}, "id": "1"}}</tool_call>', "", ["f"]),
        (LLAMA3_JSON, CALL.replace("arguments", "parameters") + "; " + CALL, "", ["f", "f"]),
        (LLAMA3_JSON, f" <|python_tag|>{CALL}", "", ["f"]),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", ["f", "f"]),
        (MISTRAL, f"So.[TOOL_CALLS][{CALL}]", "So.", ["f"]),
    ],
)
def test_calls_are_found(format, text, content, calls):
    assert read(format, [text]) == (
        content,
        [(f"id{i}", name, '{"a": "}\\"<"}') for i, name in enumerate(calls)],
    )


@pytest.mark.parametrize(
    "format", [HERMES, LLAMA3_JSON, MISTRAL], ids=["hermes", "llama3", "mistral"]
)
@pytest.mark.parametrize(
    "text",
    [
        " hi <tool\n",
        '{"city": "[1]"} is it',
        "[1, 2]",
        "",
        " \n",
        '{"name": 1}',
        '{"name": "f", "arguments": "x"}',
    ]
    + [
        "<tool_call>hi",
        "<tool_call>\n</tool_call>",
        '<tool_call>\n{"name": "f", "arg',
        "[TOOL_CALLS]f{}",
        "{" * 3000,
    ],
)
def test_what_is_no_call_stays_content_to_the_letter(format, text):
    assert read(format, [text]) == (text, [])


def test_keys_in_another_order_and_missing_arguments():
    content, calls = read(
        LLAMA3_JSON,
        ['{"type": "function", "parameters": {"a": ["é"]}, "name": "f"}; {"name": "g"}'],
    )
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        ("f", {"a": ["é"]}),
        ("g", {}),
    ]
    assert content == ""


def test_arguments_stream_as_they_come_and_end_where_the_answer_does():
    parser = ToolCallParser(HERMES, lambda: "id")
    fed = [
        parser.feed(piece)
        for piece in ("Hm ", '<tool_call>{"name": "f", "arguments": ', "{", '"a": ', '"b')
    ]
    assert fed[0] == ("Hm", [])
    assert fed[1] == ("", [])
    assert fed[2] == ("", [ToolCallDelta(0, "id", "f", "{")])
    assert fed[3:] == [("", [ToolCallDelta(0, None, None, part)]) for part in ('"a": ', '"b')]
    assert parser.flush() == ("", [])


def test_ids_are_such_as_the_models_templates_take():
    ids = []
    for format in (HERMES, MISTRAL):
        _, deltas = ToolCallParser(format).feed(format.begin + CALL + CALL)
        ids += [delta.id or "" for delta in deltas]
    assert len(set(ids)) == 4
    assert [len(each) for each in ids] == [29, 29, 9, 9] and ids[0].startswith("call_")


def test_a_next_call_that_was_cut_off_leaves_nothing_behind():
    whole = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
    for rest in ("<tool", "<tool_call>", "<tool_call>\n", '<tool_call>\n{"name": "b'):
        parser = ToolCallParser(HERMES)
        first = parser.feed(whole + rest)
        last = parser.flush()
        assert (first[0] + last[0]).strip() == "" and [
            call.name for call in join_deltas(first[1] + last[1])
        ] == ["a"]


def test_text_behind_a_call_comes_behind_its_end_in_every_stream():
    parser = ToolCallParser(LLAMA3_JSON, lambda: "id")
    fed = [parser.feed(piece) for piece in ('{"name": "f", "parameters": {"a"', ": 1}} Sure, done")]
    assert all(fed[1]), "both in one update"
    params = SimpleNamespace(temperature=0, top_p=1)
    reader = Reader()
    job = SimpleNamespace(
        id="x",
        created=0,
        model="m",
        fingerprint="fp",
        params=params,
        prompts=[SimpleNamespace(token_ids=[1])],
        reader=reader,
        body=SimpleNamespace(return_progress=False),
    )
    tokenizer = SimpleNamespace(strips_leading_space=False)
    stream = SimpleNamespace(transcript=SimpleNamespace(tokenizer=tokenizer))
    record = SimpleNamespace(counts=SimpleNamespace(num_cached_tokens=0))
    choice = SimpleNamespace(
        stream=stream, record=record, prompt=job.prompts[0], token_ids=[], logprobs=[], labels=[]
    )
    service = SimpleNamespace(facts=None)
    body = ResponsesRequest.model_validate({"input": "a"})
    for replies in (
        ResponseReplies(body, "", None, [], job, [choice], service),
        MessageReplies(job, [choice], service),
    ):
        chunks = b"".join(
            replies.chunk(Delta(choice, content, "", deltas)) for content, deltas in fed
        )
        told = [
            json.loads(line[6:])
            for line in chunks.decode().splitlines()
            if line.startswith("data: ")
        ]
        kinds = [
            (one.get("item") or one["content_block"])["type"]
            for one in told
            if one["type"] in ("response.output_item.added", "content_block_start")
        ]
        assert kinds in (["function_call", "message"], ["tool_use", "text"])
        pieces = [one["delta"] for one in told if one["type"].endswith("delta")]
        pieces = [
            piece if isinstance(piece, str) else piece.get("partial_json", piece.get("text"))
            for piece in pieces
        ]
        assert pieces == ['{"a"', ": 1}", "Sure, done"]
