"""What OpenAI's client makes of refusals: the exception it has for each, with what was wrong and what to do."""

from contextlib import ExitStack

import openai
import pytest

from raw_client import ONE, PATH, PROBE, read_reply, send, surviving, tokens, until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.parametrize(
    "fields, param, part",
    [
        ({"temperature": -1}, None, "temperature is -1"),
        ({"temperature": "hot"}, "temperature", "`temperature`: Input should be a valid number."),
        ({"max_tokens": True}, "max_tokens", "`max_tokens`: Input should be a valid integer."),
        ({"max_tokens": 10**6}, None, "the context holds 4096"),
        ({"n": 99}, None, "n is 99; 16 answers are allowed"),
        ({"top_logprobs": 2}, None, "`top_logprobs` needs `logprobs`: true"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages", "needs content"),
        ({"messages": [{"role": "boss"}]}, "messages", "`messages.0.role`: only this is supported: 'system', "),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "'text'"),
        ({"messages": [{"role": "user", "content": [AUDIO]}]}, "messages", "'text'"),
        ({"logit_bias": {"99999": 1}}, None, "Token id 99999 in logit_bias"),
        ({"tool_choice": "required"}, None, "`tool_choice` needs `tools`"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "`json_schema` goes with"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "regex and choice"),
        ({"structured_outputs": {"regex": "("}}, None, "structured_outputs.regex is refused"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, None, "guided_regex and guided_choice both say"),
        ({"thinking_token_budget": 5}, None, "the model does not think"),
        ({"priority": 5}, None, "priority"),
        ({"chat_template_kwargs": {"template": 1}}, None, "chat_template_kwargs has the key 'template'"),
        ({"stream_options": {"include_usage": True}}, None, "`stream_options` needs `stream`"),
        ({"nonsense": 5}, "nonsense", "The field `nonsense` is not supported. Leave it out."),
        ({"body": 1}, "body", "The field `body` is not supported. Leave it out."),
        ({"repeat_penalty": 1}, "repeat_penalty", "Did you mean `repetition_penalty`?"),
        ({"x" * 999: 1}, "x" * 100, f"The field `{'x' * 100}` is not supported. Leave it out."),
        ({f"field {i}": i for i in range(1000)}, None, "fields; 128 are allowed."),
        ({"store": True}, "store", "`store`"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "`reasoning_effort`"),
        ({"service_tier": "flex"}, "service_tier", "`service_tier`"),
        ({"modalities": ["audio"]}, "modalities", "`modalities"),
        ({"prediction": "a"}, "prediction", "`prediction`"),
        ({"prediction": {"type": "file", "content": "a"}}, "prediction", "`prediction"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction", "`prediction"),
        ({"prediction": {"type": "content", "content": "a" * (2 << 20)}}, "prediction", "`prediction"),
        ({"web_search_options": {}}, "web_search_options", "`web_search_options`"),
        ({"verbosity": "low"}, "verbosity", "`verbosity`"),
    ],
)
def test_a_bad_request_says_what_is_wrong(server, fields, param, part):
    status, body = server.post(CHAT, {"messages": USER, "max_tokens": 4, **fields})
    error = body["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert part in error["message"] and server.is_idle()


def test_a_body_that_is_no_object_and_one_of_many_errors_are_refused_in_short(server):
    message = server.post(CHAT, [])[1]["error"]["message"]
    assert message == "The body is not a JSON object. Send one, with `Content-Type: application/json`."
    many = server.post(CHAT, {"messages": USER, **{f"f{i}": 1 for i in range(50)}})[1]["error"]["message"]
    assert many.count("not supported") == 3


def test_openais_client_knows_each_refusal(server):
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="temperature is -1") as refused:
            client.chat.completions.create(model=server.model, messages=USER, temperature=-1)
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here. Use one of: "):
            client.chat.completions.create(model="gpt-4", messages=USER)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4")


@pytest.mark.parametrize("key", ["wrong", "one2", "one two"])
def test_a_wrong_key_is_refused_before_anything_else(limited, key):
    with limited.client("none", default_headers={"Authorization": f"Bearer {key}"}) as client:
        with pytest.raises(openai.AuthenticationError, match="The API key is not known") as refused:
            client.chat.completions.create(model="nonsense", messages=[])
        assert refused.value.code == "invalid_api_key"
        assert refused.value.response.headers["www-authenticate"] == "Bearer"
    with limited.client("two") as client:
        assert [model.id for model in client.models.list()] == ["a", "b"]


def test_overload_is_a_rate_limit_that_says_when_to_come_back_and_what_waits_is_served(limited):
    refused_before = limited.metric("requests_refused_total", status="429")
    with surviving(limited, **ONE), ExitStack() as stack, limited.client("one") as other:
        with limited.paused():  # the refusals wait for no answer
            accepted = [stack.enter_context(send(limited, PATH, {**PROBE, "max_tokens": 50}, **ONE)) for _ in range(3)]
            until(lambda: limited.get("/health")[1]["running"] == 3)
            for stream in (True, False):
                with pytest.raises(openai.RateLimitError, match="overloaded: 3 requests") as refused:
                    other.completions.create(model="a", prompt="a", stream=stream)
                assert (refused.value.code, refused.value.type) == ("overloaded", "rate_limit_error")
                assert int(refused.value.response.headers["retry-after"]) >= 1
        assert [len(tokens(read_reply(client)[2])) for client in accepted] == [50] * 3
    assert limited.metric("requests_refused_total", status="429") == refused_before + 2
