"""Ollama's API: translates requests to OpenAI's, and writes lines of JSON.

Ollama's `prompt_eval` and `eval` are prefill and decode, with times from the ledger. The server
serves one model, so nothing is pulled, created or unloaded, and options about running a model have
no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from twinphase import __version__
from twinphase.errors import InvalidRequestError
from twinphase.phases.report import DECODE_KINDS, PREFILL_KINDS
from twinphase.phases.timeline import IntervalKind
from twinphase.server.answers import Choice, Delta
from twinphase.server.dialects.ollama_types import (
    EmbedRequest,
    Generating,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaErrorResponse,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
    ShowRequest,
)
from twinphase.server.dialects.words import json_form
from twinphase.server.embeddings import Embeddings
from twinphase.server.generation import Generation, within_context
from twinphase.server.jobs import Job
from twinphase.server.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    Sampling,
)
from twinphase.server.problems import Problem, validated
from twinphase.server.replies import ChatReplies, encode
from twinphase.server.service import Service
from twinphase.server.text_routes import documented
from twinphase.server.tool_calls import ToolCall, call_of

BEFORE_KINDS = (IntervalKind.TOKENIZE, IntervalKind.ROUTE, IntervalKind.QUEUE)
STREAM = "application/x-ndjson"
ERRORS, ANSWER = documented(OllamaErrorResponse, STREAM)
# Ollama's date for a model that stays loaded.
NEVER_EXPIRES = "2318-01-01T00:00:00Z"
# This exceeds any context, so the answer ends at `num_ctx`.
UNLIMITED_TOKENS = 2**31 - 1
DEFAULT_NUM_CTX = 4096  # This is Ollama's default.


def ollama_shape(problem: Problem) -> dict[str, Any]:
    return {"error": problem.message}


# Requests as OpenAI's.


def _common(service: Service, body: Generating, *, is_chat: bool) -> dict[str, Any]:
    """Fields common to chats and to prompts without a chat template."""
    options = (body.options or Options()).model_dump(exclude_none=True)
    names = {*Sampling.model_fields, "repetition_penalty", "presence_penalty", "frequency_penalty"}
    fields = {name: value for name, value in options.items() if name in names}
    if fields.get("seed") == -1:
        del fields["seed"]
    most = options.get("num_predict", -1)
    fields |= {"model": served_name(service, body.model), "stream": body.stream is not False}
    fields["return_progress"] = body.return_progress
    unlimited = service.sampling_defaults.values.get("max_tokens", UNLIMITED_TOKENS)
    fields["max_tokens"] = most if most > 0 else unlimited
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        fields["response_format"] = json_form(body.format)
    if body.logprobs:
        fields |= (
            {"logprobs": True, "top_logprobs": body.top_logprobs}
            if is_chat
            else {"logprobs": body.top_logprobs or 0}
        )
    if is_chat:
        fields |= _thinking(service, body)
    return fields


def _within_num_ctx(service: Service, body: Generating, job: Job) -> Job:
    """Limit prompt and answer to `num_ctx` tokens together, if the client set no limit.

    A longer prompt is not cut; its answer may then have `num_ctx` tokens.
    """
    if job.params.max_tokens == UNLIMITED_TOKENS:
        asked = (body.options and body.options.num_ctx) or 0
        num_ctx = asked if asked > 0 else DEFAULT_NUM_CTX
        longest = max(len(prompt.token_ids) for prompt in job.prompts)
        left = num_ctx - longest if longest < num_ctx else num_ctx
        job = replace(job, params=replace(job.params, max_tokens=left))
    return within_context(service, job)


def _thinking(service: Service, body: Generating) -> dict[str, Any]:
    """Whether and how much to think; like Ollama, refuse it for a model that cannot."""
    if not body.think:
        return {} if body.think is None else {"reasoning_effort": "none"}
    if service.host.text.chat_template.think_tags is None:
        raise InvalidRequestError(
            f"{body.model!r} does not support thinking.", "Leave out `think`."
        )
    return (
        {"chat_template_kwargs": {"enable_thinking": True}}
        if body.think is True
        else {"reasoning_effort": body.think}
    )


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            fields["tool_calls"] = [
                call_of(
                    call.id or f"call_{number}",
                    call.function.name,
                    json.dumps(call.function.arguments),
                )
                for number, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            fields |= {"tool_call_id": message.tool_call_id, "name": message.tool_name}
        yield fields


def served_name(service: Service, name: str) -> str:
    """The name without the tag that Ollama's clients add to names that have none."""
    plain = name.removesuffix(":latest")
    return plain if name not in service.model_names and plain in service.model_names else name


# How answers are written.


def _iso(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


class _OllamaReplies(ChatReplies):
    """Lines of JSON; the last line has the timings."""

    stream_type = STREAM

    def chunk(self, delta: Delta) -> bytes:
        lines = b""
        if progress := self.progress(delta):
            piece = self.piece("", "", [])
            lines = encode({**self.head(), **piece, "done": False, **progress}) + b"\n"
        if delta.num_prefilled is not None or delta.is_empty:
            return lines
        choice = delta.choice
        calls = choice.tool_calls if delta.finished else []  # Ollama sends only complete calls.
        logprobs = {"logprobs": self._logprobs(delta.logprobs)} if delta.logprobs else {}
        if delta.content or delta.reasoning or calls or logprobs:
            piece = self.piece(delta.content, delta.reasoning, calls)
            lines += encode({**self.head(), **piece, "done": False, **logprobs}) + b"\n"
        if delta.finished:
            lines += encode({**self.head(), **self.piece("", "", []), **self._done(choice)}) + b"\n"
        return lines

    def end(self) -> bytes:
        return b""

    def failure(self, problem: bytes) -> bytes:
        return problem + b"\n"

    def body(self) -> dict[str, Any]:
        (choice,) = self.choices
        reasoning = choice.reasoning if self.job.reader.keep_reasoning else ""
        logprobs = {"logprobs": self._logprobs(choice.logprobs)} if choice.logprobs else {}
        answer = self.piece(choice.content, reasoning, choice.tool_calls)
        return {**self.head(), **answer, **self._done(choice), **logprobs}

    def head(self) -> dict[str, Any]:
        return {"model": self.job.model, "created_at": _iso(datetime.now(UTC))}

    def piece(self, content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """The fields of an answer or of a part of it."""
        raise NotImplementedError

    def _done(self, choice: Choice) -> dict[str, Any]:
        """Durations in nanoseconds; `load_duration` is tokenizing and queueing."""
        timeline = choice.record.timeline
        totals = timeline.totals()
        prefill, decode = (
            sum(totals[kind] for kind in kinds) for kinds in (PREFILL_KINDS, DECODE_KINDS)
        )
        before = sum(totals[kind] for kind in BEFORE_KINDS)
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": _ns(timeline.end - timeline.arrival),
            "load_duration": _ns(before),
            "prompt_eval_count": choice.record.counts.num_prompt_tokens,
            "prompt_eval_duration": _ns(prefill),
            "eval_count": len(choice.token_ids),
            "eval_duration": _ns(decode),
            **self._reports(choice),
        }


class OllamaChatReplies(_OllamaReplies):
    """Replies of /api/chat."""

    def piece(self, content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= {"thinking": reasoning} if reasoning else {}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": index, "name": call.name, "arguments": call.given},
                }
                for index, call in enumerate(calls)
            ]
        return {"message": message}


class OllamaGenerateReplies(_OllamaReplies):
    """Replies of /api/generate."""

    def piece(self, content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        return {"response": content, **({"thinking": reasoning} if reasoning else {})}


class OllamaEmbeddings(Embeddings):
    """Replies of /api/embed, and of /api/embeddings for `old` clients."""

    def __init__(self, service: Service, body: EmbeddingRequest, *, old: bool) -> None:
        super().__init__(service, body)
        self._old = old

    def _reply(self, vectors: Sequence[Sequence[float]], num_tokens: int) -> dict[str, Any]:
        if self._old:
            return {"embedding": vectors[0]}
        return {
            "model": self._body.model,
            "embeddings": vectors,
            "total_duration": _ns(perf_counter() - self._arrival),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


# The model, as Ollama lists it.


def _described(service: Service, name: str) -> dict[str, Any]:
    checkpoint = service.host.text.checkpoint
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(service),
        "size": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "digest": checkpoint.fingerprint,
        "details": _details(service),
    }


def _modified_at(service: Service) -> str:
    return _iso(datetime.fromtimestamp(service.host.text.checkpoint.path.stat().st_mtime, UTC))


def _details(service: Service) -> dict[str, Any]:
    checkpoint = service.host.text.checkpoint
    count = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    family = checkpoint.architecture
    return {
        "parent_model": "",
        "format": "gguf" if checkpoint.config is None else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": service.host.text.quantization,
    }


def _shown(service: Service) -> dict[str, Any]:
    text = service.host.text
    facts = service.facts
    checkpoint = text.checkpoint
    info: dict[str, Any] = dict(checkpoint.metadata) or dict(checkpoint.config or {})
    info["general.architecture"] = checkpoint.architecture
    if facts is not None:
        # This is the served context, not the model's.
        info[f"{checkpoint.architecture}.context_length"] = facts.config.max_model_len
    capabilities = ["embedding" if service.host.task == "embed" else "rerank"]
    source = ""
    if service.host.task == "generate":
        template = text.chat_template
        capabilities = ["completion"]
        source = template.source
        capabilities += ["tools"] if template.supports_tools or service.config.tool_prompt else []
        capabilities += ["thinking"] if template.think_tags is not None else []
    return {
        "license": "",
        "modelfile": f"FROM {service.model_names[0]}\n",
        "parameters": "",
        "template": source,
        "details": _details(service),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": _modified_at(service),
    }


# Routes.


def add_ollama(api: APIRouter, service: Service) -> None:
    _add_generating(api, service)
    _add_embedding(api, service)
    _add_models(api, service)


def _add_generating(api: APIRouter, service: Service) -> None:
    def loaded(body: Generating, piece: Mapping[str, Any]) -> Response:
        """The reply to an empty request, which clients use to load a model."""
        service.check_model(served_name(service, body.model))
        service.require_engine()
        line = {
            "model": body.model,
            "created_at": _iso(datetime.now(UTC)),
            **piece,
            "done": True,
            "done_reason": "load",
        }
        streamed = body.stream is not False
        return Response(
            encode(line) + b"\n" * streamed, media_type=STREAM if streamed else "application/json"
        )

    @api.post("/api/chat", responses=ANSWER, response_class=Response)
    async def ollama_chat(body: OllamaChatRequest) -> Response:
        """Answer a conversation, as Ollama's API does."""
        adjust = partial(_within_num_ctx, service, body)
        if not body.messages:
            return loaded(body, {"message": {"role": "assistant", "content": ""}})
        fields = _common(service, body, is_chat=True) | {"messages": list(_messages(body.messages))}
        fields["tools"] = body.tools or None
        return Generation(
            service, validated(ChatCompletionRequest, fields), OllamaChatReplies, adjust
        )

    @api.post("/api/generate", responses=ANSWER, response_class=Response)
    async def ollama_generate(body: OllamaGenerateRequest) -> Response:
        """Answer one prompt, as Ollama's API does."""
        adjust = partial(_within_num_ctx, service, body)
        if not body.prompt and not body.suffix:
            return loaded(body, {"response": ""})
        if body.raw or body.suffix:
            if body.system or body.think:
                raise InvalidRequestError(
                    "`raw` and `suffix` do not go with `system` or `think`.", "Drop one of them."
                )
            fields = _common(service, body, is_chat=False) | {"prompt": body.prompt}
            fields |= {"suffix": body.suffix} if body.suffix else {}
            return Generation(
                service, validated(CompletionRequest, fields), OllamaGenerateReplies, adjust
            )
        system = [{"role": "system", "content": body.system}] if body.system else []
        fields = _common(service, body, is_chat=True)
        fields["messages"] = [*system, {"role": "user", "content": body.prompt}]
        return Generation(
            service, validated(ChatCompletionRequest, fields), OllamaGenerateReplies, adjust
        )


def _add_embedding(api: APIRouter, service: Service) -> None:
    def vectors(model: str, given: Any, dimensions: int | None, *, old: bool) -> Response:
        fields = {"model": served_name(service, model), "input": given, "dimensions": dimensions}
        return OllamaEmbeddings(service, validated(EmbeddingRequest, fields), old=old)

    @api.post("/api/embed", responses=ERRORS, response_class=Response)
    async def ollama_embed(body: EmbedRequest) -> Response:
        """Turn one text, or several, into vectors, as Ollama's API does."""
        return vectors(body.model, body.input, body.dimensions, old=False)

    @api.post("/api/embeddings", responses=ERRORS, response_class=Response)
    async def ollama_embeddings(body: OldEmbedRequest) -> Response:
        """Turn a text into a vector, as Ollama's older API does."""
        return vectors(body.model, body.prompt, None, old=True)


def _add_models(api: APIRouter, service: Service) -> None:
    @api.get("/api/version", responses=ERRORS)
    async def ollama_version() -> dict[str, str]:
        """The version of twinphase."""
        return {"version": __version__}

    @api.get("/api/tags", responses=ERRORS)
    async def ollama_tags() -> dict[str, Any]:
        """List the model's names, as Ollama's API does."""
        return {"models": [_described(service, name) for name in service.model_names]}

    @api.get("/api/ps", responses=ERRORS)
    async def ollama_ps() -> dict[str, Any]:
        """List the model's names if it is loaded."""
        facts = service.facts
        if facts is None or not service.host.is_running:
            return {"models": []}
        now = {
            "expires_at": NEVER_EXPIRES,
            "size_vram": 0,
            "context_length": facts.config.max_model_len,
        }
        return {"models": [{**_described(service, name), **now} for name in service.model_names]}

    @api.post("/api/show", responses=ERRORS, response_class=Response)
    async def ollama_show(body: ShowRequest) -> Response:
        """Describe the model, as Ollama's API does."""
        service.check_model(served_name(service, body.model or body.name or service.model_names[0]))
        return JSONResponse(_shown(service))
