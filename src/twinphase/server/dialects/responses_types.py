"""The requests that clients may send to OpenAI's Responses API; unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from twinphase.server.openai_types import AnyGeneration, Function, NamedFunction
from twinphase.server.strict import (
    UNREAD,
    Name,
    NumLogprobs,
    Positive,
    Strict,
    Unread,
    UpTo16,
    UpTo128,
    UpTo4096,
    text_or_parts,
)


def _as_items(given: Any) -> Any:
    """Convert the input to items: a text is a user message, an object with a role a message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    return [
        {"type": "message", **one} if isinstance(one, dict) and "role" in one else one
        for one in given
    ]


class _Item(Strict):
    id: Unread = None
    status: Unread = None


class TextContent(Strict):
    """Text of a message, or of a tool's result."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Unread = None
    logprobs: Unread = None


class RefusalContent(Strict):
    """A refusal of the assistant."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Contents = Annotated[
    UpTo4096[Annotated[TextContent | RefusalContent, Field(discriminator="type")]],
    BeforeValidator(text_or_parts("input_text", ("input_image", "input_file", "input_audio"))),
]


class MessageItem(_Item):
    """A message of any role."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents
    phase: Unread = None


class CallItem(_Item):
    """A call of a function that the model made; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    parsed_arguments: Unread = None


class CallOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Contents


class Thought(Strict):
    """Text of the model's thinking."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """The thinking before an earlier answer."""

    type: Literal["reasoning"]
    summary: UpTo4096[Thought] = Field(default_factory=list)
    content: UpTo4096[Thought] | None = None
    encrypted_content: None = None  # Contents encrypted by other servers cannot be decrypted.


Item = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")
]


class FunctionTool(Function):
    """A function that the model may call; tools that OpenAI's servers would run are refused."""

    type: Literal["function"]


class NamedTool(NamedFunction):
    """The function that must be called."""

    type: Literal["function"]


class TextFormat(Strict):
    """The required form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("the type json_schema needs `schema`")
        return self


class TextConfig(Strict):
    """The form and length of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """How much the model thinks; reasoning is sent in full, so there is no summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Strict):
    """Accepted but without effect, because nothing is padded."""

    include_obfuscation: Unread = None


class ResponsesRequest(AnyGeneration):
    """POST /v1/responses."""

    input: Annotated[UpTo4096[Item], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool = True
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Positive | None = None
    tools: UpTo128[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: UpTo16[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list
    )
    top_logprobs: NumLogprobs | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    max_tool_calls: int | None = None  # This counts tools that OpenAI's servers would run.
    user: Annotated[Annotated[str, Field(max_length=512)] | None, UNREAD] = None
    # This extension is the same as in chats.
    chat_template_kwargs: dict[str, Any] | None = None
    # OpenAI's other fields are not supported.
    conversation: None = None
    prompt: None = None

    @model_validator(mode="after")
    def _can_be_kept(self) -> ResponsesRequest:
        """Input and fields are part of the reply, which is JSON."""
        try:
            self.model_dump_json()
        except ValueError:
            raise ValueError("the body has lone surrogates; send valid Unicode") from None
        return self
