"""The JSON-lines protocol that every engine adapter speaks with `versus_peers.py`.

For: adapters, each run by the Python of its own environment, so only the standard library is used here.
Not for: timing policy (what is measured, in what order): that is the driver's.

One request a line on stdin, one reply a line on stdout: `load`, then `prefill`, `decode` and `batch`, at last `quit`.
A reply has `ok`; with `ok` true the fields of `Timing` or of `load`'s conditions, with `ok` false an `error`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol, TextIO


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """What an engine is told before it loads.

    Attributes:
        model: path or name.
        threads: compute threads.
        max_len: longest prompt and output together.
        max_seqs: most requests at once.
        kv_tokens: tokens of all requests together at the most, each rounded up to whole blocks.
        options: the engine's own.
    """

    model: str
    threads: int
    max_len: int
    max_seqs: int
    kv_tokens: int
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        seconds: its time.
        new_tokens: how many fell inside it.
        tokens: some of them, as proof of work.
        widest: most requests that one step of the engine advanced; proof that a batch was one.
    """

    seconds: float
    new_tokens: int
    tokens: list[int]
    widest: int = 1


class EngineAdapter(Protocol):
    """What an adapter offers; greedy decoding, end-of-text ignored, no prefix cache."""

    def conditions(self) -> dict[str, str]:
        """Versions and precisions in force."""

    def prefill(self, tokens: list[int]) -> Timing:
        """Time from token ids in to the first token out."""

    def decode(self, tokens: list[int], n: int) -> Timing:
        """Time of `n` further tokens, from the moment the first token is out."""

    def batch(self, prompts: list[list[int]], n: int) -> Timing:
        """Time of `n` new tokens for each prompt, all submitted at once, prefill included."""


def version(package: str) -> str:
    """Installed version of a distribution, as a condition to report."""
    return f"{package} {metadata.version(package)}"


def _private_stdout() -> TextIO:
    """Keep stdout for replies alone: libraries that print, in C too, are sent to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def _answer(engine: EngineAdapter, request: dict[str, Any]) -> dict[str, Any]:
    operation = request["op"]
    if operation == "prefill":
        return dataclasses.asdict(engine.prefill(request["tokens"]))
    if operation == "decode":
        return dataclasses.asdict(engine.decode(request["tokens"], request["n"]))
    if operation == "batch":
        return dataclasses.asdict(engine.batch(request["prompts"], request["n"]))
    raise ValueError(f"unknown op {operation!r}")


def serve(load: Callable[[LoadRequest], EngineAdapter]) -> None:
    """Answer requests until `quit` or the end of stdin; an error is a reply, not the end of the process."""
    replies = _private_stdout()
    engine: EngineAdapter | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            if request["op"] == "load":
                fields = {field.name: request[field.name] for field in dataclasses.fields(LoadRequest)}
                engine = load(LoadRequest(**fields))
                reply: dict[str, Any] = {"conditions": engine.conditions()}
            elif engine is None:
                raise RuntimeError("load comes first")
            else:
                reply = _answer(engine, request)
            reply["ok"] = True
        except Exception as error:  # the driver reports it beside the other engines' figures
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
    replies.flush()
    # Some engines hang or crash in their destructors; the figures are out, so leave at once.
    os._exit(0)
