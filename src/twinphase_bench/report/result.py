"""`result.json`: a report as data, written and read back.

The format has a name and a version; another version is refused rather than guessed at. Strict JSON
(RFC 8259): what is not a finite number becomes null.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from twinphase import ResultError
from twinphase_bench.report.report import Report

FORMAT = "twinphase-result"
VERSION = 1
MAX_FILE_BYTES = 1 << 30


def result_json(report: Report) -> str:
    """The text of `result.json`, one line for each part of the report."""
    parts = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    lines = (
        f'"{name}": {msgspec.json.encode(part, enc_hook=_builtin).decode()}'
        for name, part in {"format": FORMAT, "version": VERSION, **parts}.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plain(value: Any) -> Any:
    """A value as it is read back from a file: plain containers, null for non-finite numbers."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_builtin))


def _builtin(value: Any) -> Any:
    """What measurements hold and msgspec does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # arrays and their numbers
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def read_result(path: Path) -> Report:
    """A report that was written as `result.json`.

    Args:
        path: of the file, or of the folder that has it.

    Raises:
        ResultError: it cannot be read, is not JSON, not a result, of another version, or damaged.
    """
    path = path / "result.json" if path.is_dir() else path
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ResultError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB: not a result.")
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ResultError(
            f"{path} cannot be read: {error.strerror}.", "Give a result.json, or its folder."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ResultError(
            f"{path} is not JSON: {error}.", "Give a result.json, or its folder."
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ResultError(
            f"{path} is JSON, but not a result of twinphase.", "Give the result.json of a report."
        )
    if found.get("version") != VERSION:
        raise ResultError(
            f"{path} is a result of format version {found.get('version')!r}; this twinphase reads "
            f"version {VERSION}.",
            "Measure again, or use the twinphase that wrote it.",
        )
    try:
        for metric in found["metrics"]:
            metric["values"] = [math.nan if value is None else value for value in metric["values"]]
        return msgspec.convert(found, Report)
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(f"{path} is damaged: {error}.", "Measure again.") from None
