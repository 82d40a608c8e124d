"""Workloads from files that others publish: Mooncake (JSONL), ShareGPT (JSON), Azure LLM inference (CSV).

Only lengths, times and which prefixes are shared are taken, from ShareGPT the questions too; text is made up. Lines
that are not as they should be are errors with their number; lines out of the order of their times are sorted, and that
is told. Not for made-up lengths (`workload.py`).
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from twinphase.bench.load.workload import LoadRequest, PromptMaker, Sizing, Workload
from twinphase.bench.targets.target import Prompt
from twinphase.errors import InvalidRequestError

__all__ = ["FORMATS", "Scaling", "TraceLine", "read_trace", "trace_workload"]

FORMATS = ("mooncake", "sharegpt", "azure")
BLOCK_TOKENS = 512  # of a Mooncake trace: equal hash ids are equal prefixes of that many tokens each
WARM_UP_LENGTHS = (64, 8)
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceLine:
    """One request of a file.

    Attributes:
        timestamp: seconds after the earliest one; None where the file has no times.
        num_prompt_tokens, num_output_tokens: as the file has them; for ShareGPT None, the texts count.
        blocks: ids of the prompt's prefix blocks; equal ids are equal blocks, and so is all before them.
        question, answer: texts of ShareGPT.
    """

    timestamp: float | None
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    blocks: tuple[int, ...] = ()
    question: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Scaling:
    """How a file is fitted to a small machine; said in the report.

    Attributes:
        lengths: factor of prompt, output and prefix block lengths.
        time: factor of the times between requests: 2 sends half as fast.
        num_prompts: only the first so many; all if None.
    """

    lengths: float = 1.0
    time: float = 1.0
    num_prompts: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("--scale-lengths", self.lengths), ("--time-scale", self.time)):
            if not 0 < value < float("inf"):
                raise InvalidRequestError(f"{name} is {value}.", "Give a number above 0.")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise InvalidRequestError(f"--num-prompts is {self.num_prompts}.", "Give at least 1.")

    def length(self, tokens: int) -> int:
        """A scaled length, at least one token."""
        return max(1, round(tokens * self.lengths))


def read_trace(path: Path, format: str | None = None, limit: int | None = None) -> tuple[str, list[TraceLine]]:
    """The requests of a file in its order, and its format.

    Args:
        path: of the file.
        format: one of `FORMATS`; by the file's beginning if None.
        limit: read only the first so many.

    Raises:
        InvalidRequestError: the file is not there, or a line (an entry) is not as its format wants it.
    """
    if format is not None and format not in FORMATS:
        raise InvalidRequestError(f"{format!r} is no format of a trace.", f"Use {', '.join(FORMATS)}.")
    try:
        with open(path, encoding="utf-8-sig") as file:
            start = file.read(4096).lstrip()
            kind = format or _guess(path, start)
            file.seek(0)
            lines = list(islice(_read(kind, path, file), limit))
    except OSError as error:
        raise InvalidRequestError(f"Cannot read {path}: {error.strerror}.", "Check the path.") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8: {error.reason} at byte {error.start}.") from None
    if not lines:
        raise InvalidRequestError(f"{path} has no request.", f"Is it a {kind} file?")
    times = [line.timestamp for line in lines if line.timestamp is not None]
    if times:
        first = min(times)
        lines = [replace(line, timestamp=(line.timestamp or 0.0) - first) for line in lines]
    return kind, lines


def trace_workload(
    path: Path, sizing: Sizing, scaling: Scaling | None = None, *, format: str | None = None, seed: int = 0
) -> Workload:
    """The requests of a file for a target.

    Args:
        path: of the file.
        sizing: of the target: `await target.sizing()`.
        scaling: to fit it; as it is if None.
        format: as for `read_trace`, with its errors.
        seed: of the texts.
    """
    scaling = scaling or Scaling()
    kind, unsorted = read_trace(path, format, scaling.num_prompts)
    lines = sorted(unsorted, key=lambda line: line.timestamp or 0.0)
    moved = sum(a is not b for a, b in zip(lines, unsorted, strict=True))
    maker = PromptMaker(sizing, seed)
    requests = tuple(_request(line, maker, scaling) for line in lines)
    warm_up = tuple(LoadRequest(maker.take(WARM_UP_LENGTHS[0]), WARM_UP_LENGTHS[1]) for _ in range(3))
    conditions = {
        "trace": f"{path.name} ({kind})",
        "--scale-lengths": f"{scaling.lengths:g}",
        "--time-scale": f"{scaling.time:g}",
        "--num-prompts": str(len(requests)),
        "seed": str(seed),
    }
    notes = [f"{moved} lines of the file are out of the order of their times: they were sorted"] if moved else []
    if kind == "mooncake":
        size = BLOCK_TOKENS * scaling.lengths
        notes.append(f"prompts share prefixes as the trace says, in blocks of {size:g} tokens; texts are made up")
        if scaling.lengths < 1:
            notes.append(
                "a prefix cache whose own blocks are longer than a scaled one finds less than it would unscaled"
            )
    if kind == "sharegpt":
        notes += _told_of_conversations(sizing, scaling)
    scaled = "" if scaling == Scaling() else f", lengths x {scaling.lengths:g}, times x {scaling.time:g}"
    return Workload(requests, warm_up, f"{len(requests)} requests of {path.name}{scaled}", conditions, tuple(notes))


def _told_of_conversations(sizing: Sizing, scaling: Scaling) -> list[str]:
    if sizing.encode is not None:
        told = ["questions are as in the file, without a chat template; output lengths are the answers' tokens"]
        return told + ([f"questions are cut to {scaling.lengths:g} of their tokens"] if scaling.lengths != 1 else [])
    if sizing.vocab_size is not None:
        return [
            "words count as tokens, and random token ids stand for the questions: only their lengths are the file's"
        ]
    told = ["output lengths are the words of the answers by our tokens a word: an estimate"]
    return told + ([f"questions are cut to {scaling.lengths:g} of their words"] if scaling.lengths != 1 else [])


def _request(line: TraceLine, maker: PromptMaker, scaling: Scaling) -> LoadRequest:
    timestamp = None if line.timestamp is None else line.timestamp * scaling.time
    if line.question:
        return _conversation(line, maker, scaling)
    assert line.num_prompt_tokens is not None and line.num_output_tokens is not None
    num_prompt, num_output = scaling.length(line.num_prompt_tokens), scaling.length(line.num_output_tokens)
    if line.blocks:
        prompt = maker.take_shared(num_prompt, line.blocks, BLOCK_TOKENS * scaling.lengths)
    else:
        prompt = maker.take(num_prompt)
    return LoadRequest(prompt, num_output, timestamp)


def _conversation(line: TraceLine, maker: PromptMaker, scaling: Scaling) -> LoadRequest:
    """The question as it stands, in the target's own ids where these are known; as many random ids as words else."""
    if maker.sizing.encode is not None:
        ids = maker.sizing.encode(line.question)
        ids, num_output = ids[: scaling.length(len(ids))], len(maker.sizing.encode(line.answer))
        return LoadRequest(Prompt("", tuple(ids), len(ids)), scaling.length(num_output))
    words = line.question.split()
    kept = words[: scaling.length(len(words))]
    sizing = maker.sizing
    per_word = sizing.tokens_per_word if sizing.vocab_size is None else 1.0
    num_output = max(1, round(scaling.length(len(line.answer.split())) * per_word))
    if sizing.vocab_size is not None:
        return LoadRequest(maker.take(max(1, len(kept))), num_output)
    text = line.question if len(kept) == len(words) else " ".join(kept)
    return LoadRequest(Prompt(text, num_tokens=round(len(kept) * per_word + sizing.overhead)), num_output)


def _guess(path: Path, start: str) -> str:
    if start.startswith(AZURE_COLUMNS[0]) or path.suffix == ".csv":
        return "azure"
    if start.startswith("["):
        return "sharegpt"
    if start.startswith("{"):
        return "mooncake"
    raise InvalidRequestError(f"{path} is no trace that is known by its beginning.", "Give --trace-format.")


def _read(kind: str, path: Path, file: Iterable[str]) -> Iterator[TraceLine]:
    if kind == "mooncake":
        return _mooncake(path, file)
    return _azure(path, file) if kind == "azure" else _sharegpt(path, file)


def _bad(path: Path, where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path}, {where}: {what}.", "Correct it, or take it out.")


def _count(found: Any, name: str, path: Path, where: str) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 10**9:
        raise _bad(path, where, f"{name} is {found!r}, not a number of tokens")
    return found


def _mooncake(path: Path, file: Iterable[str]) -> Iterator[TraceLine]:
    first = None
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise _bad(path, where, f"not JSON ({error})") from None
        if not isinstance(found, dict):
            raise _bad(path, where, "not an object")
        missing = [name for name in ("timestamp", "input_length", "output_length") if name not in found]
        if missing:
            raise _bad(path, where, f"no {missing[0]!r}")
        time, blocks = found["timestamp"], found.get("hash_ids", [])
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not abs(time) < 1e15:
            raise _bad(path, where, f"timestamp is {time!r}, not milliseconds")
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise _bad(path, where, "hash_ids is no list of integers")
        first = time if first is None else first
        num_prompt = _count(found["input_length"], "input_length", path, where)
        num_output = _count(found["output_length"], "output_length", path, where)
        yield TraceLine((time - first) / 1e3, num_prompt, num_output, tuple(blocks))


def _azure(path: Path, file: Iterable[str]) -> Iterator[TraceLine]:
    rows = csv.DictReader(file)
    if not set(AZURE_COLUMNS) <= set(rows.fieldnames or ()):
        raise _bad(path, "line 1", f"the columns are {rows.fieldnames}, not {', '.join(AZURE_COLUMNS)}")
    first = None
    for row in rows:
        where = f"line {rows.line_num}"
        try:
            moment = _azure_time(row["TIMESTAMP"] or "")
            counts = [int(row[name]) for name in AZURE_COLUMNS[1:]]
        except (TypeError, ValueError) as error:
            raise _bad(path, where, str(error)) from None
        first = moment if first is None else first
        num_prompt, num_output = (
            _count(n, name, path, where) for n, name in zip(counts, AZURE_COLUMNS[1:], strict=True)
        )
        yield TraceLine((moment - first).total_seconds(), num_prompt, num_output)


def _azure_time(text: str) -> datetime.datetime:
    """The files have seven digits behind the second, more than Python reads; some have a time zone."""
    head, dot, tail = text.strip().partition(".")
    digits = len(tail) - len(tail.lstrip("0123456789"))
    found = datetime.datetime.fromisoformat(f"{head}.{tail[: min(digits, 6)]:0<6}{tail[digits:]}" if dot else head)
    return found.replace(tzinfo=None) - (found.utcoffset() or datetime.timedelta())


def _sharegpt(path: Path, file: Iterable[str]) -> Iterator[TraceLine]:
    try:
        found = json.loads("".join(file))
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not JSON: {error}.", "A ShareGPT file is one list.") from None
    if not isinstance(found, list):
        raise InvalidRequestError(f"{path} is not a list of conversations.")
    for number, entry in enumerate(found, 1):
        where = f"entry {number}"
        turns = entry.get("conversations") or entry.get("conversation") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise _bad(path, where, "it has no list 'conversations'")
        pair = turns[:2]
        if len(pair) < 2:
            continue  # nothing was answered: public files have many of these, and every tool leaves them out
        texts = [text for turn in pair if isinstance(turn, dict) and isinstance(text := turn.get("value"), str)]
        if len(texts) < 2:
            raise _bad(path, where, "a turn has no text 'value'")
        if all(text.strip() for text in texts):
            yield TraceLine(None, None, None, (), texts[0], texts[1])
