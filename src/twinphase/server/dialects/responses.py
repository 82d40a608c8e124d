"""OpenAI's Responses API: translates requests to chats, and writes events and bodies."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.server.answers import Choice, Delta
from twinphase.server.dialects.kept_responses import Kept, Responses
from twinphase.server.dialects.response_items import ResponseItems, new_id
from twinphase.server.dialects.responses_types import (
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)
from twinphase.server.dialects.words import content_of, json_form, tool_named
from twinphase.server.generation import Generation
from twinphase.server.jobs import Job
from twinphase.server.openai_types import AnyGeneration, ChatCompletionRequest
from twinphase.server.problems import validated
from twinphase.server.replies import ChatReplies, encode, usage
from twinphase.server.service import Service
from twinphase.server.text_routes import ANSWER, ERRORS
from twinphase.server.tool_calls import ToolCallDelta, call_of

LOGPROBS = "message.output_text.logprobs"


class ResponseCancelledError(TwinphaseError):
    """Another request of the same key cancelled the response."""

    http_status = 409


# Requests as chats.


def _chat(body: ResponsesRequest, before: Sequence[dict[str, Any]]) -> ChatCompletionRequest:
    """The request as a chat, after the messages `before` of the previous response."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    same = [*AnyGeneration.model_fields, "parallel_tool_calls", "chat_template_kwargs"]
    fields = {name: getattr(body, name) for name in same}
    fields |= {
        "messages": [*instructions, *before, *_messages(body)],
        "max_tokens": body.max_output_tokens,
    }
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    choice = body.tool_choice
    named = choice is not None and not isinstance(choice, str)
    fields["tool_choice"] = tool_named(choice.name) if named else choice  # type: ignore[union-attr]
    if not body.tools and choice == "auto":  # Clients send it even without tools.
        fields["tool_choice"] = None
    form = body.text.format if body.text is not None else None
    if form is not None:
        given = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        fields["response_format"] = (
            json_form(**given) if form.type == "json_schema" else {"type": form.type}
        )
    fields["verbosity"] = body.text.verbosity if body.text is not None else None
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    if LOGPROBS in body.include or body.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return validated(ChatCompletionRequest, fields)


def _messages(body: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """The input as messages; consecutive thoughts, texts and calls of the assistant are merged."""
    turn: dict[str, Any] = {}
    for item in body.input:
        theirs = isinstance(item, CallOutputItem) or (
            isinstance(item, MessageItem) and item.role != "assistant"
        )
        if turn and (
            theirs or (turn.keys() & {"content", "tool_calls"} and not isinstance(item, CallItem))
        ):
            yield _turn(turn)
            turn = {}
        if isinstance(item, CallOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output)}
        elif isinstance(item, CallItem):
            turn.setdefault("tool_calls", []).append(
                call_of(item.call_id, item.name, item.arguments)
            )
        elif isinstance(item, ReasoningItem):
            thought = "\n".join(part.text for part in item.content or item.summary)
            turn["reasoning_content"] = "\n".join(
                filter(None, [turn.get("reasoning_content"), thought])
            )
        elif theirs:
            yield {"role": item.role, "content": content_of(item.content)}
        else:
            turn["content"] = content_of(item.content)
    if turn:
        yield _turn(turn)


def _turn(fields: dict[str, Any]) -> dict[str, Any]:
    """An assistant message; its content is empty if there is neither text nor a call."""
    return {"role": "assistant", **({} if "tool_calls" in fields else {"content": ""}), **fields}


# How answers are written.


class ResponseReplies(ChatReplies):
    """Replies of /v1/responses: lists of items (reasoning, message, calls) in the text's order."""

    def __init__(
        self, body: ResponsesRequest, tenant: str, known: Responses, chat: Any, *others: Any
    ) -> None:
        """`known` keeps responses, `chat` has the messages to answer; `others` as in `Replies`."""
        super().__init__(*others)
        self._body = body
        self._tenant = tenant
        self._known = known
        self._messages = chat
        self._choice = self.choices[0]
        self._written = ResponseItems(self._choice, self._logprob)
        self._ended: dict[str, dict[str, Any]] = {}  # The final response, under a single key.

    def chunk(self, delta: Delta) -> bytes:
        events = b""
        written = self._written
        if not written.num_events:
            begun = self._response("in_progress", [])
            events += written.event("response.created", response=begun)
            events += written.event("response.in_progress", response=begun)
        if progress := self.progress(delta):
            response = self._response("in_progress", [])
            events += written.event("response.in_progress", response=response, **progress)
        events += written.take(delta)
        if delta.finished:
            response = self._finished(written.items)
            events += written.event(f"response.{response['status']}", response=response)
        return events

    def end(self) -> bytes:
        return b""

    def failure(self, problem: bytes) -> bytes:
        error = msgspec.json.decode(problem)["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
        failed = self._response("failed", self._written.items)
        failed["error"] = {"code": "server_error", "message": error["message"]}
        return self._written.event("error", **fields) + self._written.event(
            "response.failed", response=failed
        )

    def body(self) -> dict[str, Any]:
        return self._finished(self._whole(finished=True))

    def cancelled(self) -> dict[str, Any] | None:
        """The response so far, kept like a finished one; None if it has finished already."""
        response = self._response("cancelled", self._whole(finished=False))
        return response if self._end_with(response) is response else None

    def _whole(self, *, finished: bool) -> list[dict[str, Any]]:
        """Items for the output so far, built from a single delta."""
        choice = self._choice
        items = ResponseItems(self._choice, self._logprob)
        calls = [
            ToolCallDelta(at, call.id, call.name, call.arguments)
            for at, call in enumerate(choice.tool_calls)
        ]
        thoughts = choice.reasoning if self.job.reader.keep_reasoning else ""
        items.take(
            Delta(
                choice, choice.content, thoughts, calls, logprobs=choice.logprobs, finished=finished
            )
        )
        items.close(short=True)
        return items.items

    def _finished(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole response, kept unless the client asked not to."""
        short = self._choice.finish_reason == "length"
        response = self._response("incomplete" if short else "completed", items)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if short else None
        response["usage"] = _usage(self.job, self.choices)
        response |= self._reports(self._choice)
        return self._end_with(response)

    def _end_with(self, response: dict[str, Any]) -> dict[str, Any]:
        """Keep the response's first end: a thread may write its body during a cancellation."""
        # `setdefault` is atomic among threads.
        first = self._ended.setdefault("response", response)
        if first is response and self._body.store:
            messages = encode([*self._messages, _answer_message(self._choice)])
            kept = Kept(encode(response), messages, encode(_given_items(self._body.input)))
            self._known.put(self._tenant, self.job.id, kept)
        return first

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        params = self.job.params
        form = body.text.format if body.text is not None else None
        dumped = form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
        choice = body.tool_choice or "auto"
        return {
            "id": self.job.id,
            "object": "response",
            "created_at": self.job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.job.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": body.store,
            "temperature": params.temperature,
            "text": {"format": dumped},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [
                {"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)}
                for tool in body.tools
            ],
            "top_p": params.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }


def _given_items(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The input items as listed, with the client's ids if they are unique."""
    listed: dict[str, dict[str, Any]] = {}
    for item in items:
        is_unique = isinstance(item.id, str) and item.id and item.id not in listed
        name = str(item.id) if is_unique else new_id(item.type)
        listed[name] = {"status": "completed", **item.model_dump(exclude_none=True), "id": name}
    return list(listed.values())


def _answer_message(choice: Choice) -> dict[str, Any]:
    """The answer as a chat message; a call that was cut off keeps its complete arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            call_of(call.id, call.name, json.dumps(call.given)) for call in choice.tool_calls
        ]
    return message


def _usage(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    chat = usage(job, choices)
    reasoning = chat["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": chat["prompt_tokens_details"],
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": chat["total_tokens"],
    }


# Routes.


def add_responses(api: APIRouter, service: Service) -> None:
    known = Responses(service.config.kept_responses)

    @api.post("/v1/responses", responses=ANSWER, response_class=Response)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, as OpenAI's Responses API does."""
        tenant = request.state.tenant
        before = []
        if body.previous_response_id is not None:
            before = msgspec.json.decode(known.get(tenant, body.previous_response_id).messages)
        chat = _chat(body, before)
        response_id = f"resp_{secrets.token_hex(24)}"
        messages = [*before, *_messages(body)]
        replies = partial(ResponseReplies, body, tenant, known, messages)
        generation = Generation(service, chat, replies, lambda job: replace(job, id=response_id))
        known.running[tenant, response_id] = generation
        return generation

    @api.get("/v1/responses/{response_id}", responses=ERRORS, response_class=Response)
    async def get_response(response_id: str, request: Request) -> Response:
        """A kept response."""
        return Response(
            known.get(request.state.tenant, response_id).body, media_type="application/json"
        )

    @api.get("/v1/responses/{response_id}/input_items", responses=ERRORS)
    async def get_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """The input items of a response, newest first."""
        return known.get(request.state.tenant, response_id).page(limit, order, after)

    @api.delete("/v1/responses/{response_id}", responses=ERRORS, response_class=Response)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a response; later responses keep their copies of its messages."""
        known.delete(request.state.tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @api.post("/v1/responses/{response_id}/cancel", responses=ERRORS, response_class=Response)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End a running response; its stream, or its request, ends with an error."""
        tenant = request.state.tenant
        generation = known.running.get((tenant, response_id))
        response = None
        if generation is not None and generation in service.in_flight:
            response = {
                "id": response_id,
                "object": "response",
                "status": "cancelled",
                "output": [],
            }
            if isinstance(generation.replies, ResponseReplies):
                response = generation.replies.cancelled()
        if generation is None or response is None:
            known.get(tenant, response_id)
            raise InvalidRequestError(
                "Cannot cancel a synchronous response.", "It is over: GET it, or DELETE it."
            )
        generation.expire(
            ResponseCancelledError(
                "The response was cancelled.", "Send it again if you want it after all."
            )
        )
        return JSONResponse(response)
