"""The official `openai` client: chats, streams, tools, forms, completions, embeddings, errors."""

import openai
from pydantic import BaseModel
from served import CITY, EMBED_MODEL, EMBED_URL, KEY, MODEL, QUESTION, URL, works

USER = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": CITY},
}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)

assert MODEL in [model.id for model in client.models.list()]
greedy = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 16}
text = client.chat.completions.create(**greedy).choices[0].message.content
assert "Paris" in text
works("chat")
with client.chat.completions.stream(**greedy, stream_options={"include_usage": True}) as stream:
    final = stream.get_final_completion()
assert final.choices[0].message.content == text and final.usage.completion_tokens > 0
works("stream")
weather = [{"role": "user", "content": "What is the weather in Paris?"}]
reply = client.chat.completions.create(
    model=MODEL, messages=weather, tools=[TOOL], tool_choice="required", temperature=0
)
said = reply.choices[0].message
(call, *_) = reply.choices[0].message.tool_calls
assert call.function.name == "get_weather" and "city" in call.function.arguments
result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
said.tool_calls = [call]
history = [*weather, said.model_dump(exclude_none=True), result]
assert client.chat.completions.create(
    model=MODEL, messages=history, tools=[TOOL], max_tokens=64
).choices
works("tools")


class Person(BaseModel):
    name: str
    age: int


ask = [{"role": "user", "content": "Ann is 31 years old. Who is she?"}]
parsed = client.chat.completions.parse(
    model=MODEL, messages=ask, response_format=Person, temperature=0
)
assert isinstance(parsed.choices[0].message.parsed, Person)
works("structured output")
answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
assert "Paris" in answer.output_text
with client.responses.stream(
    model=MODEL, input="And of Italy?", previous_response_id=answer.id
) as stream:
    kinds = [event.type for event in stream]
assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
works("responses, stream, previous_response_id")
scored = client.completions.create(
    model=MODEL, prompt="one two", echo=True, logprobs=1, max_tokens=0
).choices[0]
assert scored.text == "one two" and len(scored.logprobs.tokens) == 2
works("completions, log probabilities of a prompt")
vectors = openai.OpenAI(base_url=f"{EMBED_URL}/v1", api_key=KEY).embeddings.create(
    model=EMBED_MODEL, input=["a", "b"]
)
assert len(vectors.data) == 2 and len(vectors.data[0].embedding) > 100
works("embeddings")
for error, fields in (
    (openai.NotFoundError, {"model": "gpt-4"}),
    (openai.BadRequestError, {"temperature": -1}),
    (openai.BadRequestError, {"messages": [{"role": "user", "content": "hello " * 50_000}]}),
):
    try:
        client.chat.completions.create(**greedy | fields)
        raise AssertionError(fields)
    except error:
        pass
try:
    client.with_options(api_key="nobody's").models.list()
    raise AssertionError("a key that is not known")
except openai.AuthenticationError:
    works("refusals")
