"""From a request of the API to what the engine is asked: prompts, sampling parameters, and how answers are read.

Not for running it (`answers.py`) nor for the shapes of replies (`replies.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from twinphase import __version__
from twinphase.constraint import StructuredOutputsParams, plain_json
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
from twinphase.server.reasoning import ReasoningSplitter
from twinphase.server.strict import unread_fields
from twinphase.server.tool_calls import ToolCallParser
from twinphase.server.tool_prompt import with_argument_objects, with_tool_prompt
from twinphase.server.tools import ToolFormat, check_tools, tool_format, tool_grammar
from twinphase.tokenizer.infill import infill_ends, infill_prompt
from twinphase.tokenizer.think_tags import ThinkTags, opens_thinking
from twinphase.tokenizer.tokenizer import Tokenizer

Body = TypeVar("Body", bound=GenerationRequest)

READ_AT_ONCE = (
    64  # messages and their parts; more are read by a thread, so that others' answers go on
)
ENDING = 64  # tokens that hold a tag and the white space behind it
NUM_SEEDS = 2**64  # that the engine's draws tell apart
# Messages, tools and variables, as `AsyncEngine.encode_chat` takes them.
TemplateInputs = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]
# Variables of a template that are not the client's: they have fields of their own, or rendering
# takes these names.
RESERVED = frozenset(
    ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"]
    + ["self", "template", "tokenizer", "text", "control", "max_tokens", "continue_final_message"]
)


@dataclass(frozen=True)
class Reader:
    """How the text of an answer is read; each answer gets parsers of its own.

    Attributes:
        tags: of thinking, if the model thinks.
        thinking: whether the prompt ends inside the thinking part.
        markers: control tokens that stand around thinking and calls; the parsers have to see them.
    """

    tags: ThinkTags | None = None
    thinking: bool = False
    tool_format: ToolFormat | None = None
    keep_reasoning: bool = True
    markers: frozenset[int] = frozenset()

    def splitter(self) -> ReasoningSplitter | None:
        return ReasoningSplitter(self.tags, self.thinking) if self.tags else None

    def tool_parser(self) -> ToolCallParser | None:
        return ToolCallParser(self.tool_format) if self.tool_format else None


@dataclass(frozen=True)
class Job:
    """One request of the API.

    Attributes:
        operation: "chat" or "text_completion", OpenTelemetry's words.
        created: Unix seconds.
        prompts: each is answered `n` times.
        num_shown: of these, the best so many are told.
        hides_logprobs: they serve to tell the best only.
        params: of every answer, but for the seed.
        cache_salt: as the client gave it.
        prompt_only: the one token that the engine cannot do without is kept from the client.
        unread: the fields of the request that change nothing.
        fingerprint: names what decides an answer's bits beside the request.
    """

    id: str
    operation: str
    created: int
    model: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    n: int
    priority: int
    cache_salt: str | None
    reader: Reader = Reader()
    echo: bool = False
    prompt_only: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_progress: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    unread: Sequence[str] = ()
    num_shown: int | None = None
    hides_logprobs: bool = False
    fingerprint: str | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def request_id(self, choice: int) -> str:
        """The engine's name for an answer."""
        return self.id if self.num_choices == 1 else f"{self.id}-{choice}"

    def prompt_of(self, choice: int) -> EncodedPrompt:
        return self.prompts[choice // self.n]

    def params_of(self, choice: int) -> SamplingParams:
        """Sampling parameters of an answer: the n-th answer with a seed is drawn with seed + n, as vLLM does."""
        seed = self.params.seed
        if seed is None or self.n == 1:
            return self.params
        return replace(self.params, seed=(seed + choice % self.n) % NUM_SEEDS)


async def chat_job(
    engine: AsyncEngine,
    body: ChatCompletionRequest,
    model: str,
    arrival: float,
    *,
    tool_prompt: bool = True,
) -> Job:
    """A conversation to answer. `tool_prompt`: describe tools in the prompt if the template has no place for them."""
    template = engine.text.chat_template
    tokenizer = engine.text.tokenizer
    choice: Any = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        choice = choice.model_dump()

    def read() -> tuple[list[dict[str, Any]], TemplateInputs]:
        tools = _plain_tools(body)
        if tools:
            check_tools(tools, choice)
        return tools, template_inputs(engine.text, body, tool_prompt)

    tools, inputs = read() if _is_short(body) else await asyncio.to_thread(read)
    limit = (
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    )
    kept = _num_kept(engine, body, limit)
    prompt = await engine.encode_chat(*inputs, arrival, last=kept)
    if body.continue_final_message:  # the answer goes on in its text
        prompt = replace(prompt, is_plain=True)
    if body.prediction is not None:
        prompt = await _with_prediction(engine, prompt, body.prediction.text)
    source = template.tool_source if tools else template.source
    format = tool_format(source) if tools else None
    tags = template.think_tags
    text = prompt.text or tokenizer.decode(
        prompt.token_ids[-ENDING:], skip_special_tokens=False
    )  # if truncated
    thinking = bool(tags and opens_thinking(text, tags))
    grammar = None
    if format is not None and choice != "none":
        grammar = tool_grammar(
            tools, choice, body.parallel_tool_calls, format, _control_tokens(tokenizer)
        )
    else:
        format = None
    output = one_constraint(body, grammar)
    effort = effort_variables(source, body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(
        body, limit, logprobs, output, thinking_token_budget=body.thinking_token_budget
    )
    return Job(
        f"chatcmpl-{secrets.token_hex(16)}",
        "chat",
        int(time.time()),
        model,
        [prompt],
        params,
        body.n or 1,
        body.priority,
        body.cache_salt,
        Reader(tags, thinking, format, body.include_reasoning, _markers(tokenizer, tags, format)),
        **_extras(
            engine, body, {*effort, *(["reasoning_effort"] if "enable_thinking" in effort else [])}
        ),
    )


def count_prompts(body: CompletionRequest, limit: int) -> int:
    """Number of prompts in a request, which has to be at least 1 and at most `limit`."""
    count = len(_prompt_list(body.prompt))
    if not 0 < count <= limit:
        raise InvalidRequestError(
            f"`prompt` has {count} prompts.", f"Use 1 to {limit} in a request."
        )
    return count


def template_inputs(
    text: ModelText, body: ChatCompletionRequest | TokenizeRequest, tool_prompt: bool
) -> TemplateInputs:
    """What the model's chat template is given: messages, tools if it has a place for them, further variables."""
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
    source = text.chat_template.tool_source if tools else text.chat_template.source
    variables = effort_variables(source, body) | variables
    if body.continue_final_message:
        variables["continue_final_message"] = True
    elif not body.add_generation_prompt:
        variables["add_generation_prompt"] = False
    return messages, tools if own_place and tools else None, variables


def effort_variables(source: str, body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """What a template with this source is told of how much to think and to say; nothing, where it has no such thing."""
    if not isinstance(body, ChatCompletionRequest):
        return {}
    given = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    told: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None and name in source
    }
    if body.reasoning_effort == "none" and "enable_thinking" in source:
        told["enable_thinking"] = False
    return told


async def completion_job(
    engine: AsyncEngine, body: CompletionRequest, model: str, arrival: float
) -> Job:
    prompts = _prompt_list(body.prompt)
    limit = engine.max_model_len
    max_tokens = 16 if body.max_tokens is None else max(1, body.max_tokens)
    kept = _num_kept(engine, body, max_tokens)
    longest = max((len(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
    if (
        limit is not None and kept is None and longest > limit
    ):  # before anything is done with that many
        raise ContextLengthError(
            f"The prompt has {longest} tokens; the context holds {limit}, the answer's first "
            "token included.",
            f"Shorten the prompt by {longest - limit + 1} tokens or more.",
        )
    encoded = []
    for prompt in prompts:
        if body.suffix is None:
            encoded.append(await engine.encode(prompt, arrival, last=kept))
        else:
            encoded.append(await _infill(engine, prompt, body.suffix, arrival))
        await asyncio.sleep(0)  # others' answers go on
    n = max(body.n or 1, body.best_of or 1)
    shown = body.n or 1
    params = _params(body, max_tokens, body.logprobs, one_constraint(body))
    if n > shown and params.logprobs is None:
        params = replace(params, logprobs=0)
    if body.suffix is not None:
        ends = [*(params.stop_token_ids or ()), *infill_ends(engine.text.tokenizer)]
        params = replace(params, stop_token_ids=ends or None)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    return Job(
        f"cmpl-{secrets.token_hex(16)}",
        "text_completion",
        int(time.time()),
        model,
        encoded,
        params,
        n,
        body.priority,
        body.cache_salt,
        num_shown=shown,
        hides_logprobs=body.logprobs is None,
        echo=bool(body.echo),
        prompt_only=body.max_tokens == 0,
        **_extras(engine, body),
    )


async def _infill(engine: AsyncEngine, prompt: Any, suffix: str, arrival: float) -> EncodedPrompt:
    """The prompt for what stands between two texts."""
    if not isinstance(prompt, str):
        raise InvalidRequestError(
            "`suffix` is given with a prompt of token ids.", "Send the prompt as text."
        )
    limit = engine.max_model_len
    text = engine.text
    make = partial(infill_prompt, text.tokenizer, text.checkpoint.metadata, prompt, suffix, limit)
    token_ids = (
        make()
        if len(prompt) + len(suffix) <= MAX_INLINE_CHARACTERS
        else await asyncio.to_thread(make)
    )
    return EncodedPrompt(None, token_ids, arrival, engine.clock(), True)


def _num_kept(engine: AsyncEngine, body: GenerationRequest, max_tokens: int | None) -> int | None:
    """How many of a prompt's last tokens are read; None for all."""
    kept = body.truncate_prompt_tokens
    limit = engine.max_model_len
    return max(1, (limit or 0) - (max_tokens or 1)) if kept == -1 else kept


def with_defaults(body: Body, defaults: Mapping[str, float] | None) -> Body:
    """The request with the server's sampling values where it gives none."""
    missing = {
        name: value for name, value in (defaults or {}).items() if getattr(body, name) is None
    }
    if getattr(body, "max_completion_tokens", None) is not None:
        missing.pop("max_tokens", None)
    return body.model_copy(update=missing) if missing else body


def within_context(job: Job, limit: int | None) -> Job:
    """The job with answers that may go on to the context's end, where they may be longer than that."""
    asked = job.params.max_tokens
    longest = max(len(prompt.token_ids) for prompt in job.prompts)
    if asked is None or limit is None or longest + asked <= limit:
        return job
    return replace(job, params=replace(job.params, max_tokens=None))


def _template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: without what was not sent, "developer" as "system"."""
    plain = []
    for message in messages:
        fields = message.model_dump(exclude_none=True)
        fields["role"] = "system" if message.role == "developer" else message.role
        fields.setdefault("content", None)
        plain.append(fields)
    return plain


def _prompt_list(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if prompt and isinstance(prompt[0], int) else list(prompt)


def _plain_tools(body: ChatCompletionRequest | TokenizeRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


async def _with_prediction(engine: AsyncEngine, prompt: EncodedPrompt, text: str) -> EncodedPrompt:
    """The prompt, and as much of the expected answer as the context could hold."""
    encode = partial(engine.text.tokenizer.encode, text, add_special_tokens=False)
    token_ids = encode() if len(text) <= MAX_INLINE_CHARACTERS else await asyncio.to_thread(encode)
    return replace(
        prompt, prediction_token_ids=token_ids[: engine.max_model_len], tokenized=engine.clock()
    )


def _is_short(body: ChatCompletionRequest) -> bool:
    parts = sum(
        len(message.content) for message in body.messages if isinstance(message.content, list)
    )
    return not body.tools and len(body.messages) + parts <= READ_AT_ONCE


def _extras(
    engine: AsyncEngine, body: GenerationRequest, read: Collection[str] = ()
) -> dict[str, Any]:
    options = body.stream_options
    decides = f"{__version__};{engine.facts.kv_fingerprint}" if engine.facts else ""
    return {
        "fingerprint": f"fp_{hashlib.sha256(decides.encode()).hexdigest()[:10]}",
        "include_usage": options is not None and options.include_usage,
        "continuous_usage": options is not None
        and options.include_usage
        and options.continuous_usage_stats,
        "return_progress": body.return_progress,
        "return_token_ids": body.return_token_ids,
        "return_tokens_as_token_ids": body.return_tokens_as_token_ids,
        "unread": [name for name in unread_fields(body) if name not in read],
    }


def _params(
    body: GenerationRequest,
    max_tokens: int | None,
    logprobs: int | None,
    structured_outputs: StructuredOutputsParams | None,
    **others: Any,
) -> SamplingParams:
    names = (
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "min_tokens",
        "ignore_eos",
        "prompt_logprobs",
        "bad_words",
        "allowed_token_ids",
        "include_stop_str_in_output",
    )
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    seed = None if body.seed is None else body.seed % NUM_SEEDS
    return SamplingParams(
        **given,
        seed=seed,
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured_outputs,
        **others,
    )


def _markers(
    tokenizer: Tokenizer, tags: ThinkTags | None, format: ToolFormat | None
) -> frozenset[int]:
    """The control tokens in what divides an answer, which stay in its text until it is divided."""
    texts = [tags.start, tags.end, tags.without] if tags else []
    texts += [format.begin.strip(), format.close.strip()] if format else []
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
