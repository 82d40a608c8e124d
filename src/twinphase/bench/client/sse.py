"""What a stream of server-sent events said, read from the stamped pieces of a reply.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation. Not for
receiving (`client.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from twinphase.bench.client.client import Reply
from twinphase.bench.client.observation import Observation

__all__ = ["EventReader", "broken_off", "failure_kind", "observe", "read_events"]

SHOWN = 200  # characters of a server's message
# Thinking, tool calls and refusals are output too; they are named differently from server to server.
REASONING = ("reasoning_content", "reasoning")
OTHER_OUTPUT = ("tool_calls", "refusal")


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


def broken_off(finish_reason: str) -> str:
    """What is wrong with an output that came to an end of that name; "" if nothing is."""
    if finish_reason in ("abort", "error"):
        return f"broken off: finish_reason is {finish_reason!r}"
    if not finish_reason:
        # llama-cpp-python does so when another request comes, unless started with --interrupt_requests False.
        return "broken off: the stream ended well, but no finish_reason came"
    return ""


def observe(reply: Reply) -> Observation:
    """The request as its client saw it."""
    seen = Observation("", reply.intended, reply.sent, ended=reply.ended, status=reply.status, error=reply.error)
    if reply.connect_seconds == reply.connect_seconds:  # not NaN
        seen.claims["client_connect_seconds"] = reply.connect_seconds
    seen.connected_late = reply.connected_late
    if reply.status and reply.status != 200:
        seen.error = f"http {reply.status}: {_message(reply.json()) or _shown(reply.body)}"
        return seen
    if "event-stream" not in reply.headers.get("content-type", "event-stream"):
        if not seen.error:
            found = _message(reply.json())
            kind = reply.headers["content-type"]
            seen.error = f"http 200 with an error: {found}" if found else f"not a stream: content-type {kind}"
        return seen
    done, taken = False, _Taken()
    for moment, data in read_events(reply.pieces):
        if data.strip() == b"[DONE]":
            done = True
            break
        problem = _take(seen, moment, data, taken)
        if problem:
            seen.error = problem
            break
    seen.text = "".join(taken.text)
    _settle(seen, taken)
    if not seen.error and not done:
        seen.error = "truncated: the stream ended without [DONE]"
    if not seen.error:
        seen.error = broken_off(seen.finish_reason)
    if not seen.error and not seen.token_times:
        seen.error = "no output: the stream ended well and brought no token"
    return seen


class _Taken:
    """What the events so far brought besides what the observation has."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.pieces: list[tuple[float, bool]] = []  # moment, and whether there was anything in it
        self.reasoned = False
        self.first_content: float | None = None


def _settle(seen: Observation, taken: _Taken) -> None:
    """Which pieces were tokens, now that the count is known.

    A piece without text is a token without text (the end of text that was to be ignored, a part of a character). Some
    servers begin with one that is none: there are more pieces than tokens then, and the first without text are dropped.
    """
    pieces, number = taken.pieces, seen.num_output_tokens
    surplus = 0 if number is None else len(pieces) - number
    for moment, has_output in pieces:
        if surplus > 0 and not has_output:
            surplus -= 1
        else:
            seen.token_times.append(moment)
    if not seen.token_times and number == 1 and seen.finished is not None:
        seen.token_times.append(seen.finished)  # the only token had no text, and came with the end
    if taken.reasoned:
        seen.first_answer = taken.first_content


def _take(seen: Observation, moment: float, data: bytes, taken: _Taken) -> str:
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
        if isinstance(choice, dict):
            _take_choice(seen, moment, choice, taken)
    if isinstance(event.get("usage"), dict):
        _take_usage(seen, event["usage"])
    for name in ("timings", "metrics"):  # llama.cpp and ourselves; vLLM with --enable-per-request-metrics
        if isinstance(event.get(name), dict):
            seen.claims[name] = event[name]
    return ""


def _take_choice(seen: Observation, moment: float, choice: dict[str, Any], taken: _Taken) -> None:
    found, delta = choice.get("text"), choice.get("delta")
    has_output = has_role = False
    if isinstance(delta, dict):
        found, has_role = delta.get("content"), "role" in delta
        reasons = any(delta.get(name) for name in REASONING)
        taken.reasoned |= reasons
        has_output = reasons or any(delta.get(name) for name in OTHER_OUTPUT)
    if isinstance(found, str) and found:
        taken.text.append(found)
        has_output = True
        if taken.first_content is None:
            taken.first_content = moment
    token_ids = choice.get("token_ids")
    if isinstance(token_ids, list) and token_ids:
        seen.token_ids += token_ids
        has_output = True
    ends = bool(choice.get("finish_reason"))
    if ends:
        seen.finish_reason = str(choice["finish_reason"])
        seen.finished = moment
    # The chunk that names the role has no token, nor need the one that ends it: see `Observation.last_token`.
    if has_output or (found == "" and not has_role and not ends):
        taken.pieces.append((moment, has_output))


def _take_usage(seen: Observation, usage: dict[str, Any]) -> None:
    def count(found: Any) -> int | None:
        return found if isinstance(found, int) and found >= 0 else None

    details = usage.get("prompt_tokens_details")
    seen.num_prompt_tokens = count(usage.get("prompt_tokens"))
    seen.num_output_tokens = count(usage.get("completion_tokens"))
    seen.num_cached_tokens = count(details.get("cached_tokens")) if isinstance(details, dict) else None
    details = usage.get("completion_tokens_details")
    seen.num_reasoning_tokens = count(details.get("reasoning_tokens")) if isinstance(details, dict) else None


def _shown(body: bytes) -> str:
    """The beginning of an answer that is no JSON; a page's markup says nothing to a reader of one line."""
    text = body[:SHOWN].decode(errors="replace").strip()
    return "(a page of HTML)" if text.startswith("<") else text


def _message(found: Any) -> str:
    """What a server says of an error: OpenAI's shape, FastAPI's, or a plain text."""
    if isinstance(found, dict):
        error = found.get("error", found.get("detail", found.get("message", "")))
        if isinstance(error, dict):
            error = error.get("message") or error
        return str(error)[:SHOWN] if error else ""
    return ""
