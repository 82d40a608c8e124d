"""The points of the comparison, and the text their prompts are cut from.

For: `versus_peers.py`. Not for: measuring.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

DEFAULT_POINTS = (
    "prefill_128,prefill_512,prefill_2048,prefill_4096,decode_at_0,decode_at_512,decode_at_2048,decode_at_4096"
)
CONCURRENT_POINTS = "batch1,batch4,batch16,batch64"
DECODE_TOKENS = 127
SHORT_PROMPT = 8  # what "depth 0" means: no engine can decode after nothing
BATCH_PROMPT, BATCH_TOKENS = 256, 128
VOCABULARY = (1000, 40000)  # ordinary tokens of the model, for prompts without the text


@dataclasses.dataclass(frozen=True)
class Point:
    """One column of the table."""

    name: str
    operation: str
    length: int
    requests: int = 1

    @classmethod
    def parse(cls, text: str) -> Point:
        """Read a column's name."""
        for prefix, operation in (("prefill_", "prefill"), ("decode_at_", "decode"), ("batch", "batch")):
            number = text.removeprefix(prefix)
            if number != text and number.isdigit():
                count = int(number)
                if operation != "decode" and count == 0:
                    break
                if operation == "batch":
                    return cls(text, operation, BATCH_PROMPT, count)
                return cls(text, operation, count or SHORT_PROMPT)
        raise ValueError(f"no point {text!r}: use prefill_N, decode_at_N or batchN")

    @property
    def kv_tokens(self) -> int:
        """KV cache it needs: its prompts and new tokens."""
        return self.requests * (self.length + max(DECODE_TOKENS + 1, BATCH_TOKENS))

    def rate(self, reply: dict[str, Any]) -> float:
        """Tokens a second: prompt tokens in prefill, new tokens elsewhere."""
        tokens = self.length if self.operation == "prefill" else reply["new_tokens"]
        return float(tokens / reply["seconds"])

    def total_rate(self, reply: dict[str, Any]) -> float | None:
        """Tokens a second of a batch, prompts included; None elsewhere, where one phase is timed alone."""
        if self.operation != "batch":
            return None
        return float((self.requests * self.length + reply["new_tokens"]) / reply["seconds"])


class Prompts:
    """Slices of one token stream, handed out once each."""

    def __init__(self, path: Path | None) -> None:
        if path and path.exists():
            stored = json.loads(path.read_text())
            self.source, self._tokens = str(stored["source"]), list(map(int, stored["tokens"]))
        else:
            self.source = "random token ids (no prompts have been prepared)"
            generator = random.Random(0)
            self._tokens = [generator.randrange(*VOCABULARY) for _ in range(200_000)]
        self._position = 0
        self._laps = 0

    def take(self, count: int) -> list[int]:
        """The next `count` tokens; a further lap starts a few tokens off, so that no prefix repeats."""
        if self._position + count > len(self._tokens):
            self._laps += 1
            self._position = 7 * self._laps
        start = self._position
        self._position += count
        return self._tokens[start : start + count]

    def request(self, point: Point) -> dict[str, Any]:
        """The fields of a point's request, with fresh text."""
        if point.operation == "batch":
            return {"prompts": [self.take(point.length) for _ in range(point.requests)], "n": BATCH_TOKENS}
        tokens = self.take(point.length)
        return {"tokens": tokens, "n": DECODE_TOKENS} if point.operation == "decode" else {"tokens": tokens}
