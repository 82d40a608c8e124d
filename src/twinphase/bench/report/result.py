"""`result.json`: a report as data, written and read back.

The format has a name and a version; another version is refused rather than guessed at. Strict JSON (RFC 8259): what
is not a finite number becomes null. Not for looks (`page.py`, `markdown.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinphase.bench.report.report import Column, Metric, Plot, Report, Section, Status, Table, Verdict
from twinphase.errors import TwinphaseError

__all__ = ["FORMAT", "VERSION", "ResultError", "plain", "read_result", "result_json"]

FORMAT, VERSION = "twinphase-result", 1
LARGEST = 1 << 30  # bytes of a file that is read whole


class ResultError(TwinphaseError):
    """A file that is not a result of this version, or is damaged."""

    exit_code = 2


def plain(value: Any) -> Any:
    """Plain values for JSON: dataclasses, enums, paths, arrays and their numbers; null for what is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and their scalars
        return plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no value for JSON")


def result_json(report: Report) -> str:
    """The text of `result.json`, one line for each part of the report."""
    parts = {"format": FORMAT, "version": VERSION, **plain(report)}
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in parts.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_result(path: Path) -> Report:
    """A report that was written as `result.json`.

    Args:
        path: of the file, or of the folder that has it.

    Raises:
        ResultError: it cannot be read, is not JSON, not a result, of another version, or damaged.
    """
    if path.is_dir():
        path = path / "result.json"
    try:
        if path.stat().st_size > LARGEST:
            raise ResultError(f"{path} is larger than {LARGEST >> 30} GiB: not a result.")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}.", "Give a result.json, or its folder.") from None
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is not JSON: {error}.", "Give a result.json, or its folder.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ResultError(f"{path} is JSON, but not a result of twinphase.", "Give the result.json of a report.")
    if found.get("version") != VERSION:
        raise ResultError(
            f"{path} is a result of format version {found.get('version')!r}; this twinphase reads version {VERSION}.",
            "Measure again, or use the twinphase that wrote it.",
        )
    try:
        return _report(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultError(f"{path} is damaged: {error!r}.", "Measure again.") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is not a list")
    return tuple(_text(value) for value in values)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        raise TypeError(f"{value!r} is not a number")
    return math.nan if value is None else float(value)


def _verdict(found: Any) -> Verdict:
    return Verdict(Status(found["status"]), _text(found["text"]), _text(found["reason"]))


def _table(found: Any) -> Table:
    columns = tuple(Column(_text(item["name"]), _text(item["definition"])) for item in found["columns"])
    return Table(_text(found["title"]), columns, tuple(_texts(row) for row in found["rows"]))


def _plot(found: Any) -> Plot:
    return Plot(_text(found["name"]), _text(found["title"]), dict(found["spec"]), _text(found["caption"]))


def _section(found: Any) -> Section:
    return Section(
        _text(found["title"]),
        tuple(map(_verdict, found["verdicts"])),
        _texts(found["paragraphs"]),
        tuple(map(_table, found["tables"])),
        tuple(map(_plot, found["plots"])),
    )


def _metric(found: Any) -> Metric:
    better = _text(found["better"])
    if better not in ("lower", "higher"):
        raise ValueError(f"better is {better!r}")
    values = tuple(_number(value) for value in found["values"])
    return Metric(_text(found["name"]), _text(found["unit"]), better, values, _text(found["definition"]))


def _report(found: dict[str, Any]) -> Report:
    return Report(
        kind=_text(found["kind"]),
        title=_text(found["title"]),
        verdicts=tuple(map(_verdict, found["verdicts"])),
        conditions={_text(key): _text(value) for key, value in found["conditions"].items()},
        noise=_texts(found["noise"]),
        sections=tuple(map(_section, found["sections"])),
        metrics=tuple(map(_metric, found["metrics"])),
        data=dict(found["data"]),
    )
