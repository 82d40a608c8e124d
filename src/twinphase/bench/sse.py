"""What a stream of server-sent events said, read from the stamped pieces of a reply.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation. Not for
receiving (`client.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from twinphase.bench.client import Reply
from twinphase.bench.observation import Observation

__all__ = ["EventReader", "failure_kind", "observe", "read_events"]

SHOWN = 200  # characters of a server's message


class EventReader:
    """Takes bytes cut anywhere, gives the data of each event, with the moment of the bytes that completed it."""

    def __init__(self) -> None:
        self._rest = b""  # of an unfinished line
        self._lines: list[bytes] = []  # data of the unfinished event
        self._after_cr = False  # the last line ended with CR: a LF that follows belongs to it
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Data of the events that these bytes complete."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        data = self._rest + data
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if not self._begun:
                self._begun, line = True, line.removeprefix(b"\xef\xbb\xbf")
            if line:
                name, _, value = line.partition(b":")  # a comment has no name
                if name == b"data":
                    self._lines.append(value.removeprefix(b" "))
            elif self._lines:
                event, self._lines = b"\n".join(self._lines), []
                yield event


def read_events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Each event's moment and data. An event that its blank line does not follow is none, as the format has it."""
    reader = EventReader()
    for moment, data in pieces:
        for event in reader.feed(data):
            yield moment, event


def failure_kind(error: str) -> str:
    """The kind by which failures are counted: "http 429", "truncated", "error in stream", "timeout", ..."""
    return error.partition(":")[0]


def observe(reply: Reply) -> Observation:
    """The request as its client saw it."""
    seen = Observation("", reply.intended, reply.sent, ended=reply.ended, status=reply.status, error=reply.error)
    if reply.connect_seconds == reply.connect_seconds:  # not NaN
        seen.claims["client_connect_seconds"] = reply.connect_seconds
    if reply.status and reply.status != 200:
        seen.error = f"http {reply.status}: {_message(reply.json()) or reply.body[:SHOWN].decode(errors='replace')}"
        return seen
    if "event-stream" not in reply.headers.get("content-type", "event-stream"):
        if not seen.error:
            found = _message(reply.json())
            kind = reply.headers["content-type"]
            seen.error = f"http 200 with an error: {found}" if found else f"not a stream: content-type {kind}"
        return seen
    done = False
    text: list[str] = []
    for moment, data in read_events(reply.pieces):
        if data.strip() == b"[DONE]":
            done = True
            break
        problem = _take(seen, moment, data, text)
        if problem:
            seen.error = problem
            break
    seen.text = "".join(text)
    if not seen.error and not done:
        seen.error = "truncated: the stream ended without [DONE]"
    if not seen.error and not seen.token_times:
        seen.error = "no output: the stream ended well and brought no token"
    return seen


def _take(seen: Observation, moment: float, data: bytes, text: list[str]) -> str:
    """Take one event; what is wrong with it, if something is."""
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"bad event: {data[:SHOWN].decode(errors='replace')}"
    if not isinstance(event, dict):
        return f"bad event: {data[:SHOWN].decode(errors='replace')}"
    if event.get("error") is not None:
        return f"error in stream: {_message(event)}"
    seen.request_id = seen.request_id or str(event.get("id") or "")
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        _take_choice(seen, moment, choice, text)
    if isinstance(event.get("usage"), dict):
        _take_usage(seen, event["usage"])
    for name in ("timings", "metrics"):  # llama.cpp and ourselves; vLLM with --enable-per-request-metrics
        if isinstance(event.get(name), dict):
            seen.claims[name] = event[name]
    return ""


def _take_choice(seen: Observation, moment: float, choice: Any, text: list[str]) -> None:
    if not isinstance(choice, dict):
        return
    found, has_token = choice.get("text"), False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        found = delta.get("content")
        # Thinking and tool calls are output too; they are named differently from server to server.
        has_token = any(delta.get(name) for name in ("reasoning_content", "reasoning", "tool_calls", "refusal"))
    if isinstance(found, str) and found:
        text.append(found)
        has_token = True
    token_ids = choice.get("token_ids")
    if isinstance(token_ids, list) and token_ids:
        seen.token_ids += token_ids
        has_token = True
    if has_token:
        seen.token_times.append(moment)
    if choice.get("finish_reason"):
        seen.finish_reason = str(choice["finish_reason"])


def _take_usage(seen: Observation, usage: dict[str, Any]) -> None:
    def count(found: Any) -> int | None:
        return found if isinstance(found, int) and found >= 0 else None

    details = usage.get("prompt_tokens_details")
    seen.num_prompt_tokens = count(usage.get("prompt_tokens"))
    seen.num_output_tokens = count(usage.get("completion_tokens"))
    seen.num_cached_tokens = count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _message(found: Any) -> str:
    """What a server says of an error: OpenAI's shape, FastAPI's, or a plain text."""
    if isinstance(found, dict):
        error = found.get("error", found.get("detail", found.get("message", "")))
        if isinstance(error, dict):
            error = error.get("message") or error
        return str(error)[:SHOWN] if error else ""
    return ""
