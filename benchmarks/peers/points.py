"""The points of the comparison, and the text that their prompts are cut from."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

DEFAULT_POINTS = (
    "prefill_128,prefill_512,prefill_2048,prefill_4096,"
    "decode_at_0,decode_at_512,decode_at_2048,decode_at_4096"
)
CONCURRENT_POINTS = "batch1,batch4,batch16,batch64"
DECODE_TOKENS = 127
SHORT_PROMPT = 8  # what "depth 0" means: no engine can decode after nothing
BATCH_PROMPT = 256
BATCH_TOKENS = 128
VOCABULARY = (1000, 40000)  # ordinary tokens of the model, for prompts without the text


@dataclasses.dataclass(frozen=True)
class Point:
    """A column of the table: `requests` prompts of `length` tokens get `new_tokens` tokens each."""

    name: str
    operation: str
    length: int
    new_tokens: int
    requests: int = 1

    @classmethod
    def parse(cls, text: str) -> Point:
        """From a column's name."""
        for prefix in ("prefill_", "decode_at_", "batch"):
            number = text.removeprefix(prefix)
            if number == text or not number.isdigit() or (number == "0" and prefix != "decode_at_"):
                continue
            if prefix == "batch":
                return cls(text, prefix, BATCH_PROMPT, BATCH_TOKENS, int(number))
            return cls(
                text,
                prefix,
                int(number) or SHORT_PROMPT,
                1 if prefix == "prefill_" else DECODE_TOKENS + 1,
            )
        raise ValueError(f"no point {text!r}: use prefill_N, decode_at_N or batchN")

    def rates(self, reply: dict[str, Any]) -> dict[str, float]:
        """Tokens per second: of the prompt in prefill, else output tokens; of a batch also both."""
        if self.operation == "prefill_":
            return {"tokens_per_second": reply["prompt_tokens"] / reply["first"]}
        if self.operation == "decode_at_":
            return {
                "tokens_per_second": (reply["new_tokens"] - 1)
                / (reply["seconds"] - reply["first"]),
                "prefill_tokens_per_second": reply["prompt_tokens"] / reply["first"],
            }
        total = reply["prompt_tokens"] + reply["new_tokens"]
        return {
            "tokens_per_second": reply["new_tokens"] / reply["seconds"],
            "total_tokens_per_second": total / reply["seconds"],
        }


class Prompts:
    """Slices of one token stream, handed out once each."""

    def __init__(self, path: Path | None) -> None:
        if path and path.exists():
            stored = json.loads(path.read_text())
            self.source = str(stored["source"])
            self._tokens = list(map(int, stored["tokens"]))
        else:
            self.source = "random token ids (no prompts have been prepared)"
            generator = random.Random(0)
            self._tokens = [generator.randrange(*VOCABULARY) for _ in range(200_000)]
        self._position = self._laps = 0

    def take(self, count: int) -> list[int]:
        """The next `count` tokens; each lap starts a few later, so that no prefix repeats."""
        if self._position + count > len(self._tokens):
            self._laps += 1
            self._position = 7 * self._laps
        self._position += count
        return self._tokens[self._position - count : self._position]

    def request(self, point: Point) -> dict[str, Any]:
        """What an adapter's `generate` is told for a point, with fresh text."""
        return {
            "prompts": [self.take(point.length) for _ in range(point.requests)],
            "n": point.new_tokens,
        }
