"""Writes and reads `result.json`, a report as data.

The format has a name and a version; other versions are refused. It is strict JSON (RFC 8259):
numbers that are not finite become null.
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
    """The text of `result.json`, with one line per part of the report."""
    parts = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    lines = (
        f'"{name}": {msgspec.json.encode(part, enc_hook=_builtin).decode()}'
        for name, part in {"format": FORMAT, "version": VERSION, **parts}.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plain(value: Any) -> Any:
    """A value as it would be read from a file: plain containers, null for non-finite numbers."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_builtin))


def _builtin(value: Any) -> Any:
    """Convert values of measurements that msgspec does not support."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # These are arrays and their scalars.
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def read_result(path: Path) -> Report:
    """Read a report from `result.json`.

    Args:
        path: path of the file, or of its folder.

    Raises:
        ResultError: the file cannot be read, is not JSON, not a result, of another version, or
            damaged.
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
