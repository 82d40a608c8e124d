"""APIs other than OpenAI's: each translates its requests to OpenAI's and writes its own replies."""

from twinphase.server.dialects.anthropic import anthropic_shape
from twinphase.server.dialects.ollama import ollama_shape
from twinphase.server.problems import Shape, openai_shape


def shape_of(path: str) -> Shape:
    """The shape of errors for routes under `path`."""
    if path.startswith("/v1/messages"):
        return anthropic_shape
    return ollama_shape if path.startswith("/api/") else openai_shape
