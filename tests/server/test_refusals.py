"""Requests that text routes refuse: each row has a body's fields and the expected message."""

import re

import pytest

from dialects import (
    ANTHROPIC,
    OLLAMA,
    OPENAI,
    PATHS,
    dialect_of,
    form,
    message,
    turn,
    user,
)

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
GENERATE = "/api/generate"
TALK = {"messages": [user("hello")]}
BODIES = {
    PATHS[OPENAI]: TALK | {"max_tokens": 4},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
    PATHS[ANTHROPIC]: TALK | {"max_tokens": 2},
    PATHS[OLLAMA]: TALK,
    "/tokenize": {},
    "/detokenize": {"tokens": [5]},
    GENERATE: {"prompt": "a"},
}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PARSED = {"type": "output_text", "text": "a", "parsed": 1}  # by a client, not by the server
LONG_PREDICTION = {"type": "content", "content": "a" * (2 << 20)}
REFUSED = {
    PATHS[OPENAI]: [
        ({"model": "gpt-4"}, "'gpt-4' is not served here. Use one of: "),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, "`temperature`: Input should be a valid number."),
        ({"max_tokens": True}, "`max_tokens`: Input should be a valid integer."),
        ({"max_tokens": 10**6}, "the context holds 4096"),
        ({"n": 99}, "n is 99; 16 answers are allowed"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`: true"),
        ({"messages": []}, "`messages`: List should have at least 1 item"),
        ({"messages": [{"role": "user"}]}, "needs content"),
        ({"messages": [{"role": "boss"}]}, "`messages.0.role`: only this is supported: 'system', "),
        ({"messages": [user([IMAGE_URL])]}, "'text'"),
        ({"messages": [user([AUDIO])]}, "'text'"),
        ({"logit_bias": {"99999": 1}}, "Token id 99999 in logit_bias"),
        ({"tool_choice": "required"}, "`tool_choice` needs `tools`"),
        ({"response_format": {"type": "json_schema"}}, "`json_schema` goes with"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex is refused"),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_regex and guided_choice both say",
        ),
        ({"thinking_token_budget": 5}, "the model does not think"),
        ({"priority": 5}, "priority"),
        (
            {"chat_template_kwargs": {"template": 1}},
            "chat_template_kwargs has the key 'template'",
        ),
        ({"stream_options": {"include_usage": True}}, "`stream_options` needs `stream`"),
        ({"nonsense": 5}, "The field `nonsense` is not supported. Leave it out."),
        ({"body": 1}, "The field `body` is not supported. Leave it out."),
        ({"repeat_penalty": 1}, "Did you mean `repetition_penalty`?"),
        ({"x" * 999: 1}, f"The field `{'x' * 100}` is not supported. Leave it out."),
        ({f"field {i}": i for i in range(1000)}, "fields; 128 are allowed."),
        ({"store": "yes"}, "`store`"),
        ({"reasoning_effort": 3}, "`reasoning_effort`"),
        ({"service_tier": "best"}, "`service_tier`"),
        ({"stop": ""}, "`stop`: String should have at least 1 character."),
        ({"stop": ["a", 1]}, "`stop.1`: Input should be a valid string."),
        ({"modalities": ["audio"]}, "`modalities"),
        ({"prediction": "a"}, "`prediction`"),
        ({"prediction": {"type": "file", "content": "a"}}, "`prediction"),
        ({"prediction": {"type": "content", "content": 5}}, "`prediction"),
        ({"prediction": LONG_PREDICTION}, "`prediction"),
        ({"web_search_options": {}}, "`web_search_options`"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "does not go with"),
    ],
    COMPLETIONS: [
        ({"prompt": [5, 6], "suffix": "a"}, "`suffix` is given with a prompt of token ids"),
        ({"suffix": "a", "echo": True}, "`suffix` does not go with `echo`"),
        ({"suffix": "a", "truncate_prompt_tokens": 1}, "not go with `truncate_prompt_tokens`"),
        ({"bad_words": ["\n"]}, "white space"),
        ({"prompt": "a" * 100_000, "suffix": "a"}, "characters"),
        ({"bad_words": ["a"], "allowed_token_ids": [100], "temperature": 0}, "leave none"),
        (
            {"prompt": "hello the world", "truncate_prompt_tokens": 2, "max_tokens": 4095},
            "the context",
        ),
        ({"max_tokens": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 17}, "best_of"),
    ],
    RESPONSES: [
        ({"input": []}, "`input`: List should have at least 1 item"),
        ({"input": [user([{"type": "input_image", "image_url": "x"}])]}, "send text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "`input.0`"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "encrypted_content` is not supported",
        ),
        ({"tools": [{"type": "web_search"}]}, "`tools.0.type`: only this is supported: 'function'"),
        ({"background": True}, "`background`"),
        ({"truncation": "auto"}, "`truncation`"),
        ({"conversation": "x"}, "`conversation` is not supported"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "`text.format`: the type json_schema needs `schema`.",
        ),
        (
            {"input": [turn("assistant", [PARSED])]},
            "The field `input.0.content.0.parsed` is not supported. Leave it out.",
        ),
        ({"input": [{"role": "user"}]}, "`input.0.content`: Field required."),
        ({"input": [{"type": "function_call"}]}, "`input.0.call_id`: Field required."),
        ({"max_tokens": 5}, "Did you mean `max_output_tokens`?"),
        ({"messages": []}, "Did you mean `input`?"),
        ({"response_format": {}}, "Did you mean `text.format`?"),
        ({"reasoning_effort": "low"}, "Did you mean `reasoning.effort`?"),
        ({"max_output_tokens": 10**6}, "the context holds"),
        ({"metadata": {"a" * 65: "b"}}, "at most 64 characters"),
        ({"metadata": {"a": "b" * 513}}, "at most 512 characters"),
        ({"user": "a" * 513}, "`user`"),
        ({"nonsense": 1}, "`nonsense` is not supported"),
    ],
    PATHS[ANTHROPIC]: [
        ({"model": "gpt"}, "'gpt' is not served here"),
        ({"max_tokens": None}, "`max_tokens`"),
        ({"messages": []}, "`messages`: List should have at least 1 item"),
        ({"messages": [user([IMAGE])]}, "of the type image is not read here"),
        ({"messages": [user([{"type": "king"}])]}, "`messages.0.content.0`"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "`tools.0.type`: only this",
        ),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` needs `tools`"),
        ({"tool_choice": {"type": "tool"}}, "`tool_choice`: the type tool needs `name`."),
        ({"temperature": 1000}, "temperature is 1000"),
        ({"top_logprobs": 2}, "The field `top_logprobs` is not supported. Leave it out."),
        (form(ANTHROPIC, {"type": "king"}), "king"),
    ],
    PATHS[OLLAMA]: [
        ({"model": "gpt"}, "'gpt' is not served here"),
        ({"options": {"mirostat": 1}}, "`options.mirostat`"),
        (
            {"options": {"repeat_penalty": -1}},
            "`options.repeat_penalty`: Input should be greater",
        ),
        (
            {"options": {"typical": 1}},
            "The field `options.typical` is not supported. Leave it out.",
        ),
        ({"messages": [user("a") | {"images": ["aGk="]}]}, "`messages.0.images`"),
        ({"format": "xml"}, "`format"),
        ({"format": {"type": "king"}}, "king"),
        ({"think": True}, "does not support thinking"),
        ({"tools": [{"type": "king"}]}, "`tools.0.type`"),
    ],
    "/tokenize": [({"prompt": "A" * 1_000_000}, "4096")],
    "/detokenize": [
        ({"tokens": [5, 320]}, "Token id 320"),
        ({"prompt": "of /tokenize"}, "The field `prompt` is not supported. Leave it out."),
    ],
    GENERATE: [
        ({"context": [1, 2]}, "`context`"),
        ({"template": "{{ .Prompt }}"}, "`template`"),
        ({"images": ["a"]}, "`images`"),
        ({"raw": True, "system": "b"}, "`raw`"),
    ],
}
# Of OpenAI's errors, `param` is the field that the message begins with.
FIRST_FIELD = re.compile(r"(?:The field )?`([^`.]+)[^`]*`(?:: \D| is not supported)")


@pytest.mark.parametrize(
    ("path", "fields", "part"),
    [(path, fields, part) for path, rows in REFUSED.items() for fields, part in rows],
)
def test_a_refusal_names_what_is_wrong_in_its_apis_shape(server, path, fields, part):
    status, body = server.post(path, {"model": server.model, **BODIES[path], **fields})
    text = message(dialect_of(path), body)
    assert status == (404 if "model" in fields else 400) and part in text, text
    if dialect_of(path) == OPENAI and status == 400:
        named = FIRST_FIELD.match(text)
        param = named and named[1]
        assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", param)
    assert server.is_idle()


def test_a_body_that_is_no_object_and_one_of_many_errors_are_refused_in_short(server):
    assert message(OPENAI, server.post(PATHS[OPENAI], [])[1]) == (
        "The body is not a JSON object. Send one, with `Content-Type: application/json`."
    )
    many = TALK | {f"f{i}": 1 for i in range(50)}
    assert message(OPENAI, server.post(PATHS[OPENAI], many)[1]).count("not supported") == 3


def test_no_model_is_pulled(server):
    status, body = server.post("/api/pull", {"model": server.model})
    assert status == 404 and "chosen when the server is started" in message(OLLAMA, body)
