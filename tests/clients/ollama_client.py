"""The official `ollama` client: chats, prompts, streams, tools, formats, embeddings, models."""

import ollama
from pydantic import BaseModel
from served import EMBED_MODEL, EMBED_URL, KEY, MODEL, QUESTION, URL, works

HEADERS = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(URL, headers=HEADERS)
USER = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "num_predict": 16, "num_ctx": 4096}

assert MODEL in [model.model for model in client.list().models] and client.ps().models
shown = client.show(MODEL)
assert "completion" in shown.capabilities and shown.details.quantization_level and shown.modelinfo
works("list, ps, show")
whole = client.chat(MODEL, messages=USER, options=GREEDY)
assert "Paris" in whole.message.content and whole.eval_count > 0 and whole.prompt_eval_duration > 0
assert (
    whole.prompt_eval_duration + whole.eval_duration + whole.load_duration <= whole.total_duration
)
pieces = list(client.chat(MODEL, messages=USER, options=GREEDY, stream=True))
assert "".join(piece.message.content for piece in pieces) == whole.message.content
assert [piece.done for piece in pieces][-2:] == [False, True] and pieces[-1].done_reason == "stop"
works("chat, stream, durations")
answer = client.generate(f"{MODEL}:latest", QUESTION, options=GREEDY).response
assert answer == whole.message.content
assert client.generate(MODEL, "def add(a, b):", raw=True, options=GREEDY).eval_count == 16
assert client.generate(
    MODEL, "def add(a, b):\n", suffix="\n    return c\n", options=GREEDY
).response
works("generate, raw and between two texts too")


class Person(BaseModel):
    name: str
    age: int


told = client.chat(
    MODEL,
    messages=[{"role": "user", "content": "Ann is 31. Who is she?"}],
    format=Person.model_json_schema(),
)
assert Person.model_validate_json(told.message.content)
assert (
    client.generate(MODEL, "A JSON object with a name.", format="json")
    .response.strip()
    .startswith("{")
)
works("formats")


def get_weather(city: str) -> str:
    """Get the weather.

    Args:
        city: name of the city
    """
    return "18 degrees"


asked = [{"role": "user", "content": "What is the weather in Paris?"}]
assert client.chat(MODEL, messages=asked, tools=[get_weather], options=GREEDY).message
call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
asked += [
    {"role": "assistant", "tool_calls": [call]},
    {"role": "tool", "tool_name": "get_weather", "content": "18"},
]
assert client.chat(MODEL, messages=asked, tools=[get_weather], options=GREEDY).message.content
works("tools and their results")
vectors = ollama.Client(EMBED_URL, headers=HEADERS)
(one, two) = vectors.embed(EMBED_MODEL, ["a", "b"]).embeddings
old = vectors.embeddings(EMBED_MODEL, "a").embedding
assert len(one) == len(two) > 100 and one == old
works("embed, embeddings")
for model, options, status in (
    ("gpt", {}, 404),
    (MODEL, {"temperature": -1}, 400),
    (MODEL, {"mirostat": 2}, 400),
):
    try:
        client.chat(model, messages=USER, options=options)
        raise AssertionError(model)
    except ollama.ResponseError as refused:
        assert refused.status_code == status and refused.error
works("refusals")
