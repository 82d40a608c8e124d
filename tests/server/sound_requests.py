"""Requests that are sound, one of each kind, for tests that put something wrong into them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from dialects import function, turn, user

MODEL = "a"  # the name of the servers that they are sent to
TOOL = function({"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}})
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALL_OF_OLLAMA = {"name": "add", "arguments": {"a": 1}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", 1, None]}}, "required": ["a"]}
CHAT = {
    "model": MODEL,
    "messages": [user("hi")],
    "max_tokens": 9,
    "temperature": 1.5,
    "top_k": 9,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["a"],
    "stop_token_ids": [5],
    "logit_bias": {"7": 5},
    "n": 2,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.1,
    "logprobs": True,
    "top_logprobs": 2,
    "cache_salt": "s",
    "priority": 1,
    "user": "u",
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"a": [1]},
    "return_token_ids": True,
}
REQUESTS = [
    ("/v1/chat/completions", CHAT),
    (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "stop": None},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                turn("system", [{"type": "text", "text": "s", "part": "p"}]),
                user("q") | {"name": "u"},
                {"role": "assistant", "reasoning_content": "r", "tool_calls": [CALL]},
                {"role": "tool", "content": "2", "tool_call_id": "c"},
            ],
            "tools": [TOOL],
            "tool_choice": function({"name": "add"}),
            "max_tokens": 9,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [user("q")],
            "max_tokens": 9,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 5, "echo": True, "min_tokens": 2, "ignore_eos": True},
    ),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 5, "logprobs": 2, "stream": True}),
    *(
        ("/v1/completions", {"prompt": "a", "max_tokens": 5, **form})
        for form in (
            {"guided_regex": "a|b"},
            {"guided_grammar": 'start: "a"'},
            {"guided_json": '{"const": 1}'},
            {"guided_choice": ["a", "b"]},
        )
    ),
    *(
        ("/v1/completions", {"prompt": "a", "max_tokens": 5, "structured_outputs": form})
        for form in (
            {"json": SCHEMA},
            {"regex": "[a-f]{2,4}(x|y)*"},
            {"choice": ["red", "green"]},
            {"json_object": True, "whitespace_pattern": " "},
            {"grammar": 'start: "a" B\nB: /[0-9]+/'},
            {"grammar": 'root ::= "a" [0-9]+'},
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
                }
            },
        )
    ),
    (
        "/v1/completions",
        {
            "prompt": "a",
            "max_tokens": 5,
            "suffix": "b",
            "n": 1,
            "best_of": 2,
            "bad_words": ["a b"],
            "logprobs": 1,
            "allowed_token_ids": [5, 6, 7],
            "return_tokens_as_token_ids": True,
            "include_stop_str_in_output": True,
            "stop": ["a"],
        },
    ),
    (
        "/apply-template",
        {
            "messages": [user("q"), turn("assistant", "a")],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "reasoning_effort": "low",
            "store": True,
        },
    ),
    *(
        (
            "/v1/responses",
            {
                "input": [
                    user([{"type": "input_text", "text": "q"}]),
                    {
                        "type": "reasoning",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "t"}],
                    },
                    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "2"},
                ],
                "instructions": "s",
                "max_output_tokens": 9,
                "stream": stream,
                "include": ["message.output_text.logprobs"],
                "reasoning": {"effort": "low"},
                "metadata": {"a": "b"},
                **more,
            },
        )
        for stream, more in (
            (
                False,
                {
                    "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
                    "tool_choice": "required",
                },
            ),
            (
                True,
                {
                    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
                    "top_logprobs": 2,
                },
            ),
        )
    ),
    (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 9,
            "temperature": 1,
            "top_k": 9,
            "top_p": 0.9,
            "stop_sequences": ["a"],
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "metadata": {"user_id": "u"},
            "messages": [
                user("q"),
                turn(
                    "assistant",
                    [
                        {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                    ],
                ),
                user([{"type": "tool_result", "tool_use_id": "c", "content": "2"}]),
            ],
            "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
    ),
    (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 9,
            "stream": True,
            "messages": [user("q")],
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"model": MODEL, "messages": [user("q")], "system": "s"},
    ),
    (
        "/api/chat",
        {
            "model": MODEL,
            "stream": False,
            "tools": [TOOL],
            "keep_alive": "5m",
            "think": False,
            "logprobs": True,
            "messages": [
                turn("system", "s"),
                user("q"),
                {
                    "role": "assistant",
                    "thinking": "t",
                    "tool_calls": [{"id": "c", "function": CALL_OF_OLLAMA}],
                },
                {"role": "tool", "content": "2", "tool_name": "add"},
            ],
            "options": {
                "num_predict": 9,
                "temperature": 1.5,
                "top_k": 9,
                "top_p": 0.9,
                "min_p": 0.1,
                "seed": 1,
                "stop": ["a"],
                "repeat_penalty": 1.1,
                "num_ctx": 128,
            },
        },
    ),
    (
        "/api/chat",
        {
            "model": MODEL,
            "messages": [user("q")],
            "format": SCHEMA,
            "options": {"num_predict": 9},
        },
    ),
    (
        "/api/generate",
        {
            "model": MODEL,
            "prompt": "q",
            "system": "s",
            "format": "json",
            "options": {"num_predict": 9},
        },
    ),
    (
        "/api/generate",
        {
            "model": MODEL,
            "prompt": "q",
            "raw": True,
            "stream": False,
            "options": {"num_predict": 9},
        },
    ),
    ("/api/embed", {"model": MODEL, "input": ["a", "b"], "truncate": True, "dimensions": 8}),
    ("/api/show", {"model": MODEL, "verbose": True}),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": [user("hello")]}),
    ("/detokenize", {"tokens": [5, 6, 200]}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all that is in a JSON value."""
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def inside(body: Any, path: Sequence[Any]) -> Any:
    """What is at a place of a JSON value."""
    for key in path:
        body = body[key]
    return body


def with_texts(texts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The requests with the first and one other of those texts as each text, and one as each key.

    The others take turns.
    """
    turns = itertools.cycle(texts)
    for route, body in REQUESTS:
        for *holder, key in filter(None, places(body)):
            if isinstance(inside(body, [*holder, key]), str):
                for text in (texts[0], next(turns)):
                    changed = copy.deepcopy(body)
                    inside(changed, holder)[key] = text
                    yield route, changed
            if isinstance(key, str):
                changed = copy.deepcopy(body)
                renamed = inside(changed, holder)
                renamed[next(turns)] = renamed.pop(key)
                yield route, changed
