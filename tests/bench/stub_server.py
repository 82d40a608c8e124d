"""A server of OpenAI's streams whose delays are known: it says afterwards when it really sent what.

Stamps are of `time.perf_counter`, which is one clock for all processes of a machine. POST /script
sets what the next requests get, one script each, the last one again and again; GET /log tells what
was done. Standard library only.

    python tests/bench/stub_server.py        # prints its port
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from typing import Any

SPIN_SECONDS = 0.002
SCRIPT: dict[str, Any] = {
    "queue": 0.0,  # seconds before the first token, as is `first`
    "first": 0.0,
    "gaps": [],  # seconds before each further piece
    "tokens": [],  # of each piece; 1 where the list ends
    "end": "done",  # or truncated, no_done, error, garbage, hang, reset, message
    "status": 200,
    "split": 0,  # write in parts of so many bytes
    "newline": "\n",
    "comments": False,
    "multiline": False,
    "join": False,  # all pieces in one write
    "usage": True,
    "whole_usage": True,  # in answers that are not streamed
    "finish": "length",
    # an empty first chunk without a token, which names the role where the protocol has roles
    "role": False,
    "merged_end": False,  # the last piece brings finish_reason with it
    "timings": None,
    "content_type": "text/event-stream",
    "message": "as the script has it",
}


class Stub:
    def __init__(self) -> None:
        self.scripts: list[dict[str, Any]] = [dict(SCRIPT)]
        self.log: list[dict[str, Any]] = []
        self.refuse: list[str] = []  # fields of a body that are answered with 400
        self.pages: dict[str, Any] = {}  # routes that GET answers, with status 200

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, route = head.split(b" ", 2)[:2]
            lengths = [
                line[15:]
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            ]
            data = await reader.readexactly(int(lengths[0])) if lengths else b""
            received = time.perf_counter()
            await self.answer(method.decode(), route.decode(), data, received, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self, method: str, route: str, data: bytes, received: float, writer: asyncio.StreamWriter
    ) -> None:
        if route == "/script":
            wanted = json.loads(data)
            self.scripts = [{**SCRIPT, **script} for script in wanted.get("scripts", [{}])]
            self.refuse = wanted.get("refuse", [])
            self.pages = wanted.get("pages", self.pages)
            self.log = []
            return plain(writer, 200, {})
        if route == "/log":
            return plain(writer, 200, self.log)
        if route in self.pages:
            return plain(writer, 200, self.pages[route])
        if route == "/v1/models":
            return plain(
                writer, 200, {"data": [{"id": "stub", "owned_by": "tests", "max_model_len": 8192}]}
            )
        if method != "POST" or not route.startswith("/v1/"):
            return plain(writer, 404, {"error": {"message": "no such route"}})
        body = json.loads(data)
        unknown = [name for name in self.refuse if name in body or name == route]
        if unknown:
            return plain(
                writer,
                404 if route in unknown else 400,
                {"error": {"message": f"unknown {unknown[0]}"}},
            )
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        entry = {
            "received": received,
            "sent": [],
            "body": {name: body[name] for name in body if name != "prompt"},
        }
        self.log.append(entry)
        await stream(script, body, f"stub-{len(self.log) - 1}", entry, writer)


def plain(writer: asyncio.StreamWriter, status: int, found: Any) -> None:
    data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)


async def pause(seconds: float, since: float) -> None:
    """Until `since + seconds`, exactly: the last bit is spun."""
    end = since + seconds
    if end - time.perf_counter() > SPIN_SECONDS:
        await asyncio.sleep(end - time.perf_counter() - SPIN_SECONDS)
    while time.perf_counter() < end:
        await asyncio.sleep(0)


async def stream(
    script: dict[str, Any],
    body: dict[str, Any],
    name: str,
    entry: dict[str, Any],
    writer: asyncio.StreamWriter,
) -> None:
    line = script["newline"]
    since = entry["received"]
    prompt = body.get("prompt") or body["messages"][0]["content"]
    num_prompt = len(prompt.split() if isinstance(prompt, str) else prompt)
    if not body.get("stream"):
        return plain(
            writer, 200, {"usage": {"prompt_tokens": num_prompt}} if script["whole_usage"] else {}
        )

    def event(data: Any) -> bytes:
        text = (
            data
            if isinstance(data, str)
            else json.dumps(data, indent=1 if script["multiline"] else None)
        )
        lines = [f"data: {part}" for part in text.split("\n")]
        before = [": still here", "event: message", "id: 7"] if script["comments"] else []
        return (line.join([*before, *lines]) + line + line).encode()

    def chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        return event({"id": name, "object": "text_completion", "choices": [choice], **more})

    def send(data: bytes) -> None:
        size = script["split"] or len(data)
        for at in range(0, len(data), size):
            part = data[at : at + size]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    await pause(script["queue"] + script["first"], since)
    if script["status"] != 200:
        return plain(writer, script["status"], {"error": {"message": script["message"]}})
    if script["end"] == "reset":
        return writer.transport.abort()
    if script["end"] == "message":
        return plain(writer, 200, {"error": {"message": script["message"]}})
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: {script['content_type']}\r\ntransfer-encoding: "
        "chunked\r\n\r\n"
    )
    writer.write(head.encode())
    if script["role"]:
        role = (
            {"delta": {"role": "assistant", "content": ""}} if "messages" in body else {"text": ""}
        )
        send(
            event(
                {
                    "id": name,
                    "object": "text_completion",
                    "choices": [{"index": 0, "finish_reason": None, **role}],
                }
            )
        )
    tokens = [*script["tokens"], *[1] * (1 + len(script["gaps"]))][: 1 + len(script["gaps"])]
    joined = b""
    for number, count in enumerate(tokens):
        if number:
            await pause(script["gaps"][number - 1], since)
        last = script["merged_end"] and number == len(tokens) - 1
        data = chunk(" word" * count, script["finish"] if last else None)
        since = time.perf_counter()
        entry["sent"].append(since)
        if script["join"]:
            joined += data
        else:
            send(data)
    usage: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": sum(tokens)}
    usage["total_tokens"] = num_prompt + sum(tokens)
    if not script["merged_end"]:
        joined += chunk(
            "", script["finish"], **({"timings": script["timings"]} if script["timings"] else {})
        )
    last = {"id": name, "object": "text_completion", "choices": [], "usage": usage}
    joined += event(last) if script["usage"] else b""
    entry["closed"] = time.perf_counter()
    if script["end"] == "done":
        send(joined + event("[DONE]"))
        writer.write(b"0\r\n\r\n")
    elif script["end"] == "no_done":
        send(joined)
        writer.write(b"0\r\n\r\n")
    elif script["end"] == "error":
        send(event({"error": {"message": script["message"], "code": 500}}) + event("[DONE]"))
    elif script["end"] == "garbage":
        send(event("{not json"))
    elif script["end"] == "hang":
        await writer.drain()
        await asyncio.sleep(90)


class RunningStub:
    """A stub in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def script(self, *scripts: dict[str, Any], refuse: tuple[str, ...] = (), **pages: Any) -> None:
        """Set the next replies and clear the log; `pages` are by route without its slash."""
        wanted = {"scripts": list(scripts) or [{}], "refuse": refuse}
        wanted["pages"] = {"/" + route.replace("__", "/"): page for route, page in pages.items()}
        self._ask("/script", json.dumps(wanted).encode())

    def log(self) -> list[dict[str, Any]]:
        """What was done since."""
        return list(self._ask("/log"))

    def _ask(self, route: str, data: bytes | None = None) -> Any:
        with urllib.request.urlopen(self.url + route, data, timeout=90) as reply:
            return json.load(reply)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def main() -> None:
    server = await asyncio.start_server(Stub().serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
