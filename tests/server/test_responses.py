"""OpenAI's Responses API, by its official client: items, events, and kept responses."""

import asyncio
import contextlib
import itertools
import json
from types import SimpleNamespace
from typing import Literal

import httpx
import openai
import pytest
from fastapi import APIRouter
from pydantic import BaseModel
from pydantic_core import from_json

from dialects import bearer, function, text_part, turn, user
from raw_client import events, send
from twinphase.engine.frontends.text import EncodedPrompt
from twinphase.errors import InvalidRequestError, RequestNotFoundError
from twinphase.request import SamplingParams
from twinphase.server.dialects import responses
from twinphase.server.dialects.kept_responses import Kept, Responses
from twinphase.server.dialects.responses import ResponseCancelledError
from twinphase.server.dialects.responses_types import ResponsesRequest
from twinphase.server.jobs import Job
from twinphase.server.problems import headers
from twinphase.server.tool_calls import call_of

CHAT = "/v1/chat/completions"
PATH = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
PICK = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}


class Pick(BaseModel):
    a: Literal["b", "c"]


def chat(server, messages, **fields):
    """The chat answer to these messages, and its tokens."""
    asked = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields, "messages": messages}
    status, body = server.post(CHAT, asked)
    assert status == 200, body
    return body["choices"][0], body["usage"]


def output(response):
    """A response without its ids and times."""
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in json.loads(response.model_dump_json())["output"]
    ]


def streamed(client, **fields):
    """The response at a stream's end, after checking that the events have the same content."""
    seen = []
    text = {}
    arguments = {}
    done = []
    for event in client.responses.create(**fields, stream=True):
        seen.append(event.type)
        assert event.sequence_number == len(seen) - 1
        if event.type.endswith(("text.delta", "arguments.delta")):
            into = arguments if "arguments" in event.type else text
            into[event.output_index] = into.get(event.output_index, "") + event.delta
        elif event.type.endswith("text.done"):
            assert text.get(event.output_index, "") == event.text
        elif event.type.endswith("arguments.done"):
            assert arguments[event.output_index] == event.arguments
        elif event.type == "response.output_item.done":
            assert event.output_index == len(done)
            done.append(event.item)
    assert seen[:2] == ["response.created", "response.in_progress"] and seen.count(
        "response.output_item.added"
    ) == len(done)
    assert event.response.output == done
    return event.response


def both(client, **fields):
    """The complete response, after checking that the streamed one is equal."""
    whole = client.responses.create(**fields)
    stream = streamed(client, **fields)
    assert output(whole) == output(stream) and whole.status == stream.status
    assert whole.usage.output_tokens == stream.usage.output_tokens
    return whole


def test_answers_are_those_of_chats(server, client):
    hello = user("hello")
    model = server.model
    said = both(client, model=model, input="hello", **GREEDY)
    expected, usage = chat(server, [hello])
    assert said.output_text == expected["message"]["content"] and said.id.startswith("resp_")
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert said.usage.input_tokens == usage["prompt_tokens"] and said.usage.output_tokens == 12
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    said = both(
        client,
        model=model,
        instructions="Be brief.",
        input=[user(parts)],
        **GREEDY,
    )
    texts = [text_part("one"), text_part("two")]
    expected, _ = chat(server, [turn("system", "Be brief."), user(texts)])
    assert said.output_text == expected["message"]["content"]
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    said = both(client, model=model, input="hello", **GREEDY, **more)
    expected, _ = chat(server, [hello], logprobs=True, top_logprobs=2)
    found = said.output[0].content[0].logprobs
    assert [one.logprob for one in found] == [
        one["logprob"] for one in expected["logprobs"]["content"]
    ]
    assert len(found) == 12 and all(len(one.top_logprobs) == 2 for one in found)
    stop = said.output_text[4:6]
    said = both(client, model=model, input="hello", **GREEDY | {"extra_body": {"stop": stop}})
    assert said.status == "completed" and stop not in said.output_text


def test_tools_and_forms(server, client):
    tool = {
        "type": "function",
        "name": "pick",
        "description": "Picks.",
        "parameters": PICK,
        "strict": True,
    }
    fields = {"model": server.model, "input": "hello", "temperature": 0, "tools": [tool]}
    fields["tool_choice"] = {"type": "function", "name": "pick"}
    said = both(client, **fields)
    assert said.status == "completed" and [item.type for item in said.output] == ["function_call"]
    call = said.output[0]
    assert call.name == "pick" and Pick.model_validate_json(call.arguments)
    past = [
        user("hello"),
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
        turn("assistant", "so"),
        user("go on"),
    ]
    calls = [call_of(call.call_id, "pick", call.arguments)]
    messages = [
        past[0],
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
        *past[3:],
    ]
    offered = [function({key: value for key, value in tool.items() if key != "type"})]
    said = both(client, **{**fields, "input": past, "tool_choice": "none", "max_output_tokens": 9})
    expected, usage = chat(
        server, messages, tools=offered, tool_choice="none", max_tokens=9, ignore_eos=False
    )
    assert said.output_text == expected["message"]["content"]
    assert said.usage.input_tokens == usage["prompt_tokens"]
    parsed = client.responses.parse(
        model=server.model, input="hello", temperature=0, text_format=Pick
    )
    assert parsed.output_parsed.a in ("b", "c")
    with client.responses.stream(
        model=server.model, input="hello", temperature=0, text_format=Pick
    ) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_response_is_followed_kept_and_forgotten(server, client):
    model = server.model
    first = client.responses.create(
        model=model, input="hello", instructions="Be brief.", metadata={"a": "b"}, **GREEDY
    )
    second = both(client, model=model, input="and", previous_response_id=first.id, **GREEDY)
    said = turn("assistant", first.output_text)
    expected, _ = chat(server, [user("hello"), said, user("and")])
    assert (
        second.output_text == expected["message"]["content"]
        and second.previous_response_id == first.id
    )
    kept = client.responses.retrieve(first.id)
    assert (
        kept.output == first.output
        and kept.metadata == {"a": "b"}
        and kept.instructions == "Be brief."
    )
    turns = [
        {"id": "mine", "role": "user", "content": "one"},
        first.output[0].model_dump(exclude={"phase"}),
    ]
    asked = client.responses.create(
        model=model, input=[*turns, {**turns[0], "content": "two"}], **GREEDY
    )
    listed = client.responses.input_items.list(asked.id)
    assert [item.content[0].text for item in listed] == [
        "two",
        first.output_text,
        "one",
    ] and not listed.has_more
    assert [
        item.id for item in client.responses.input_items.list(asked.id, order="asc", limit=1)
    ] == [item.id for item in reversed(listed.data)], "page by page, each by a name of its own"
    assert listed.last_id == "mine" and listed.data[1].id == first.output[0].id
    for query in ("limit=0", "order=up", "after=nobody"):
        assert server.get(f"{PATH}/{asked.id}/input_items?{query}")[0] == 400
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    third = client.responses.create(
        model=model, input="on", previous_response_id=second.id, **GREEDY
    )
    more = [turn("assistant", second.output_text), user("on")]
    expected, _ = chat(
        server,
        [user("hello"), said, user("and"), *more],
    )
    assert third.output_text == expected["message"]["content"]
    unkept = client.responses.create(model=model, input="hello", store=False, **GREEDY)
    items = client.responses.input_items.list
    for gone in (first.id, unkept.id, "resp_x"):
        for ask in (
            client.responses.retrieve,
            client.responses.delete,
            client.responses.cancel,
            items,
        ):
            with pytest.raises(openai.NotFoundError, match="Response 'resp_.*' was not found"):
                ask(gone)
        with pytest.raises(openai.NotFoundError, match="Response 'resp_.*' was not found"):
            client.responses.create(model=model, input="a", previous_response_id=gone)


def test_each_key_has_its_own_and_a_running_one_is_cancelled_by_it_alone(shared):
    long = {"input": "hello", "temperature": 0, "ignore_eos": True, "stream": True}
    alice, bob = (bearer(name) for name in ("alice", "bob"))
    with send(shared, PATH, long, **alice) as stream:
        coming = events(stream)
        name = next(coming)["response"]["id"]
        while next(coming)["type"] != "response.output_text.delta":
            pass
        for headers, status in ((bob, 404), (alice, 200)):
            found, cancelled = shared.post(f"{PATH}/{name}/cancel", b"", **headers)
            assert found == status
        *_, error, failed = coming
    assert error["type"] == "error" and "cancelled" in error["message"]
    assert (
        failed["type"] == "response.failed"
        and failed["response"]["id"] == name
        and failed["response"]["output"]
    )
    assert cancelled == {
        **failed["response"],
        "status": "cancelled",
        "error": None,
        "output": cancelled["output"],
    }
    (message,) = cancelled["output"]
    assert message["status"] == "incomplete" and message["content"][0]["text"]
    assert shared.get(f"{PATH}/{name}", **alice)[1] == cancelled
    shared.wait_until_idle()
    _, done = shared.post(PATH, {**long, "stream": False, "max_output_tokens": 2}, **alice)
    assert (
        shared.get(f"{PATH}/{done['id']}", **alice)[1] == done
        and shared.get(f"{PATH}/{done['id']}", **bob)[0] == 404
    )
    assert shared.post(PATH, {**long, "previous_response_id": done["id"]}, **bob)[0] == 404
    assert httpx.delete(f"{shared.url}{PATH}/{done['id']}", headers=bob).status_code == 404


def test_a_response_that_ends_inside_a_call_is_gone_on_with(server, client):
    tool = {"type": "function", "name": "pick", "parameters": PICK}
    fields = {
        "model": server.model,
        "input": "hello",
        "temperature": 0,
        "tools": [tool],
        "tool_choice": "required",
    }
    length = client.responses.create(**fields).usage.output_tokens
    for cut in range(length - 1, 0, -1):
        said = client.responses.create(**fields, max_output_tokens=cut)
        (call,) = said.output
        if not call.arguments.endswith("}"):
            break
    assert call.arguments.startswith("{") and said.status == "incomplete"
    next = client.responses.create(
        model=server.model, input="on", previous_response_id=said.id, **GREEDY
    )
    function = {
        "name": "pick",
        "arguments": json.dumps(from_json(call.arguments, allow_partial=True)),
    }
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    expected, _ = chat(server, [user("hello"), said, user("on")])
    assert next.output_text == expected["message"]["content"]


@pytest.mark.parametrize("cancel_first", [True, False])
def test_the_first_end_of_a_response_stands(cancel_first, monkeypatch):
    class Asked:
        """A response whose body a thread may write at any time, while it is still being sent."""

        def __init__(self, service, chat, make_replies, adjust):
            prompt = EncodedPrompt("a", [1], 0.0, 0.0, False)
            job = adjust(Job("x", "chat", "m", [prompt], SamplingParams(), 1, chat))
            choice = SimpleNamespace(
                job=job,
                stream=SimpleNamespace(transcript=SimpleNamespace(tokenizer=tokenizer)),
                content="hi",
                reasoning="",
                tool_calls=[],
                logprobs=[],
                labels=[],
                finish_reason="stop",
            )
            self.replies = make_replies(job, [choice], service)
            self.ends = []
            self.expire = self.ends.append
            service.in_flight.add(self)

    tokenizer = SimpleNamespace(strips_leading_space=False)
    for name, found in (("Generation", Asked), ("_usage", lambda *_: {})):
        monkeypatch.setattr(responses, name, found)
    monkeypatch.setattr(responses.ResponseReplies, "_reports", lambda *_: {})
    api = APIRouter()
    service = SimpleNamespace(config=SimpleNamespace(kept_responses=4), in_flight=set())
    responses.add_responses(api, service)
    create, get, _, cancel = (
        route.endpoint for route in api.routes if not route.path.endswith("input_items")
    )
    request = SimpleNamespace(state=SimpleNamespace(tenant="a"))

    async def late():
        asked = await create(ResponsesRequest.model_validate({"input": "hello"}), request)
        name = asked.replies.job.id
        if cancel_first:
            await cancel(name, request)
            asked.replies.body()
        else:
            asked.replies.body()
            with pytest.raises(InvalidRequestError, match="Cannot cancel a synchronous response"):
                await cancel(name, request)
        assert len(asked.ends) == cancel_first
        return json.loads((await get(name, request)).body)["status"]

    assert asyncio.run(late()) == ("cancelled" if cancel_first else "completed")


def test_who_waits_for_a_cancelled_response_is_told_not_to_try_again():
    told = headers(ResponseCancelledError("The response was cancelled."))
    assert told == {"X-Should-Retry": "false"}


def test_a_tenant_pushes_out_its_own_first(monkeypatch):
    monkeypatch.setattr("twinphase.server.dialects.kept_responses.MAX_KEPT_BYTES", 1000)

    def still(known):
        found = []
        for tenant, name in itertools.product("ab", "01234567"):
            with contextlib.suppress(RequestNotFoundError):
                known.get(tenant, name)
                found.append(tenant + name)
        return found

    known = Responses(4)
    known.put("a", "0", Kept(b"x" * 100, b"", b""))
    for name in "0123456":
        known.put("b", name, Kept(b"", b"", b""))
    assert still(known) == ["a0", "b4", "b5", "b6"]
    known.put("b", "6", Kept(b"x" * 500, b"y" * 400, b""))
    assert still(known) == ["a0", "b4", "b5", "b6"]
    known.put("b", "7", Kept(b"", b"y", b""))
    assert still(known) == ["a0", "b7"], "the oldest, until the rest fits"
    none = Responses(0)
    none.put("a", "0", Kept(b"", b"", b""))
    assert still(none) == []


def test_the_oldest_are_forgotten_first(limited):
    with limited.client("one") as client:
        ids = [client.responses.create(model="a", input="a", **GREEDY).id for _ in range(3)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ids[0])
        assert [client.responses.retrieve(name).id for name in ids[1:]] == ids[1:]
