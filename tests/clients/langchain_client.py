"""LangChain over three APIs: chat, stream, tools, structured output; embeddings over two."""

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field
from served import EMBED_MODEL, EMBED_URL, KEY, MODEL, QUESTION, URL, works

HEADERS = {"headers": {"Authorization": f"Bearer {KEY}"}}


class Person(BaseModel):
    """A person."""

    name: str = Field(description="first name")
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "18 degrees"


models = {
    "openai": ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, temperature=0, max_tokens=64, max_retries=0
    ),
    "anthropic": ChatAnthropic(
        model=MODEL, base_url=URL, api_key=KEY, max_tokens=64, max_retries=0, stop=None
    ),
    "ollama": ChatOllama(
        model=MODEL, base_url=URL, client_kwargs=HEADERS, temperature=0, num_predict=64
    ),
}
for name, model in models.items():
    whole = model.invoke([("system", "You are brief."), ("human", QUESTION)])
    assert "Paris" in str(whole.content) and whole.usage_metadata["output_tokens"] > 0, whole
    pieces = list(model.stream(QUESTION))
    assert "Paris" in "".join(piece.text for piece in pieces) and len(pieces) > 1, pieces
    works(f"{name}: chat, stream")
    choice = (
        {} if name == "ollama" else {"tool_choice": "any"}
    )  # Ollama's API has none: the model may choose not to
    answer = model.bind_tools([get_weather], **choice).invoke("What is the weather in Paris?")
    assert name == "ollama" or answer.tool_calls[0]["args"]["city"], answer
    works(f"{name}: tools")
    for method in {
        "openai": ("json_schema", "function_calling"),
        "anthropic": ("function_calling", "json_schema"),
        "ollama": ("json_schema",),
    }[name]:
        found = model.with_structured_output(Person, method=method).invoke("Ann is 31 years old.")
        assert isinstance(found, Person), found
    works(f"{name}: structured output")
embedders = [
    OpenAIEmbeddings(
        model=EMBED_MODEL, base_url=f"{EMBED_URL}/v1", api_key=KEY, check_embedding_ctx_length=False
    ),
    OllamaEmbeddings(model=EMBED_MODEL, base_url=EMBED_URL, client_kwargs=HEADERS),
]
one, other = (embedder.embed_documents(["a", "b"]) for embedder in embedders)
assert one == other and len(one[0]) > 100
works("embeddings")
