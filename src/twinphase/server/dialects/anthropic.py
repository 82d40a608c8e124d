"""Anthropic's Messages API: translates requests to OpenAI's, and writes events and bodies.

Requests consist of text blocks, tools and tool results; images and documents are refused. Prefixes
are always cached, so `cache_control` is not needed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from twinphase.server.answers import Delta
from twinphase.server.dialects.anthropic_types import (
    AnthropicErrorResponse,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from twinphase.server.dialects.words import content_of, json_form, tool_named
from twinphase.server.generation import Generation, within_context
from twinphase.server.jobs import Job, encode_chat
from twinphase.server.openai_types import ChatCompletionRequest
from twinphase.server.problems import Problem, validated
from twinphase.server.replies import Replies, encode
from twinphase.server.service import Service
from twinphase.server.text_routes import documented
from twinphase.server.tool_calls import call_of

# Anthropic's error type for each status.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ERRORS, ANSWER = documented(AnthropicErrorResponse)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_shape(problem: Problem) -> dict[str, Any]:
    kind = TYPES.get(
        problem.status, "invalid_request_error" if problem.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


# Requests as OpenAI's.


def _chat(body: CountTokensRequest, thinks: bool) -> ChatCompletionRequest:
    """The request as an OpenAI chat; `thinks`: whether the model thinks before it answers."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": list(_messages(body)),
        **_tools(body),
    }
    form = (body.output_config and body.output_config.format) or body.output_format
    if form is not None:
        fields["response_format"] = json_form(form.schema_)
    variables: dict[str, Any] = {}
    thinking = body.thinking
    effort = body.output_config and body.output_config.effort
    if thinking is not None and thinks:
        fields["thinking_token_budget"] = thinking.budget_tokens
        fields["include_reasoning"] = thinking.display != "omitted"
        if thinking.type == "disabled":
            variables["enable_thinking"] = False
    if effort is not None:
        fields["reasoning_effort"] = effort if effort in ("low", "medium") else "high"
    fields["chat_template_kwargs"] = variables or None
    if isinstance(body, MessagesRequest):
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "metadata")
        fields |= {name: getattr(body, name) for name in (*names, "return_progress")}
        fields["stop"] = body.stop_sequences or None
    if body.messages[-1].role == "assistant":  # The answer continues this message's text.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return validated(ChatCompletionRequest, fields)


def _messages(body: CountTokensRequest) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": content_of(body.system)}
    for turn in body.messages:
        texts: list[TextBlock] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        has_results = False
        for block in turn.content:
            if isinstance(block, ToolResultBlock):
                has_results = True
                content = content_of(block.content)
                if block.is_error:  # Templates have no place for errors.
                    content = "Error: " + "\n".join(part.text for part in block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            elif isinstance(block, ToolUseBlock):
                calls.append(call_of(block.id, block.name, json.dumps(block.input)))
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            else:
                texts.append(block)
        if texts or calls or thoughts or not has_results:
            message: dict[str, Any] = {
                "role": turn.role,
                "content": content_of(texts) if texts or not calls else None,
            }
            message |= {"tool_calls": calls} if calls else {}
            message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
            yield message


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        words = {
            "auto": "auto",
            "any": "required",
            "none": "none",
            "tool": tool_named(choice.name or ""),
        }
        fields["tool_choice"] = words[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


# How answers are written.


class MessageReplies(Replies):
    """Replies of /v1/messages: lists of blocks (thinking, text, calls) in the order of the text."""

    def __init__(self, *known: Any) -> None:
        """`known` as in `Replies`."""
        super().__init__(*known)
        self._choice = self.choices[0]
        self._begun = False
        # Index of the block that is being written.
        self._index = -1
        self._kind = ""

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "request-id": self.job.id}

    def failure(self, problem: bytes) -> bytes:
        return b"event: error\ndata: " + problem + b"\n\n"

    def chunk(self, delta: Delta) -> bytes:
        events = b""
        progress = self.progress(delta)
        if not self._begun:  # The number of cached tokens is known from the first delta on.
            self._begun = True
            message = {
                **self.head(),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": self._usage(),
            }
            events += _event("message_start", message=message) + _event("ping", **progress)
        elif delta.num_prefilled is not None or progress:
            events += _event("ping", **progress)
        if delta.reasoning:
            events += self._piece(
                "thinking", {"thinking": "", "signature": ""}, {"thinking": delta.reasoning}
            )
        for call in delta.tool_calls:
            if call.id is None:  # The rest of a call comes before the text after it.
                events += self._piece("tool_use", {}, {"partial_json": call.arguments})
        if delta.content:
            events += self._piece("text", {"text": ""}, {"text": delta.content})
        for call in delta.tool_calls:
            if call.id is not None:
                start: dict[str, Any] = {"id": call.id, "name": call.name, "input": {}}
                events += self._end_block() + self._piece(
                    "tool_use", start, {"partial_json": call.arguments}
                )
        if delta.finished:
            events += self._end_block()
            reports = self._reports(self._choice)
            events += _event("message_delta", delta=self._stop(), usage=self._usage(), **reports)
        return events

    def end(self) -> bytes:
        return _event("message_stop")

    def body(self) -> dict[str, Any]:
        choice = self._choice
        blocks: list[dict[str, Any]] = []
        if choice.reasoning and self.job.reader.keep_reasoning:
            blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.content:
            blocks.append({"type": "text", "text": choice.content})
        for call in choice.tool_calls:
            blocks.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": call.given}
            )
        return {
            **self.head(),
            "content": blocks,
            **self._stop(),
            "usage": self._usage(),
            **self._reports(choice),
        }

    def head(self) -> dict[str, Any]:
        return {"id": self.job.id, "type": "message", "role": "assistant", "model": self.job.model}

    def _piece(self, kind: str, start: dict[str, Any], piece: dict[str, Any]) -> bytes:
        events = b""
        if kind != self._kind:
            events = self._end_block()
            self._index = self._index + 1
            self._kind = kind
            events += _event(
                "content_block_start", index=self._index, content_block={"type": kind, **start}
            )
        delta = {"type": "input_json_delta" if kind == "tool_use" else f"{kind}_delta", **piece}
        return events + _event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._index)

    def _stop(self) -> dict[str, Any]:
        reason = STOP_REASONS[self._choice.finish_reason or "stop"]
        sequence = self._choice.stop_reason
        if reason == "max_tokens" and self.job.params.max_tokens is None:
            reason = "model_context_window_exceeded"
        if reason != "end_turn" or not isinstance(sequence, str):
            return {"stop_reason": reason, "stop_sequence": None}
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        """Numbers of prompt tokens: read from the cache, written to it, and the rest."""
        prompt = len(self._choice.prompt.token_ids)
        cached = self._choice.record.counts.num_cached_tokens
        facts = self._service.facts
        block_size = facts.config.block_size if facts else 1
        written = max(0, prompt // block_size * block_size - cached)
        return {
            "input_tokens": prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "output_tokens": len(self._choice.token_ids),
        }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def add_messages(api: APIRouter, service: Service) -> None:
    def thinks() -> bool:
        return service.host.text.chat_template.think_tags is not None

    @api.post("/v1/messages", responses=ANSWER, response_class=Response)
    async def create_message(body: MessagesRequest) -> Response:
        """Answer a conversation, as Anthropic's API does."""

        def adjust(job: Job) -> Job:
            return replace(within_context(service, job), id=job.id.replace("chatcmpl-", "msg_"))

        return Generation(service, _chat(body, thinks()), MessageReplies, adjust)

    @api.post("/v1/messages/count_tokens", responses=ERRORS)
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Count the tokens of a conversation, as Anthropic's API does."""
        service.check_task("generate", body.model)
        known = service.config.tool_prompt, service.max_model_len
        chat = _chat(body, thinks())
        prompt = await asyncio.to_thread(encode_chat, service.host.text, chat, *known)
        return JSONResponse({"input_tokens": len(prompt.token_ids)})
