"""The growing items of a response in OpenAI's Responses API, and their events."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from twinphase.batch import TokenLogprobs
from twinphase.server.answers import Choice, Delta
from twinphase.server.replies import encode

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}  # Prefixes of ids.


def new_id(kind: str) -> str:
    """A new id for an item of that type."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(16)}"


class ResponseItems:
    """The reasoning, messages and calls of one answer, in the text's order.

    Attributes:
        items: items so far; the last one grows until it is closed.
        num_events: number of events so far.
    """

    def __init__(self, choice: Choice, logprob: Callable[[TokenLogprobs], dict[str, Any]]) -> None:
        """`logprob` makes the JSON object of a token."""
        self.items: list[dict[str, Any]] = []
        self.num_events = 0
        self._choice = choice
        self._logprob = logprob
        self._open = False
        self._num_labelled = 0  # Number of tokens taken from the answer's labels.
        # Log probabilities of content tokens whose text has not arrived yet.
        self._logprobs: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self.num_events, **fields})
        self.num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def take(self, delta: Delta) -> bytes:
        """The events of an update."""
        events = b""
        first = self._num_labelled
        labelled = zip(self._choice.logprobs[first:], self._choice.labels[first:], strict=False)
        self._logprobs += [self._logprob(token) for token, label in labelled if label == "content"]
        self._num_labelled = len(self._choice.labels)
        if delta.reasoning:
            events += self._text("reasoning", delta.reasoning)
        for call in delta.tool_calls:
            if call.id is None:  # The rest of a call comes before the text after it.
                events += self._arguments(call.arguments)
        if delta.content:
            events += self._text("message", delta.content)
        for call in delta.tool_calls:
            if call.id is not None:
                events += self._begin(
                    "function_call", call_id=call.id, name=call.name or "", arguments=""
                )
                events += self._arguments(call.arguments)
        if delta.finished:
            if not self.items:
                events += self._text("message", "")
            events += self.close(short=self._choice.finish_reason == "length")
        return events

    def close(self, *, short: bool = False) -> bytes:
        """Close the last item, if one is open; `short` means that it was cut off."""
        if not self._open:
            return b""
        self._open = False
        item = self.items[-1]
        where = self._where()
        item["status"] = "incomplete" if short else "completed"
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = self.event("response.function_call_arguments.done", **where, **fields)
        else:
            (part,) = item["content"]
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = self.event(f"response.{part['type']}.done", **where, **fields)
            events += self.event("response.content_part.done", **where, part=part)
        return events + self.event(
            "response.output_item.done", output_index=where["output_index"], item=item
        )

    def _begin(self, kind: str, **fields: Any) -> bytes:
        """Close the open item, and begin another one."""
        events = self.close()
        status = {} if kind == "reasoning" else {"status": "in_progress"}
        self.items.append({"id": new_id(kind), "type": kind, **status, **fields})
        self._open = True
        return events + self.event(
            "response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1]
        )

    def _text(self, kind: str, text: str) -> bytes:
        """Add text to the reasoning or the message."""
        events = b""
        if not self._open or self.items[-1]["type"] != kind:
            if kind == "message":
                events = self._begin(kind, role="assistant", content=[])
                part: dict[str, Any] = {
                    "type": "output_text",
                    "text": "",
                    "annotations": [],
                    "logprobs": [],
                }
            else:
                events = self._begin(kind, summary=[], content=[])
                part = {"type": "reasoning_text", "text": ""}
            events += self.event("response.content_part.added", **self._where(), part=part)
            self.items[-1]["content"].append(part)
        (part,) = self.items[-1]["content"]
        part["text"] += text
        logprobs = {}
        if kind == "message":
            logprobs = {"logprobs": self._logprobs}
            part["logprobs"] += self._logprobs
            self._logprobs = []
        return events + self.event(
            f"response.{part['type']}.delta", **self._where(), delta=text, **logprobs
        )

    def _arguments(self, text: str) -> bytes:
        """Add text to the arguments of the last call."""
        self.items[-1]["arguments"] += text
        return self.event("response.function_call_arguments.delta", **self._where(), delta=text)

    def _where(self) -> dict[str, Any]:
        """The position of the last item, for its events."""
        item = self.items[-1]
        part = {} if item["type"] == "function_call" else {"content_index": 0}
        return {"item_id": item["id"], "output_index": len(self.items) - 1, **part}
