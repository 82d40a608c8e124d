"""Converts a streamed reply with its arrival times to an observation.

The format:
https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation. Not for
receiving (`client.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from twinphase import read_events
from twinphase.phases.observation import Observation
from twinphase_bench.client.client import Reply

MAX_MESSAGE_CHARACTERS = 200
# Fields of reasoning, which is output too, like tool calls and refusals; servers name it
# differently.
REASONING = ("reasoning_content", "reasoning")
OTHER_OUTPUT = ("tool_calls", "refusal")


def failure_kind(error: str) -> str:
    """The kind of a failure, for counts: "http 429", "truncated", "timeout", ..."""
    return error.partition(":")[0]


def broken_off(finish_reason: str) -> str:
    """The error of an output with this finish_reason; "" if the output is complete."""
    if finish_reason in ("abort", "error"):
        return f"broken off: finish_reason is {finish_reason!r}"
    if not finish_reason:
        # llama-cpp-python does this when another request arrives, unless started with
        # --interrupt_requests False.
        return "broken off: the stream ended well, but no finish_reason came"
    return ""


def observe(reply: Reply) -> Observation:
    """The observation of a reply."""
    seen = Observation(
        "", reply.intended, reply.sent, ended=reply.ended, status=reply.status, error=reply.error
    )
    if not math.isnan(reply.connect_seconds):
        seen.claims["client_connect_seconds"] = reply.connect_seconds
    seen.connected_late = reply.connected_late
    content_type = reply.headers.get("content-type", "event-stream")
    if reply.status and reply.status != 200:
        seen.error = f"http {reply.status}: {_message(reply.json()) or _shown(reply.body)}"
    elif "event-stream" not in content_type:
        if not seen.error:
            found = _message(reply.json())
            seen.error = (
                f"http 200 with an error: {found}"
                if found
                else f"not a stream: content-type {content_type}"
            )
    else:
        _Stream(seen).read(reply.pieces)
    return seen


class _Stream:
    """Parses a stream into an observation; its error is empty if the stream is well-formed."""

    def __init__(self, seen: Observation) -> None:
        self._seen = seen
        self._text: list[str] = []
        self._pieces: list[
            tuple[float, bool]
        ] = []  # The time of each piece, and whether it contained output.
        self._reasoned = False
        self._first_content: float | None = None

    def read(self, pieces: Sequence[tuple[float, bytes]]) -> None:
        seen = self._seen
        done = False
        problem = ""
        for moment, data in read_events(pieces):
            done = data.strip() == b"[DONE]"
            problem = "" if done else self._event(moment, data)
            if done or problem:
                break
        seen.text = "".join(self._text)
        self._settle_token_times()
        seen.error = problem or seen.error
        if not seen.error and not done:
            seen.error = "truncated: the stream ended without [DONE]"
        if not seen.error:
            seen.error = broken_off(seen.finish_reason)
        if not seen.error and not seen.token_times:
            seen.error = "no output: the stream ended well and brought no token"

    def _settle_token_times(self) -> None:
        """Decide which pieces were tokens, once the number of tokens is known.

        A piece without text is usually a token without text (an ignored end of text, a part of a
        character). But some servers begin with a piece that is not a token. Then there are more
        pieces than tokens, and the first empty ones are dropped.
        """
        seen = self._seen
        number = self._seen.num_output_tokens
        surplus = 0 if number is None else len(self._pieces) - number
        for moment, has_output in self._pieces:
            if surplus > 0 and not has_output:
                surplus -= 1
            else:
                seen.token_times.append(moment)
        if not seen.token_times and number == 1 and seen.finished is not None:
            seen.token_times.append(
                seen.finished
            )  # The only token had no text, and came with the end.
        if self._reasoned:
            seen.first_answer = self._first_content

    def _event(self, moment: float, data: bytes) -> str:
        """Process one event; return a description of its error, if any."""
        seen = self._seen
        try:
            event = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            event = None
        if not isinstance(event, dict):
            return f"bad event: {data[:MAX_MESSAGE_CHARACTERS].decode(errors='replace')}"
        if event.get("error") is not None:
            return f"error in stream: {_message(event)}"
        seen.request_id = seen.request_id or str(event.get("id") or "")
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choice(moment, choice)
        if isinstance(event.get("usage"), dict):
            self._usage(event["usage"])
        for name in (
            "timings",
            "metrics",
            # llama.cpp and twinphase send it, and vLLM with --enable-per-request-metrics.
        ):
            if isinstance(event.get(name), dict):
                seen.claims[name] = event[name]
        return ""

    def _choice(self, moment: float, choice: dict[str, Any]) -> None:
        seen = self._seen
        found = choice.get("text")
        delta = choice.get("delta")
        has_output = has_role = False
        if isinstance(delta, dict):
            found = delta.get("content")
            has_role = "role" in delta
            reasons = any(delta.get(name) for name in REASONING)
            self._reasoned |= reasons
            has_output = reasons or any(delta.get(name) for name in OTHER_OUTPUT)
        if isinstance(found, str) and found:
            self._text.append(found)
            has_output = True
            if self._first_content is None:
                self._first_content = moment
        token_ids = choice.get("token_ids")
        if isinstance(token_ids, list) and token_ids:
            seen.token_ids += token_ids
            has_output = True
        ends = bool(choice.get("finish_reason"))
        if ends:
            seen.finish_reason = str(choice["finish_reason"])
            seen.finished = moment
        # The chunk with the role has no token, and the last chunk need not have one: see
        # `Observation.last_token`.
        if has_output or (found == "" and not has_role and not ends):
            self._pieces.append((moment, has_output))

    def _usage(self, usage: dict[str, Any]) -> None:
        def count(within: Any, name: str) -> int | None:
            found = within.get(name) if isinstance(within, dict) else None
            return found if isinstance(found, int) and found >= 0 else None

        seen = self._seen
        seen.num_prompt_tokens = count(usage, "prompt_tokens")
        seen.num_output_tokens = count(usage, "completion_tokens")
        seen.num_cached_tokens = count(usage.get("prompt_tokens_details"), "cached_tokens")
        seen.num_reasoning_tokens = count(
            usage.get("completion_tokens_details"), "reasoning_tokens"
        )


def _shown(body: bytes) -> str:
    """The start of an answer that is not JSON, without markup."""
    text = body[:MAX_MESSAGE_CHARACTERS].decode(errors="replace").strip()
    return "(a page of HTML)" if text.startswith("<") else text


def _message(found: Any) -> str:
    """A server's error message, in OpenAI's or FastAPI's shape or as plain text."""
    if isinstance(found, dict):
        error = found.get("error", found.get("detail", found.get("message", "")))
        if isinstance(error, dict):
            error = error.get("message") or error
        return str(error)[:MAX_MESSAGE_CHARACTERS] if error else ""
    return ""
