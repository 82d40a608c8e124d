"""OpenAI's client and a real model: conversations, tools and forms that make sense."""

from typing import Any

import pytest
from pydantic import BaseModel

from dialects import function, turn, user
from twinphase import LLM, SamplingParams

pytestmark = pytest.mark.model

WEATHER = function(
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
)


class Person(BaseModel):
    name: str
    age: int


def asked(city, degrees):
    """An exchange in which the assistant looked up the weather."""
    call = {"id": f"call_{city}", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
    return [
        user(f"What is the weather in {city}?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": f"{degrees} degrees"},
        turn("assistant", f"It is {degrees} degrees in {city}."),
    ]


@pytest.fixture(scope="module")
def client(smol):
    with smol.client() as client:
        yield client


@pytest.fixture(scope="module")
def ask(client, smol):
    def create(*messages, **fields) -> Any:
        request = {
            "model": smol.model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": 40,
            **fields,
        }
        return client.chat.completions.create(**request)

    return create


def test_a_conversation_goes_on_where_it_was(ask, smol):
    first = user("What is the capital of France? Answer in one word.")
    answer = ask(first).choices[0].message
    assert "Paris" in answer.content
    second = ask(turn("system", "Be brief."), first, answer, user("And of Italy?"))
    third = ask(
        turn("system", "Be brief."),
        first,
        answer,
        user("And of Italy?"),
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in third)
    assert text == second.choices[0].message.content and "Rome" in text
    messages = [
        turn("system", "Be brief."),
        first,
        answer.model_dump(),
        user("And of Italy?"),
    ]
    messages[2] = turn("assistant", answer.content)
    (output,) = LLM(smol.model).chat(
        messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False
    )
    assert output.outputs[0].text == text


def test_a_tool_is_called_when_the_model_wants_it(ask, client, smol):
    known = {
        "Rome": 20,
        "Oslo": 3,
        "Berlin": 12,
        "Madrid": 30,
    }  # so small a model needs to be shown
    messages = [message for city, degrees in known.items() for message in asked(city, degrees)]
    messages += [user("What is the weather in Paris?")]
    reply = ask(*messages, tools=[WEATHER])
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    assert (
        reply.choices[0].finish_reason == "tool_calls" and reply.choices[0].message.content is None
    )
    with client.chat.completions.stream(
        model=smol.model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=40
    ) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.done" in events and not {"content.done"} & set(events)
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "25 degrees"}
    assert (
        "25"
        in ask(*messages, reply.choices[0].message, result, tools=[WEATHER])
        .choices[0]
        .message.content
    )


def test_answers_in_a_form(client, ask, smol):
    question = user("Alice is 30 years old. Give her name and age as JSON.")
    parsed = client.chat.completions.parse(
        model=smol.model, messages=[question], temperature=0, max_tokens=60, response_format=Person
    )
    assert parsed.choices[0].message.parsed == Person(name="Alice", age=30)
    free = ask(question, response_format={"type": "json_object"}, max_tokens=60)
    assert free.choices[0].message.content.startswith("{")


def test_default_answers_are_sampled_as_the_models_makers_recommend(smol):
    """The catalogue also replaces the system message of its template."""
    assert "sampling   temperature 0.2, top_p 0.9 (" in smol.log.read_text()
    asked = {"messages": [user("What is the capital of France?")], "max_tokens": 100}
    replies = [smol.post("/v1/chat/completions", {**asked, "seed": i})[1] for i in range(10)]
    texts = [reply["choices"][0]["message"]["content"] for reply in replies]
    assert sum("Paris" in text for text in texts) >= 9, texts
