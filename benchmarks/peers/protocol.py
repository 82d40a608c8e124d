"""The JSON lines that every engine adapter speaks with `versus_peers.py`; standard library only.

One request per line on stdin, one reply per line on stdout: `load`, then `generate` any number of
times. A reply has `ok`; with it the engine's conditions, or the fields of `Timing`; without it an
`error`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """What an engine is told before it loads.

    Attributes:
        model: path or name.
        threads: compute threads.
        max_len: longest prompt and output together, tokens.
        max_seqs: most requests at once.
        kv_tokens: tokens of all requests together at the most.
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
    """One measurement; times are seconds since the prompts were handed over.

    Attributes:
        first: when the first request's first token was out.
        seconds: when all tokens were out.
        prompt_tokens, new_tokens: of all requests, by the engine's own count.
        tokens: some of the new ones, as proof of work.
        widest: most requests that one step of the engine advanced; proof that a batch was one.
    """

    first: float
    seconds: float
    prompt_tokens: int
    new_tokens: int
    tokens: list[int]
    widest: int = 1


class EngineAdapter(Protocol):
    """A loaded engine; greedy decoding, end of text ignored, no prefix cache."""

    conditions: dict[str, str]  # at least "version" and "precision"

    def generate(self, prompts: list[list[int]], n: int) -> Timing:
        """Give each prompt `n` new tokens; all are submitted at once and have one length."""


def version(package: str) -> str:
    """Installed version of a distribution, as a condition to report."""
    return f"{package} {metadata.version(package)}"


def serve(load: Callable[[LoadRequest], EngineAdapter]) -> None:
    """Answer requests until stdin ends; an error is a reply, not the end of the process."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print, in C too, must not get between the replies
    engine: EngineAdapter | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if engine is None:
                engine = load(LoadRequest(**request))
                reply: dict[str, Any] = {"conditions": engine.conditions}
            else:
                reply = dataclasses.asdict(engine.generate(**request))
            reply["ok"] = True
        except Exception as error:  # the driver reports it beside the other engines' figures
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
    replies.flush()
    os._exit(0)  # some engines hang or crash in their destructors
