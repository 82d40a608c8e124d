"""The requests that clients may send to Anthropic's Messages API.

Unknown fields are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from twinphase.server.strict import (
    ModelName,
    Name,
    Natural,
    Positive,
    Strict,
    ToolName,
    UpTo16,
    UpTo128,
    UpTo4096,
    text_or_parts,
)

_as_blocks = text_or_parts("text", ("image", "document", "search_result", "container_upload"))


class _Block(Strict):
    cache_control: dict[str, Any] | None = None  # Caching is automatic.


class TextBlock(_Block):
    """A text block of a message."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(_Block):
    """The thinking before an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


TextBlocks = Annotated[
    UpTo4096[TextBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: TextBlocks = Field(default_factory=list)
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Blocks = Annotated[
    UpTo4096[Block],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]


class Turn(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class CustomTool(_Block):
    """A tool of the client; Anthropic's server tools are refused."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # Arguments are always streamed.
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None
    defer_loading: bool | None = None  # All tools are offered from the start.


class ToolChoice(Strict):
    """Whether tools must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_its_tool(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("the type tool needs `name`")
        return self


class Thinking(Strict):
    """Whether the model thinks, and for how long; the default is the model's own."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Natural | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The schema that the answer must obey."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Form and effort of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Strict):
    """POST /v1/messages/count_tokens."""

    model: ModelName
    messages: Annotated[UpTo4096[Turn], Field(min_length=1)]
    system: TextBlocks | None = None
    tools: UpTo128[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # This is the older name of `output_config.format`.
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Positive
    stream: bool | None = False
    return_progress: bool = False
    stop_sequences: UpTo16[Name] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Anthropic's other fields are not supported.
    container: None = None
    context_management: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


class AnthropicError(BaseModel):
    """The cause of an error and the remedy."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """Anthropic's shape of an error."""

    type: Literal["error"]
    error: AnthropicError
