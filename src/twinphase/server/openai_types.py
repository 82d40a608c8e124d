"""The requests that clients may send, with OpenAI's and vLLM's names.

Unknown fields are refused by name; null stands for the default.

Fields that clients always send and that can mean nothing here (`Unread`) are accepted, and named in
a header of the reply.

`SamplingParams` checks its ranges itself; the bounds here keep a request small before anything is
done. Objects of too many keys are refused unseen: a million errors would delay other requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from twinphase.server.strict import (
    UNREAD,
    Int32,
    ModelName,
    Name,
    Natural,
    NumLogprobs,
    Positive,
    Strict,
    ToolName,
    Unread,
    UpTo16,
    UpTo128,
    UpTo4096,
    UpTo65536,
)

MAX_BIASES = 1024
MAX_PREDICTION_CHARACTERS = 1 << 20
Stops = Name | UpTo16[Name]
TokenKey = Annotated[int, Field(ge=0, lt=2**31, strict=False)]  # Keys in JSON are strings.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenIds = Annotated[list[Natural], Field(fail_fast=True)]
Texts = str | TokenIds | UpTo65536[str] | UpTo65536[TokenIds]  # One or several.


def _check_biases(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"it has {len(given)} keys; {MAX_BIASES} are allowed")
    return given


LogitBias = Annotated[
    dict[TokenKey, float], Field(max_length=MAX_BIASES), BeforeValidator(_check_biases)
]


class TextPart(Strict):
    """A piece of a message; `part` names it in the report of prompt parts, such as a document."""

    type: Literal["text"]
    text: str
    part: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    cache_control: Unread = None  # Caching is automatic.


class FunctionCall(Strict):
    """A call of the assistant: `arguments` is JSON text."""

    name: Name
    arguments: str = "{}"
    parsed_arguments: Unread = None


class PastToolCall(Strict):
    """A tool call in an earlier message of the assistant."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Unread = None


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | UpTo4096[TextPart] | None = None
    name: Name | None = None
    tool_calls: UpTo128[PastToolCall] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None
    # Fields of an answer that clients and gateways send back with it.
    refusal: Unread = None
    annotations: Unread = None
    parsed: Unread = None
    id: Unread = None
    cache_control: Unread = None
    provider_specific_fields: Unread = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self


class Function(Strict):
    """A function the model may call; `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool definition."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The function's name in a tool choice."""

    name: Name


class NamedToolChoice(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """The schema of a structured answer."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    triggers: UpTo65536[str] | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("`json_schema` goes with the type json_schema")
        if (self.type == "structural_tag") != (
            self.structures is not None and self.triggers is not None
        ):
            raise ValueError("`structures` and `triggers` go with the type structural_tag")
        return self


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`, with exactly one form."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: UpTo65536[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = (
        None  # OpenAI pads its chunks against eavesdroppers; this server does not.
    )


class Prediction(Strict):
    """The expected answer, such as a file with one change; it only affects speed."""

    type: Literal["content"]
    content: Annotated[str, Field(max_length=MAX_PREDICTION_CHARACTERS)] | UpTo4096[TextPart]

    @model_validator(mode="after")
    def _short_enough(self) -> Prediction:
        if len(self.text) > MAX_PREDICTION_CHARACTERS:
            raise ValueError(f"`content` has more than {MAX_PREDICTION_CHARACTERS} characters")
        return self

    @property
    def text(self) -> str:
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class Sampling(Strict):
    """The sampling fields common to several APIs; `SamplingParams` checks their ranges."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: Seed | None = None
    stop: Stops | None = None


class AnyGeneration(Sampling):
    """The fields of chats, completions and responses."""

    model: ModelName | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    num_speculative_tokens: Natural | None = None
    stream: bool | None = False
    return_progress: bool = False
    priority: Int32 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # This is for the client's own use; prefixes are found by their tokens.
    user: Annotated[str | None, UNREAD] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None, UNREAD
    ] = None
    safety_identifier: Annotated[str | None, UNREAD] = None
    prompt_cache_key: Annotated[str | None, UNREAD] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "in-memory", "24h"] | None, UNREAD] = (
        None
    )


class GenerationRequest(AnyGeneration):
    """The fields of chats and completions."""

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Positive | None = None
    min_tokens: Natural = 0
    prompt_logprobs: NumLogprobs | None = None
    n: Positive | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: UpTo65536[str] | None = None
    guided_grammar: str | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    bad_words: Annotated[list[Name], Field(fail_fast=True, max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=65536)] | None = None
    include_stop_str_in_output: bool = False
    # -1 means truncation to the context.
    truncate_prompt_tokens: Literal[-1] | Positive | None = None
    # This is for the client's own use, since answers are not stored.
    metadata: Annotated[dict[str, Any] | None, UNREAD] = None
    store: Annotated[bool | None, UNREAD] = None
    # Only this value is supported.
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream`: true")
        if self.return_progress and not self.stream:
            raise ValueError("`return_progress` needs `stream`: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("`prompt_logprobs` are not streamed: leave out `stream`")
        return self


class _Templated(Strict):
    """The end of a conversation: the start of the assistant's turn, or within its last message."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _one_end(self) -> _Templated:
        asked = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if asked and self.continue_final_message:
            raise ValueError(
                "`continue_final_message` does not go with `add_generation_prompt`: true"
            )
        return self


class ChatCompletionRequest(_Templated, GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[UpTo4096[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None
    tools: UpTo128[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    thinking_token_budget: Natural | None = None
    # Used if the model's template has them.
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None, UNREAD
    ] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, UNREAD] = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    prediction: Prediction | None = None
    # OpenAI's other fields are not supported, but some clients send null for fields without a
    # value.
    audio: None = None
    function_call: None = None
    functions: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("`tool_choice` needs `tools`")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError("`max_tokens` and `max_completion_tokens` differ; give one of them")
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Texts
    max_tokens: Natural | None = None  # 0 with `echo` requests the prompt's log probabilities.
    logprobs: NumLogprobs | None = None
    echo: bool | None = False
    best_of: Positive | None = None
    suffix: str | None = None  # This requires a vocabulary with fill-in-the-middle tokens.
    add_special_tokens: Literal[True] = True

    @model_validator(mode="after")
    def _something_to_say(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("`max_tokens`: 0 needs `echo`: true, or `prompt_logprobs`")
        if self.suffix is not None and self.echo:
            raise ValueError("`suffix` does not go with `echo`: true")
        if self.suffix is not None and self.truncate_prompt_tokens is not None:
            raise ValueError(
                "`suffix` does not go with `truncate_prompt_tokens`: shorten `prompt` and `suffix`"
            )
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise ValueError(f"`best_of` is {self.best_of}: it has to be `n` ({n}) or more")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise ValueError("`best_of` above `n` is not streamed: leave out `stream`")
        return self


class EmbeddingRequest(Strict):
    """POST /v1/embeddings."""

    model: ModelName | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    user: Annotated[str | None, UNREAD] = None


class _Scoring(Strict):
    """Fields of requests for scores."""

    model: ModelName | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    use_activation: bool = True
    user: Annotated[str | None, UNREAD] = None


class ScoreRequest(_Scoring):
    """POST /v1/score: one text to compare with each of the others, or one text for each."""

    text_1: str | UpTo65536[str]
    text_2: str | UpTo65536[str]


class DocumentText(Strict):
    """A document to rank, as some clients send it."""

    text: str


class RerankRequest(_Scoring):
    """POST /v1/rerank; without `top_n`, or with 0, all documents are returned."""

    query: str
    documents: UpTo65536[str | DocumentText]
    top_n: Natural = 0
    return_documents: bool = True


class TokenizeRequest(_Templated):
    """POST /tokenize, of a text or of a conversation."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[UpTo4096[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    tools: UpTo128[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give `prompt` or `messages`")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: ModelName | None = None
    tokens: Annotated[TokenIds, Field(max_length=65536)]


class Error(BaseModel):
    """The cause and the remedy of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(BaseModel):
    """OpenAI's shape of an error."""

    error: Error
