"""The requests that clients may send to Ollama's API; unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from twinphase.server.openai_types import Sampling
from twinphase.server.strict import (
    Int32,
    ModelName,
    Name,
    NumLogprobs,
    Positive,
    Strict,
    Unread,
    UpTo128,
    UpTo4096,
    UpTo65536,
)

Nothing = Annotated[list[Any], Field(max_length=0)] | None
One = Annotated[float, Field(ge=1, le=1)] | None
Zero = Annotated[int, Field(ge=0, le=0)] | None
KeepAlive = float | str | None  # Ignored, because the model stays loaded.


class Options(Sampling):
    """Sampling options; the defaults are the server's, not those of a Modelfile."""

    num_predict: Int32 | None = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100, alias="repeat_penalty")] = (
        None
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Accepted only at the value that changes nothing: penalties consider the whole text.
    repeat_last_n: Literal[-1] | None = None
    typical_p: One = None
    tfs_z: One = None
    mirostat: Zero = None
    mirostat_tau: Unread = None
    mirostat_eta: Unread = None
    # Options for running the model, which the server's own options decide.
    num_ctx: Int32 | None = None
    num_batch: Int32 | None = None
    num_gpu: Int32 | None = None
    main_gpu: Int32 | None = None
    num_thread: Int32 | None = None
    num_keep: Int32 | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class Asked(Strict):
    """The fields common to all requests."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    keep_alive: KeepAlive = None


class Generating(Asked):
    """The fields common to chats and prompts."""

    stream: bool | None = None
    return_progress: bool = False
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None


class CalledFunction(Strict):
    """The function of a call."""

    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class Call(Strict):
    """A tool call in an earlier message of the assistant."""

    id: Name | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class OllamaMessage(Strict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    images: Nothing = None
    tool_calls: UpTo128[Call] | None = None
    tool_name: str | None = None
    tool_call_id: Name | None = None


class OllamaChatRequest(Generating):
    """POST /api/chat."""

    messages: UpTo4096[OllamaMessage] | None = None
    tools: UpTo128[dict[str, Any]] | None = None


class OllamaGenerateRequest(Generating):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Nothing = None
    context: Nothing = None  # Send the conversation to /api/chat instead, which caches its prefix.
    template: Literal[""] | None = None


class EmbedRequest(Asked):
    """POST /api/embed; texts that are too long are refused, with any `truncate`."""

    input: str | UpTo65536[str]
    truncate: bool | None = None
    dimensions: Positive | None = None
    options: Unread = None


class OldEmbedRequest(Asked):
    """POST /api/embeddings."""

    prompt: str
    options: Unread = None


class ShowRequest(Strict):
    """POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None


class OllamaErrorResponse(BaseModel):
    """Ollama's shape of an error."""

    error: str
