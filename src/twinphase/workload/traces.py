"""Reads published traces: Mooncake (JSON lines), ShareGPT (JSON), Azure LLM inference (CSV).

Each line has a time, lengths and shared prefixes; ShareGPT has texts instead of times. An error
names the number of the invalid line.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from twinphase.errors import InvalidRequestError

# Requests with equal hash ids in a Mooncake trace share prefixes of this many tokens per id.
BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]
Milliseconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class MooncakeLine(msgspec.Struct):
    """A line of a Mooncake trace."""

    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


class AzureRow(msgspec.Struct):
    """A row of an Azure trace, without its time."""

    num_prompt_tokens: Tokens = msgspec.field(name="ContextTokens")
    num_output_tokens: Tokens = msgspec.field(name="GeneratedTokens")


class Conversation(msgspec.Struct):
    """An entry of a ShareGPT file, whose turns have one of two names."""

    conversations: list[msgspec.Raw] | None = None
    conversation: list[msgspec.Raw] | None = None


class Turn(msgspec.Struct):
    """One text of a conversation."""

    value: str


@dataclass(frozen=True)
class TraceLine:
    """One request of a file: its lengths, or its texts for ShareGPT."""

    timestamp: float | None  # Seconds after the earliest request; None if the file has no times.
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    blocks: tuple[
        int, ...
    ] = ()  # Ids of the prompt's prefix blocks; equal leading ids stand for equal prefixes.
    question: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Scaling:
    """Scaling of a file to a small machine, which the report states."""

    lengths: float = 1.0  # Factor of the prompt, output and prefix block lengths.
    time: float = 1.0  # Factor of the gaps between requests; 2 halves the rate.
    num_prompts: int | None = None  # Maximum number of requests, from the first one.

    def __post_init__(self) -> None:
        for name, value in (("--scale-lengths", self.lengths), ("--time-scale", self.time)):
            if not 0 < value < float("inf"):
                raise InvalidRequestError(f"{name} is {value}.", "Give a number above 0.")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise InvalidRequestError(f"--num-prompts is {self.num_prompts}.", "Give at least 1.")

    def length(self, tokens: int) -> int:
        """The scaled length, at least one token."""
        return max(1, round(tokens * self.lengths))


def read_trace(path: Path, limit: int | None = None) -> tuple[str, list[TraceLine]]:
    """The format ("mooncake", "sharegpt" or "azure") and the first `limit` requests of a file.

    Raises:
        InvalidRequestError: the file cannot be read, or a line or an entry does not have its
            format.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            kind = _format(path, file.read(4096).lstrip())
            file.seek(0)
            lines = list(islice(READERS[kind](path, file), limit))
    except OSError as error:
        raise InvalidRequestError(
            f"Cannot read {path}: {error.strerror}.", "Check the path."
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}."
        ) from None
    if not lines:
        raise InvalidRequestError(f"{path} has no request.", f"Is it a {kind} file?")
    first = min((line.timestamp for line in lines if line.timestamp is not None), default=0.0)
    return kind, [
        line if line.timestamp is None else replace(line, timestamp=line.timestamp - first)
        for line in lines
    ]


def _format(path: Path, start: str) -> str:
    if start.startswith(AZURE_COLUMNS[0]) or path.suffix == ".csv":
        return "azure"
    if start.startswith(("[", "{")):
        return "sharegpt" if start.startswith("[") else "mooncake"
    raise InvalidRequestError(
        f"{path} does not begin like a trace.",
        "Give a Mooncake file (JSON lines), a ShareGPT file (a JSON list) or an Azure file (CSV).",
    )


def _bad(path: Path, where: str, what: object) -> InvalidRequestError:
    return InvalidRequestError(f"{path}, {where}: {what}.", "Correct it, or take it out.")


def _decoded(data: Any, type: Any, path: Path, where: str) -> Any:
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.MsgspecError as error:
        raise _bad(path, where, error) from None


def _mooncake(path: Path, file: Iterable[str]) -> Iterator[TraceLine]:
    for number, text in enumerate(file, 1):
        if text.strip():
            line = _decoded(text, MooncakeLine, path, f"line {number}")
            yield TraceLine(
                line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids
            )


def _azure(path: Path, file: Iterable[str]) -> Iterator[TraceLine]:
    rows = csv.DictReader(file, restkey="more")
    if not set(AZURE_COLUMNS) <= set(rows.fieldnames or ()):
        raise _bad(
            path, "line 1", f"the columns are {rows.fieldnames}, not {', '.join(AZURE_COLUMNS)}"
        )
    first = None
    for row in rows:
        try:
            moment = _azure_time(row["TIMESTAMP"] or "")
            found = msgspec.convert(row, AzureRow, strict=False)
        except ValueError as error:
            raise _bad(path, f"line {rows.line_num}", error) from None
        first = moment if first is None else first
        yield TraceLine(
            (moment - first).total_seconds(), found.num_prompt_tokens, found.num_output_tokens
        )


def _azure_time(text: str) -> datetime.datetime:
    """Convert to UTC; some files contain a time zone."""
    found = datetime.datetime.fromisoformat(text.strip())
    return found.replace(tzinfo=None) - (found.utcoffset() or datetime.timedelta())


def _sharegpt(path: Path, file: Iterable[str]) -> Iterator[TraceLine]:
    entries = _decoded("".join(file), list[msgspec.Raw], path, "a list of conversations")
    for number, entry in enumerate(entries, 1):
        where = f"entry {number}"
        found = _decoded(entry, Conversation, path, where)
        turns = found.conversations or found.conversation
        if turns is None:
            raise _bad(path, where, "it has no list 'conversations'")
        if len(turns) < 2:
            # Nothing was answered: published files have many such entries, and all tools ignore
            # them.
            continue
        question, answer = (_decoded(turn, Turn, path, where).value for turn in turns[:2])
        if question.strip() and answer.strip():
            yield TraceLine(None, question=question, answer=answer)


READERS = {"mooncake": _mooncake, "sharegpt": _sharegpt, "azure": _azure}
