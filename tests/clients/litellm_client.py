"""LiteLLM over each of the three APIs: chat, stream, tools."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices
import litellm  # noqa: E402
from served import CITY, KEY, MODEL, QUESTION, URL, works

USER = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": CITY},
}
litellm.drop_params = False
where = {
    f"openai/{MODEL}": {"api_base": f"{URL}/v1"},
    f"anthropic/{MODEL}": {"api_base": URL},
    f"ollama_chat/{MODEL}": {"api_base": URL},
}
for model, base in where.items():
    common = {
        "model": model,
        **base,
        "api_key": KEY,
        "messages": USER,
        "temperature": 0,
        "max_tokens": 16,
    }
    text = litellm.completion(**common).choices[0].message.content
    assert "Paris" in text, text
    pieces = [
        piece.choices[0].delta.content or "" for piece in litellm.completion(**common, stream=True)
    ]
    assert "".join(pieces) == text
    works(f"{model.partition('/')[0]}: chat, stream")
    weather = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "max_tokens": 100,
    }
    choice = {} if model.startswith("ollama") else {"tool_choice": "required"}
    message = litellm.completion(**common | weather, tools=[TOOL], **choice).choices[0].message
    assert not choice or message.tool_calls[0].function.name == "get_weather", message
    works(f"{model.partition('/')[0]}: tools")
