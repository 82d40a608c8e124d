"""Converts a request of the API to a `Job`: prompts, sampling parameters, division of answers.

`answers.py` runs jobs, and `replies.py` writes replies.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from twinphase import __version__
from twinphase.constraint import plain_json
from twinphase.engine.frontends.async_engine import MAX_INLINE_CHARACTERS, AsyncEngine
from twinphase.engine.frontends.text import EncodedPrompt, ModelText
from twinphase.errors import ContextLengthError, InvalidRequestError
from twinphase.request import SamplingParams
from twinphase.server.forms import one_constraint
from twinphase.server.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    NamedToolChoice,
    TokenizeRequest,
)
from twinphase.server.strict import unread_fields
from twinphase.server.tool_prompt import with_argument_objects, with_tool_prompt
from twinphase.server.tools import Tool, ToolFormat, check_tools, tool_format
from twinphase.server.xml_calls import call_grammar
from twinphase.tokenizer.infill import infill_ends, infill_prompt
from twinphase.tokenizer.prompt_parts import ChatPrompt
from twinphase.tokenizer.think_tags import ThinkTags, opens_thinking
from twinphase.tokenizer.tokenizer import Tokenizer

Body = TypeVar("Body", bound=GenerationRequest)

# A request with more messages or parts than this is encoded on a thread.
MAX_INLINE_TEXTS = 64
# The last tokens of a prompt, which may hold a thinking tag and the white space after it.
TAG_TOKENS = 64
NUM_SEEDS = 2**64  # The engine accepts seeds below this.
# Template variables that clients cannot set: these have fields of their own, or rendering uses the
# names.
RESERVED = frozenset(
    ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"]
    + ["self", "template", "tokenizer", "text", "control", "max_tokens", "continue_final_message"]
)


@dataclass(frozen=True)
class Reader:
    """The rules for dividing the text of an answer.

    Attributes:
        tags: tags around thinking, if the model thinks.
        thinking: whether the prompt ends inside the thinking part.
        tools: tools that calls may name.
        plain_tools: tools that an answer without the marks of `tool_format` may call.
        markers: control tokens around thinking and calls; the parsers need them in the text.
    """

    tags: ThinkTags | None = None
    thinking: bool = False
    tool_format: ToolFormat | None = None
    tools: Sequence[Tool] = ()
    plain_tools: Sequence[Tool] = ()
    keep_reasoning: bool = True
    markers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Job:
    """One request of the API.

    Attributes:
        operation: "chat" or "text_completion", as OpenTelemetry names them.
        prompts: prompts, each of them answered `n` times.
        params: sampling parameters of every answer, except for the seed.
        body: the request in OpenAI's shape.
        unread: names of the request's fields that have no effect.
        fingerprint: identifies everything that decides an answer's bits, except the request.
        created: Unix time in seconds.
    """

    id: str
    operation: str
    model: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    n: int
    body: GenerationRequest
    reader: Reader = Reader()
    unread: Sequence[str] = ()
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def echo(self) -> bool:
        """Whether the answer's text begins with the prompt."""
        return isinstance(self.body, CompletionRequest) and bool(self.body.echo)

    @property
    def prompt_only(self) -> bool:
        """Whether only the prompt is requested, so that the one generated token is not sent."""
        return self.body.max_tokens == 0

    def request_id(self, choice: int) -> str:
        """The engine's id for an answer."""
        return self.id if self.num_choices == 1 else f"{self.id}-{choice}"

    def prompt_of(self, choice: int) -> EncodedPrompt:
        return self.prompts[choice // self.n]

    def params_of(self, choice: int) -> SamplingParams:
        """Sampling parameters of an answer; the n-th one uses seed + n, as in vLLM."""
        seed = self.params.seed
        if seed is None or self.n == 1:
            return self.params
        return replace(self.params, seed=(seed + choice % self.n) % NUM_SEEDS)


def chat_job(
    engine: AsyncEngine,
    body: ChatCompletionRequest,
    model: str,
    arrival: float,
    *,
    tool_prompt: bool = True,
    plain_tool_calls: bool = True,
) -> Job:
    """Convert a conversation to a job.

    `tool_prompt`: whether to describe tools in the prompt if the template has no place for them.
    `plain_tool_calls`: whether an answer that is one JSON object may be a call.
    """
    text = engine.text
    tokenizer = text.tokenizer
    tools = _plain_tools(body)
    choice: Any = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        choice = choice.model_dump()
    check_tools(tools, choice)
    max_tokens = body.max_completion_tokens or body.max_tokens
    kept = _num_kept(engine, body, max_tokens)
    chat = encode_chat(text, body, tool_prompt, engine.max_model_len if kept is None else None)
    prediction = body.prediction and tokenizer.encode(
        body.prediction.text, add_special_tokens=False
    )
    prompt = EncodedPrompt(
        text=chat.text,
        token_ids=chat.token_ids,
        arrival=arrival,
        tokenized=engine.clock(),
        is_plain=body.continue_final_message,
        runs=chat.runs,
        prediction_token_ids=(prediction or [])[: engine.max_model_len],
    ).last(kept)
    source = _template_source(text, body)
    format = grammar = None
    # The object would be only a part of a forced call or of a continued answer.
    is_free = choice in (None, "auto") and not body.continue_final_message
    if tools and choice != "none":
        format = tool_format(source)
        several = body.parallel_tool_calls
        grammar = call_grammar(tools, choice, several, format, _control_tokens(tokenizer))
    effort = {*_effort_variables(source, body)}
    if "enable_thinking" in effort:
        effort.add("reasoning_effort")
    tags = text.chat_template.think_tags
    # A truncated prompt has no text.
    ending = prompt.text or tokenizer.decode(
        prompt.token_ids[-TAG_TOKENS:], skip_special_tokens=False
    )
    return Job(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        operation="chat",
        model=model,
        prompts=[prompt],
        params=_params(
            body,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=one_constraint(body, grammar),
        ),
        n=body.n or 1,
        body=body,
        reader=Reader(
            tags,
            thinking=bool(tags and opens_thinking(ending, tags)),
            tool_format=format,
            tools=tools or (),
            plain_tools=tools if is_free and plain_tool_calls else (),
            keep_reasoning=body.include_reasoning,
            markers=_markers(tokenizer, tags, format),
        ),
        unread=[name for name in unread_fields(body) if name not in effort],
        fingerprint=_fingerprint(engine),
    )


def encode_chat(
    text: ModelText,
    body: ChatCompletionRequest | TokenizeRequest,
    tool_prompt: bool,
    max_tokens: int | None,
) -> ChatPrompt:
    """A conversation in the chat template's format, refused if it has more than `max_tokens`."""
    tools = _plain_tools(body)
    own_place = text.chat_template.supports_tools
    if tools and not own_place and not tool_prompt:
        raise InvalidRequestError(
            "The model's chat template has no place for tools.", "Leave out `tools`."
        )
    messages: Any = _template_messages(body.messages or ())
    messages = with_argument_objects(messages) if own_place else with_tool_prompt(messages, tools)
    variables = plain_json("chat_template_kwargs", body.chat_template_kwargs or {})
    reserved = sorted(RESERVED & set(variables))
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs has the key {reserved[0]!r}.", "Use another name for it."
        )
    variables = _effort_variables(_template_source(text, body), body) | variables
    if body.continue_final_message:
        variables["continue_final_message"] = True
    elif not body.add_generation_prompt:
        variables["add_generation_prompt"] = False
    return text.encode_chat(messages, tools if own_place and tools else None, variables, max_tokens)


def completion_job(engine: AsyncEngine, body: CompletionRequest, model: str, arrival: float) -> Job:
    """Convert prompts to complete to a job."""
    text = engine.text
    prompts = prompt_list(body.prompt)
    limit = engine.max_model_len
    max_tokens = 16 if body.max_tokens is None else max(1, body.max_tokens)
    kept = _num_kept(engine, body, max_tokens)
    longest = max((len(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
    # This check comes before any work on the tokens.
    if limit is not None and kept is None and longest > limit:
        raise ContextLengthError(
            f"The prompt has {longest} tokens; the context holds {limit}, the answer's first "
            "token included.",
            f"Shorten the prompt by {longest - limit + 1} tokens or more.",
        )

    def encode(prompt: Any) -> EncodedPrompt:
        if body.suffix is None:
            encoded = text.encode(prompt, limit if kept is None else None)
        elif isinstance(prompt, str):
            metadata = text.checkpoint.metadata
            encoded = None, infill_prompt(text.tokenizer, metadata, prompt, body.suffix, limit)
        else:
            raise InvalidRequestError(
                "`suffix` is given with a prompt of token ids.", "Send the prompt as text."
            )
        return EncodedPrompt(*encoded, arrival, engine.clock(), is_plain=True).last(kept)

    n = max(body.n or 1, body.best_of or 1)
    ranks = n > (body.n or 1)
    params = _params(
        body,
        max_tokens=max_tokens,
        logprobs=0 if ranks and body.logprobs is None else body.logprobs,
        structured_outputs=one_constraint(body),
    )
    if body.suffix is not None:
        ends = [*(params.stop_token_ids or ()), *infill_ends(text.tokenizer)]
        params = replace(params, stop_token_ids=ends or None)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    return Job(
        id=f"cmpl-{secrets.token_hex(16)}",
        operation="text_completion",
        model=model,
        prompts=list(map(encode, prompts)),
        params=params,
        n=n,
        body=body,
        unread=unread_fields(body),
        fingerprint=_fingerprint(engine),
    )


def prompt_list(prompt: Any) -> list[Any]:
    """The prompts or texts of a request, which may give a single one, as text or token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def count_prompts(body: CompletionRequest, limit: int) -> int:
    """Number of prompts in a request, which must be from 1 to `limit`."""
    count = len(prompt_list(body.prompt))
    if not 0 < count <= limit:
        raise InvalidRequestError(
            f"`prompt` has {count} prompts.", f"Use 1 to {limit} in a request."
        )
    return count


def num_characters(body: GenerationRequest) -> int:
    """The length of a request's texts; each text counts at least a share of the inline limit."""
    texts: list[Any] = []
    if isinstance(body, CompletionRequest):
        texts = [*prompt_list(body.prompt), body.suffix or ""]
    elif isinstance(body, ChatCompletionRequest):
        for message in body.messages:
            content = message.content or ""
            texts += [content] if isinstance(content, str) else [part.text for part in content]
            texts += [call.function.arguments for call in message.tool_calls or ()]
        texts += [body.prediction.text] if body.prediction else []
        # Compiling a grammar takes longer than encoding its text.
        texts += [" " * MAX_INLINE_CHARACTERS] if body.tools else []
    return sum(map(len, texts)) + len(texts) * (MAX_INLINE_CHARACTERS // MAX_INLINE_TEXTS)


def with_defaults(body: Body, defaults: Mapping[str, float]) -> Body:
    """The request with the server's default sampling values filled in."""
    missing = {name: value for name, value in defaults.items() if getattr(body, name) is None}
    if getattr(body, "max_completion_tokens", None) is not None:
        missing.pop("max_tokens", None)
    return body.model_copy(update=missing) if missing else body


def _num_kept(engine: AsyncEngine, body: GenerationRequest, max_tokens: int | None) -> int | None:
    """Number of tokens to keep at the prompt's end; None for all."""
    kept = body.truncate_prompt_tokens
    limit = engine.max_model_len or 0
    return max(1, limit - (max_tokens or 1)) if kept == -1 else kept


def _template_source(text: ModelText, body: ChatCompletionRequest | TokenizeRequest) -> str:
    template = text.chat_template
    return template.tool_source if body.tools else template.source


def _effort_variables(source: str, body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """The template's variables for effort and verbosity; omitted if the template lacks them."""
    given = {name: getattr(body, name, None) for name in ("reasoning_effort", "verbosity")}
    variables: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None and name in source
    }
    if given["reasoning_effort"] == "none" and "enable_thinking" in source:
        variables["enable_thinking"] = False
    return variables


def _template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: only given fields, and "developer" as "system"."""
    plain = []
    for message in messages:
        given = {"content": None, **message.model_dump(exclude_none=True)}
        plain.append(given | {"role": "system"} if message.role == "developer" else given)
    return plain


def _plain_tools(body: ChatCompletionRequest | TokenizeRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def _params(body: GenerationRequest, **others: Any) -> SamplingParams:
    """The request's fields of `SamplingParams`; `others` have other names in the request."""
    names = {each.name for each in fields(SamplingParams)} & type(body).model_fields.keys()
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    seed = None if body.seed is None else body.seed % NUM_SEEDS
    return SamplingParams(**{**given, "seed": seed, "n": 1, **others})


def _fingerprint(engine: AsyncEngine) -> str:
    decides = f"{__version__};{engine.facts.kv_fingerprint}" if engine.facts else ""
    return f"fp_{hashlib.sha256(decides.encode()).hexdigest()[:10]}"


def _markers(
    tokenizer: Tokenizer, tags: ThinkTags | None, format: ToolFormat | None
) -> frozenset[int]:
    """Control tokens around thinking and calls, which stay in the text until it is divided."""
    texts = [tags.start, tags.end, tags.without] if tags else []
    texts += [format.begin.strip(), format.close.strip(), format.quote] if format else []
    found = {(i, text) for text in texts for i in tokenizer.encode(text, add_special_tokens=False)}
    return frozenset(
        i
        for i, text in found
        if tokenizer.is_special(i) and tokenizer.token_bytes(i).decode() in text
    )


def _control_tokens(tokenizer: Tokenizer) -> Callable[[str], int | None]:
    def find(text: str) -> int | None:
        token_id = tokenizer.token_id(text)
        return token_id if token_id is not None and tokenizer.is_special(token_id) else None

    return find
