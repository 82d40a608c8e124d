"""What OpenAI's client makes of refusals: the exception it has for each, with what was wrong and what to do."""

import signal

import openai
import pytest

from running import PATIENCE

USER = [{"role": "user", "content": "hello"}]
LONG = {"model": "m", "prompt": "a", "max_tokens": 3000, "stream": True, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def narrow(start):
    """Takes one request at a time, lets one more wait, and knows two keys."""
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "1", "--api-key", "one", "--api-key", "two")
    with start("--served-model-name", "m", *flags) as server:
        yield server


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, "`temperature`: Input should be a valid number"),
        ({"max_tokens": 10**6}, "the context holds 4096"),
        ({"n": 99}, "n is 99; 16 answers are allowed"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`: true"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "needs content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "'text'"),
        ({"logit_bias": {"99999": 1}}, "Token id 99999 in logit_bias"),
        ({"tool_choice": "required"}, "`tool_choice` needs `tools`"),
        ({"response_format": {"type": "json_schema"}}, "`json_schema` goes with"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "regex and choice"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex is refused"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "guided_regex and guided_choice both say"),
        ({"extra_body": {"thinking_token_budget": 5}}, "the model does not think"),
        ({"extra_body": {"priority": 5}}, "priority"),
        ({"extra_body": {"chat_template_kwargs": {"template": 1}}}, "chat_template_kwargs has the key 'template'"),
        ({"extra_body": {"nonsense": 5}}, "The field `nonsense` is not supported"),
        ({"stream_options": {"include_usage": True}}, "`stream_options` needs `stream`"),
    ],
)
def test_a_bad_request_says_what_is_wrong(server, fields, part):
    with server.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": server.model, "messages": USER, "max_tokens": 4, **fields})
    assert part in refused.value.body["message"] and refused.value.type == "invalid_request_error"
    assert client.is_closed() and server.is_idle()


def test_an_unknown_model_is_not_found(server):
    with server.client() as client:
        with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here. Use one of: "):
            client.chat.completions.create(model="gpt-4", messages=USER)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4")


@pytest.mark.parametrize("key", ["wrong", "one2", "one two"])
def test_a_wrong_key_is_refused_before_anything_else(narrow, key):
    with narrow.client("none", default_headers={"Authorization": f"Bearer {key}"}) as client:
        with pytest.raises(openai.AuthenticationError, match="The API key is not known") as refused:
            client.chat.completions.create(model="nonsense", messages=[])
        assert refused.value.code == "invalid_api_key"
        assert refused.value.response.headers["www-authenticate"] == "Bearer"
    with narrow.client("two") as client:
        assert [model.id for model in client.models.list()] == ["m"]


def test_overload_is_a_rate_limit_that_says_when_to_come_back(narrow):
    with narrow.client("one") as client, narrow.client("two") as other:
        running = [client.completions.create(**LONG) for _ in range(2)]
        with narrow.paused(), pytest.raises(openai.RateLimitError, match="overloaded: 2 requests") as refused:
            other.completions.create(model="m", prompt="a")
        assert refused.value.code == "overloaded" and int(refused.value.response.headers["retry-after"]) >= 1
        for stream in running:
            stream.close()
        narrow.wait_until_idle()
        assert other.completions.create(model="m", prompt="a", max_tokens=1).usage.completion_tokens == 1
    assert narrow.metric("requests_refused_total", status="429") == 1


def test_a_server_about_to_end_answers_what_runs_and_sends_others_away(start):
    with start("--served-model-name", "m") as server, server.client() as client:
        stream = client.completions.create(**LONG)
        next(iter(stream))
        with server.paused():
            server.process.send_signal(signal.SIGTERM)
            while server.get("/health/ready") != (503, {"status": "draining", "running": 1}):
                assert server.process.poll() is None
            with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
                client.completions.create(model="m", prompt="a")
        assert (refused.value.status_code, refused.value.code) == (503, "unavailable")
        assert refused.value.response.headers["retry-after"]
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        assert server.process.wait(PATIENCE) == 0
