"""Converts messages with tools to messages that a model's chat template can render.

Texts are added as entries of contents, which rendering joins by newlines, so that the client's own
entries do not change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinphase.errors import InvalidRequestError
from twinphase.server.tools import Tool

Message = Mapping[str, Any]

# The tags are those of the Hermes format, which `tool_format` returns for a template without tools.
_PROMPT = """\
You can call functions. These are their signatures, within <tools></tools>:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>
You then get its result within <tool_response></tool_response>."""


def with_argument_objects(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Parse the arguments of earlier calls into objects, for templates that take tools."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else {
            key: value for key, value in message.items() if key != "tool_calls"
        }  # Templates test whether it exists.
        for message in messages
    ]


def with_tool_prompt(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Write tools, calls and results as text in the Hermes format, for templates without tools.

    Tools are appended to the system message; consecutive results become one user message.
    """
    written: list[dict[str, Any]] = []
    results: list[Message] | None = None  # Content of the previous message, if that holds results.
    for message in messages:
        if message["role"] == "tool":
            if results is None:
                results = []
                written.append({"role": "user", "content": results})
            texts = [_text("<tool_response>"), *_texts(message), _text("</tool_response>")]
            results += [{"part": "tool result", **text} for text in texts]
            continue
        results = None
        if message.get("tool_calls"):
            calls = [_with_object(call)["function"] for call in message["tool_calls"]]
            blocks = [_text(f"<tool_call>\n{_json(call)}\n</tool_call>") for call in calls]
            written.append({"role": message["role"], "content": _texts(message) + blocks})
        else:
            written.append(dict(message))
    if not tools:
        return written
    prompt = _PROMPT.format(tools="\n".join(map(_json, tools)))
    if written and written[0]["role"] == "system":
        offer = {**_text(f"\n{prompt}"), "part": "tools"}
        return [{**written[0], "content": [*_texts(written[0]), offer]}, *written[1:]]
    return [{"role": "system", "content": [{**_text(prompt), "part": "tools"}]}, *written]


def _texts(message: Message) -> list[Message]:
    content = message.get("content") or []
    return [_text(content)] if isinstance(content, str) else list(content)


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(
            f"The arguments of a call of {function['name']!r} are not a JSON object.",
            "Send back what the model wrote.",
        )
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
