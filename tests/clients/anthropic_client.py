"""The official `anthropic` client: messages, streams, tools, structured output, counts, errors."""

import anthropic
from pydantic import BaseModel
from served import CITY, KEY, MODEL, QUESTION, URL, works

USER = [{"role": "user", "content": QUESTION}]
TOOLS = [{"name": "get_weather", "description": "Weather of a city.", "input_schema": CITY}]
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)

system = [{"type": "text", "text": "You are brief. " * 20, "cache_control": {"type": "ephemeral"}}]
asked = {"model": MODEL, "max_tokens": 16, "messages": USER, "system": system}
first, again = (client.messages.create(**asked, extra_body={"temperature": 0}) for _ in range(2))
assert "Paris" in first.content[0].text and first.content[0].text == again.content[0].text
assert first.stop_reason == "end_turn" and first.usage.cache_creation_input_tokens > 0
assert again.usage.cache_read_input_tokens >= first.usage.cache_creation_input_tokens
works("messages, what was cached")
with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
    assert "".join(stream.text_stream) == first.content[0].text
    assert stream.get_final_message().usage.output_tokens == first.usage.output_tokens
works("stream")
counted = client.messages.count_tokens(model=MODEL, messages=USER, system=system).input_tokens
assert counted == sum(
    getattr(first.usage, f"{kind}input_tokens") for kind in ("", "cache_creation_", "cache_read_")
)
works("counting tokens")
weather = [{"role": "user", "content": "What is the weather in Paris?"}]
for choice in (
    {"type": "any", "disable_parallel_tool_use": True},
    {"type": "tool", "name": "get_weather"},
):
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=weather, tools=TOOLS, tool_choice=choice
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use" and message.content[-1].input["city"]
results = [{"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "18 degrees"}]
history = [
    *weather,
    {"role": "assistant", "content": message.content},
    {"role": "user", "content": results},
]
assert client.messages.create(model=MODEL, max_tokens=64, messages=history, tools=TOOLS).content
works("tools and their results, streamed")


class Person(BaseModel):
    name: str
    age: int


ask = [{"role": "user", "content": "Ann is 31 years old. Who is she?"}]
parsed = client.messages.parse(model=MODEL, max_tokens=100, messages=ask, output_format=Person)
assert isinstance(parsed.parsed_output, Person)
works("structured output")
cold = {**asked, "extra_body": {"temperature": 0}}
stopped = client.messages.create(**cold, stop_sequences=["aris"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "aris")
assert client.messages.create(**cold | {"max_tokens": 1}).stop_reason == "max_tokens"
works("stop reasons")
begun = [*USER, {"role": "assistant", "content": "The capital of France is"}]
assert (
    client.messages.create(**cold | {"messages": begun}).content[0].text.strip().startswith("Paris")
)
works("a beginning of the answer")
image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
for error, fields in (
    (anthropic.NotFoundError, {"model": "claude"}),
    (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [image]}]}),
):
    try:
        client.messages.create(**asked | fields)
        raise AssertionError(fields)
    except error as refused:
        assert refused.body["error"]["message"]
try:
    client.with_options(api_key="nobody's").messages.create(**asked)
    raise AssertionError("a key that is not known")
except anthropic.AuthenticationError:
    works("refusals")
