"""instructor: pydantic models from answers, by tools and JSON modes, over two APIs."""

import anthropic
import instructor
import openai
from pydantic import BaseModel
from served import KEY, MODEL, URL, works


class Person(BaseModel):
    name: str
    age: int


ASK = [{"role": "user", "content": "Ann is 31 years old."}]
plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
for mode in (
    instructor.Mode.TOOLS,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.TOOLS_STRICT,
):
    client = instructor.from_openai(plain, mode=mode)
    found = client.chat.completions.create(
        model=MODEL, messages=ASK, response_model=Person, temperature=0
    )
    assert (found.name, found.age) == ("Ann", 31), (mode, found)
    works(f"openai: {mode.value}")
claude = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
client = instructor.from_anthropic(claude, mode=instructor.Mode.ANTHROPIC_TOOLS)
found = client.messages.create(model=MODEL, max_tokens=100, messages=ASK, response_model=Person)
assert found.name == "Ann", found
works("anthropic: tools")
