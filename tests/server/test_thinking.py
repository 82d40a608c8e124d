"""A thinking model over HTTP: thoughts are apart from the answer in text, tokens and time."""

import pytest

from dialects import ANTHROPIC, OLLAMA, OPENAI, PATHS, joined, parts, user, whole
from dialects import ask as ask_in
from raw_client import send
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from twinphase import LLM, SamplingParams

OPENED = CHAT_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
USER = [user("hello")]
BUDGET = 6


@pytest.fixture(scope="module")
def thinker(tmp_path_factory, start):
    assert OPENED != CHAT_TEMPLATE
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("thinker") / "tiny.gguf", context=1024, chat_template=OPENED
    )
    with start("--served-model-name", "thinker", model=path) as server:
        server.path = path
        yield server


@pytest.fixture(scope="module")
def client(thinker):
    with thinker.client() as client:
        yield client


def ask(client, **fields):
    body = {
        "thinking_token_budget": BUDGET,
        "return_token_ids": True,
        "ignore_eos": True,
        **fields.pop("body", {}),
    }
    request = {"model": "thinker", "messages": USER, "max_tokens": 40, "seed": 3, **fields}
    return client.chat.completions.create(**request, extra_body=body)


def test_thinking_within_its_budget_is_apart_from_the_answer(thinker, client):
    reply = ask(client)
    message = reply.choices[0].message
    details = reply.usage.completion_tokens_details
    llm = LLM(thinker.path)
    end = llm.tokenizer.encode("</think>", add_special_tokens=False)
    ids = reply.choices[0].token_ids
    assert ids[BUDGET : BUDGET + len(end)] == end and details.reasoning_tokens == BUDGET + len(end)
    assert llm.tokenizer.decode(ids[:BUDGET]).strip("\n").startswith(message.reasoning_content)
    assert llm.tokenizer.decode(ids[details.reasoning_tokens :]).lstrip("\n") == message.content
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, thinking_token_budget=BUDGET)
    (output,) = llm.chat(USER, params, use_tqdm=False)
    assert output.outputs[0].token_ids == ids
    timings = reply.timings
    _, kept = thinker.get(f"/v1/requests/{reply.id}/timeline")
    times = kept[
        "token_times_ms"
    ]  # several may be the same: a busy server hands over what has come meanwhile
    assert timings["ttft_ms"] == times[0] and timings["ttfo_ms"] == times[details.reasoning_tokens]
    assert thinker.metric("reasoning_tokens_total") == details.reasoning_tokens


@pytest.mark.parametrize("kept", [14, 1])
def test_a_truncated_prompt_opens_the_thinking_if_its_end_does(client, kept):
    reply = ask(client, body={"truncate_prompt_tokens": kept})
    message = reply.choices[0].message
    usage = reply.usage
    assert usage.prompt_tokens == kept and "</think>" not in message.content
    assert bool(message.model_extra.get("reasoning_content")) == (kept > 1)


def test_a_stream_tells_the_same(client):
    reply = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta.model_dump() for chunk in chunks for choice in chunk.choices]
    for field in ("reasoning_content", "content"):
        joined = "".join(delta.get(field) or "" for delta in deltas)
        assert joined == getattr(reply.choices[0].message, field)
    said = [delta for delta in deltas if delta.get("reasoning_content") or delta["content"]]
    assert (
        sorted(said, key=lambda delta: not delta.get("reasoning_content")) == said
    )  # one after the other
    assert chunks[-1].usage.completion_tokens_details == reply.usage.completion_tokens_details
    hidden = ask(client, body={"include_reasoning": False}).choices[0].message
    assert hidden.content == reply.choices[0].message.content and not hasattr(
        hidden, "reasoning_content"
    )


def test_the_answer_and_not_the_thinking_has_the_form_asked_for(client):
    form = {"structured_outputs": {"regex": "[ab]{4}"}, "ignore_eos": False}
    reply = ask(client, body=form)
    assert (
        set(reply.choices[0].message.content) <= {"a", "b"}
        and len(reply.choices[0].message.content) == 4
    )
    assert reply.choices[0].message.reasoning_content


def test_what_was_never_answered_is_all_thinking(client):
    reply = ask(client, max_tokens=4)
    assert reply.choices[0].finish_reason == "length" and reply.choices[0].message.content == ""
    assert (
        reply.usage.completion_tokens_details.reasoning_tokens == reply.usage.completion_tokens == 4
    )
    assert reply.timings["ttfo_ms"] is None


@pytest.mark.parametrize(
    ("dialect", "fields", "openais"),
    [
        (
            ANTHROPIC,
            {"thinking": {"type": "enabled", "budget_tokens": BUDGET}},
            {"thinking_token_budget": BUDGET},
        ),
        (
            ANTHROPIC,
            {"thinking": {"type": "disabled"}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        (OLLAMA, {"think": True}, {}),
    ],
)
def test_other_apis_tell_thoughts_apart_too(thinker, dialect, fields, openais):
    expected = whole(
        OPENAI, thinker.post(PATHS[OPENAI], ask_in(OPENAI, "thinker", max_tokens=40, **openais))[1]
    )
    assert expected.reasoning and (expected.text or "thinking_token_budget" not in openais)
    body = ask_in(dialect, "thinker", max_tokens=40, **fields)
    with send(thinker, PATHS[dialect], {**body, "stream": True}) as stream:
        streamed = whole(dialect, joined(dialect, list(parts(stream))))
    for said in (whole(dialect, thinker.post(PATHS[dialect], body)[1]), streamed):
        assert (said.reasoning, said.text, said.num_output) == (
            expected.reasoning,
            expected.text,
            40,
        )
