"""Workloads from published files: Mooncake (JSON lines), ShareGPT (JSON), Azure LLM inference (CSV).

Lengths, times and shared prefixes are taken from the file, and from ShareGPT the questions too; all
other text is made up. A bad line is an error with its number; lines out of the order of their times
are sorted, and the report says so.
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

from twinphase import InvalidRequestError
from twinphase_bench.load.workload import LoadRequest, PromptMaker, Sizing, Workload
from twinphase_bench.targets.target import Prompt

BLOCK_TOKENS = (
    512  # of a Mooncake trace: equal hash ids are equal prefixes of that many tokens each
)
WARM_UP_LENGTHS = (64, 8)
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
    """An entry of a ShareGPT file, which has its turns under one of two names."""

    conversations: list[msgspec.Raw] | None = None
    conversation: list[msgspec.Raw] | None = None


class Turn(msgspec.Struct):
    """One text of a conversation."""

    value: str


@dataclass(frozen=True)
class TraceLine:
    """One request of a file: its lengths, or for ShareGPT its texts."""

    timestamp: float | None  # seconds after the earliest one; None where the file has no times
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    blocks: tuple[
        int, ...
    ] = ()  # ids of the prompt's prefix blocks; equal beginnings are equal prefixes
    question: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Scaling:
    """How a file is fitted to a small machine; the report says so."""

    lengths: float = 1.0  # factor of prompt, output and prefix block lengths
    time: float = 1.0  # factor of the times between requests; 2 sends half as fast
    num_prompts: int | None = None  # only the first so many

    def __post_init__(self) -> None:
        for name, value in (("--scale-lengths", self.lengths), ("--time-scale", self.time)):
            if not 0 < value < float("inf"):
                raise InvalidRequestError(f"{name} is {value}.", "Give a number above 0.")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise InvalidRequestError(f"--num-prompts is {self.num_prompts}.", "Give at least 1.")

    def length(self, tokens: int) -> int:
        """A scaled length, at least one token."""
        return max(1, round(tokens * self.lengths))


def read_trace(path: Path, limit: int | None = None) -> tuple[str, list[TraceLine]]:
    """The format of a file, "mooncake", "sharegpt" or "azure", and its first `limit` requests in the file's order.

    Raises:
        InvalidRequestError: the file cannot be read, or a line (an entry) is not as its format
            wants it.
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


def trace_workload(
    path: Path, sizing: Sizing, scaling: Scaling | None = None, *, seed: int = 0
) -> Workload:
    """The requests of a file for a target.

    Args:
        path: of the file; errors are those of `read_trace`.
        sizing: of the target: `await target.sizing()`.
        scaling: to fit it; as it is if None.
        seed: of the texts.
    """
    scaling = scaling or Scaling()
    kind, unsorted = read_trace(path, scaling.num_prompts)
    lines = sorted(unsorted, key=lambda line: line.timestamp or 0.0)
    moved = sum(a is not b for a, b in zip(lines, unsorted, strict=True))
    maker = PromptMaker(sizing, seed)
    requests = tuple(_request(line, maker, scaling) for line in lines)
    warm_up = tuple(
        LoadRequest(maker.take(WARM_UP_LENGTHS[0]), WARM_UP_LENGTHS[1]) for _ in range(3)
    )
    conditions = {
        "trace": f"{path.name} ({kind})",
        "--scale-lengths": f"{scaling.lengths:g}",
        "--time-scale": f"{scaling.time:g}",
        "--num-prompts": str(len(requests)),
        "seed": str(seed),
    }
    notes = (
        [f"{moved} lines of the file are out of the order of their times: they were sorted"]
        if moved
        else []
    )
    notes += _notes(kind, sizing, scaling.lengths)
    scaled = (
        "" if scaling == Scaling() else f", lengths x {scaling.lengths:g}, times x {scaling.time:g}"
    )
    return Workload(
        requests,
        warm_up,
        f"{len(requests)} requests of {path.name}{scaled}",
        conditions,
        tuple(notes),
    )


def _notes(kind: str, sizing: Sizing, scale: float) -> list[str]:
    """What is not as in the file."""
    if kind == "mooncake":
        notes = [
            f"prompts share prefixes as the trace says, in blocks of {BLOCK_TOKENS * scale:g} "
            "tokens; "
            "texts are made up"
        ]
        if scale < 1:
            notes.append(
                "a prefix cache with longer blocks than the scaled ones finds less than it would "
                "unscaled"
            )
        return notes
    if kind == "azure":
        return []
    if sizing.encode is None and sizing.vocab_size is not None:
        return [
            "words count as tokens, and random token ids stand for the questions: only their "
            "lengths are the file's"
        ]
    unit = "words" if sizing.encode is None else "tokens"
    notes = [
        "questions are as in the file, without a chat template; output lengths are the answers' "
        "tokens"
    ]
    if sizing.encode is None:
        notes = [
            "output lengths are the words of the answers times our tokens per word: an estimate"
        ]
    return notes + ([f"questions are cut to {scale:g} of their {unit}"] if scale != 1 else [])


def _request(line: TraceLine, maker: PromptMaker, scaling: Scaling) -> LoadRequest:
    if line.question:
        return _conversation(line, maker, scaling)
    timestamp = None if line.timestamp is None else line.timestamp * scaling.time
    num_prompt = scaling.length(line.num_prompt_tokens)
    num_output = scaling.length(line.num_output_tokens)
    if line.blocks:
        prompt = maker.take_shared(num_prompt, line.blocks, BLOCK_TOKENS * scaling.lengths)
    else:
        prompt = maker.take(num_prompt)
    return LoadRequest(prompt, num_output, timestamp)


def _conversation(line: TraceLine, maker: PromptMaker, scaling: Scaling) -> LoadRequest:
    """The question as it stands, as the target's own ids where its tokenizer is known; else as many random ids."""
    sizing = maker.sizing
    if sizing.encode is not None:
        ids = sizing.encode(line.question)
        ids = ids[: scaling.length(len(ids))]
        num_output = len(sizing.encode(line.answer))
        return LoadRequest(Prompt("", tuple(ids), len(ids)), scaling.length(num_output))
    words = line.question.split()
    kept = words[: scaling.length(len(words))]
    per_word = sizing.tokens_per_word if sizing.vocab_size is None else 1.0
    num_output = max(1, round(scaling.length(len(line.answer.split())) * per_word))
    if sizing.vocab_size is not None:
        return LoadRequest(maker.take(max(1, len(kept))), num_output)
    text = line.question if len(kept) == len(words) else " ".join(kept)
    return LoadRequest(
        Prompt(text, num_tokens=round(len(kept) * per_word + sizing.overhead)), num_output
    )


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
    """UTC; some files give a time zone."""
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
            # nothing was answered: public files have many of these, and every tool leaves them out
            continue
        question, answer = (_decoded(turn, Turn, path, where).value for turn in turns[:2])
        if question.strip() and answer.strip():
            yield TraceLine(None, question=question, answer=answer)


READERS = {"mooncake": _mooncake, "sharegpt": _sharegpt, "azure": _azure}
