"""The same request in each of the three APIs, and the parsed answers."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OPENAI = "openai"
ANTHROPIC = "anthropic"
OLLAMA = "ollama"
ENDLESS = {"type": "string", "minLength": 9999}  # the form of an answer that does not end by itself
PATHS = {OPENAI: "/v1/chat/completions", ANTHROPIC: "/v1/messages", OLLAMA: "/api/chat"}


def dialect_of(path: str) -> str:
    """The dialect of a route's errors."""
    if path.startswith("/api/"):
        return OLLAMA
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI


@dataclass(frozen=True)
class Said:
    """The content of an answer, or of a stream's events."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reason: str = ""
    num_prompt: int = 0
    num_output: int = 0


def turn(role: str, content: Any) -> dict[str, Any]:
    """A message of a conversation."""
    return {"role": role, "content": content}


def user(content: Any) -> dict[str, Any]:
    return turn("user", content)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def function(function: Any) -> dict[str, Any]:
    """A tool, its choice or its call, in OpenAI's shape."""
    return {"type": "function", "function": function}


def bearer(name: str) -> dict[str, str]:
    """The header with an API key."""
    return {"Authorization": f"Bearer {name}"}


def ask(
    dialect: str, model: str, text: str = "hello", *, max_tokens: int = 4000, **more: Any
) -> dict[str, Any]:
    """A greedy request's body, of an endless answer unless `more` gives its form."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [user(text)],
        "stream": False,
    }
    if dialect == OLLAMA:
        body["options"] = {"num_predict": max_tokens, "temperature": 0, **more.pop("options", {})}
    else:
        body |= {"max_tokens": max_tokens, "temperature": 0}
    if not more.keys() & {"format", "output_config", "response_format", "tools"}:
        body |= form(dialect, ENDLESS)
    if dialect == OPENAI and more.get("stream"):
        body["stream_options"] = {"include_usage": True}
    return body | more


def form(dialect: str, schema: Any) -> dict[str, Any]:
    """Fields that ask for an answer of that schema."""
    if dialect == OLLAMA:
        return {"format": schema}
    if dialect == ANTHROPIC:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    }


def parts(client: socket.socket) -> Iterator[Any]:
    """The JSON of a stream's events or lines, as they come."""
    response = http.client.HTTPResponse(client)
    response.begin()
    assert response.status == 200, response.read()
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data.startswith(b"{"):
            yield json.loads(data)


def message(dialect: str, body: Any) -> str:
    """The message of an error, which must have the dialect's shape."""
    if dialect == OLLAMA:
        assert body.keys() == {"error"}
        return str(body["error"])
    if dialect == ANTHROPIC:
        assert (
            body.keys() == {"type", "error"} and body["type"] == "error" and body["error"]["type"]
        )
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


def whole(dialect: str, body: Any) -> Said:
    """The content of an answer in one body."""
    if dialect == OPENAI:
        (choice,) = body["choices"]
        usage = body["usage"]
        found = choice["message"]
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in found.get("tool_calls") or ()
        ]
        said = (
            found.get("content") or "",
            found.get("reasoning_content") or "",
            tuple(calls),
            choice["finish_reason"],
        )
        return Said(*said, usage["prompt_tokens"], usage["completion_tokens"])
    if dialect == OLLAMA:
        found = body["message"]
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in found.get("tool_calls") or ()
        ]
        said = found["content"], found.get("thinking") or "", tuple(calls), body["done_reason"]
        return Said(*said, body["prompt_eval_count"], body["eval_count"])
    blocks = body["content"]
    usage = body["usage"]
    text, thoughts = (
        "".join(b[kind] for b in blocks if b["type"] == kind) for kind in ("text", "thinking")
    )
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    num_prompt = sum(
        usage[f"{kind}input_tokens"] for kind in ("", "cache_creation_", "cache_read_")
    )
    return Said(
        text, thoughts, tuple(calls), body["stop_reason"], num_prompt, usage["output_tokens"]
    )


def joined(dialect: str, events: list[Any]) -> dict[str, Any]:
    """The body that a stream's events add up to."""
    if dialect == OLLAMA:
        messages = [event["message"] for event in events]
        assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        text, thoughts = (
            "".join(m.get(key, "") for m in messages) for key in ("content", "thinking")
        )
        return {
            **events[-1],
            "message": {"content": text, "thinking": thoughts, "tool_calls": calls},
        }
    if dialect == OPENAI:
        return {"choices": _joined_choices(events), "usage": events[-1].get("usage")}
    events = [event for event in events if event["type"] != "ping"]
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    blocks: list[dict[str, Any]] = []
    for event in middle:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            (key,) = event["delta"].keys() - {"type"}
            kind = {
                "text": "text_delta",
                "thinking": "thinking_delta",
                "partial_json": "input_json_delta",
            }[key]
            assert event["delta"]["type"] == kind and event["index"] == len(blocks) - 1
            blocks[-1]["json" if key == "partial_json" else key] += event["delta"][key]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    for block in blocks:
        block["input"] = json.loads(block["json"] or "{}")
    return {**first["message"], "content": blocks, **delta["delta"], "usage": delta["usage"]}


def _joined_choices(events: list[Any]) -> list[dict[str, Any]]:
    """The same for the answers of a stream of OpenAI's chats or completions."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in (piece for event in events for piece in event["choices"]):
        message = {"content": "", "reasoning_content": "", "tool_calls": []}
        empty = {"message": message, "logprobs": None, "token_ids": [], "finish_reason": None}
        choice = choices.setdefault(piece["index"], empty)
        assert choice["finish_reason"] is None
        message = choice["message"]
        delta = piece.get("delta") or {"content": piece.get("text")}
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls") or ():
            if call.get("id"):
                assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                function = {"name": call["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"function": function})
            written = message["tool_calls"][call["index"]]["function"]
            written["arguments"] += call["function"]["arguments"]
        for key, entries in (piece.get("logprobs") or {}).items():
            choice["logprobs"] = choice["logprobs"] or {}
            if entries is not None:
                choice["logprobs"][key] = choice["logprobs"].get(key, []) + entries
        choice["token_ids"] += piece.get("token_ids") or []
        choice["finish_reason"] = piece["finish_reason"]
        choice["stop_reason"] = piece.get("stop_reason")
    return [choices[index] for index in sorted(choices)]
