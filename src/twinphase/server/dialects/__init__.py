"""APIs beside OpenAI's: one file each, of what requests mean in the server's own words and how answers are written."""

from twinphase.server.dialects.anthropic import anthropic_shape
from twinphase.server.dialects.ollama import ollama_shape
from twinphase.server.problems import Shape, openai_shape


def shape_of(path: str) -> Shape:
    """The shape that errors have under that path."""
    if path.startswith("/v1/messages"):
        return anthropic_shape
    return ollama_shape if path.startswith("/api/") else openai_shape
