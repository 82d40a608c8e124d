"""What a person sees: progress of a prompt's prefill, the phase lines, errors in one line.

Draws what it is given and computes only how to say it. Answers go to stdout, everything here to
stderr; colour and redrawn lines only where stderr is a terminal. Plain escape codes: importing a
library for them would cost more time than reading a short prompt.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from twinphase.phases.colours import TERMINAL_CODES
from twinphase.phases.hardware import NEITHER

if TYPE_CHECKING:
    from rich.console import Console

    from twinphase.engine.process.messages import RankFacts
    from twinphase.errors import TwinphaseError
    from twinphase.phases.report import PhaseReport, PhaseRow

BOLD = "1"
DIM = "2"
RED = "31"
YELLOW = "33"
BAR_WIDTH = 28
REDRAW_SECONDS = 0.1
# Columns where the output is not a terminal.
PLAIN_WIDTH = 120
MAX_SHORT_COLUMNS = 80
SHORT_BOUNDS = {
    "compute": "compute-bound",
    "memory": "memory-bound",
    "contention": "contention",
    "overhead": "overhead",
}


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def paint(text: str, *codes: str, stream: TextIO | None = None) -> str:
    """Coloured text if the stream (stderr) is a terminal and wants it (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if not (text and codes) or plain or not (stream or sys.stderr).isatty():
        return text
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def note(text: str) -> None:
    """A line that is not part of the answer; on a terminal, broken between words."""
    if _is_terminal():
        wrapper = textwrap.TextWrapper(
            shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False
        )
        text = "\n".join(wrapper.fill(line) for line in text.split("\n"))
    _write(paint(text, DIM) + "\n")


def paragraph(text: str) -> None:
    """Text in lines of whole words."""
    width = shutil.get_terminal_size().columns if _is_terminal() else PLAIN_WIDTH
    _write(textwrap.fill(text, width) + "\n")


def heading(text: str) -> None:
    """A line that begins a part of the output."""
    _write(f"\n{paint(text, BOLD)}\n")


def transient(text: str) -> None:
    """A line that the next one replaces, where stderr is a terminal; "" removes it."""
    if _is_terminal():
        _write("\r\x1b[K" + paint(text, DIM))


def error_line(error: TwinphaseError) -> None:
    """Cause and fix, joined into one line."""
    cause, fix = (" ".join(part.split()) for part in (error.cause, error.fix))
    _write(f"{paint('error:', BOLD, RED)} {cause}{' ' + fix if fix else ''}\n")


def print_json(value: Any) -> None:
    """The answer of a command as JSON."""
    import json

    print(json.dumps(value, ensure_ascii=False, indent=1))


def answers() -> Console:
    """Console for tables: stdout, as wide as its terminal, or wide enough for tables."""
    # The import is here, so that a run without tables does not wait for it.
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


class Bar:
    """A progress bar with the time left, on terminals only and for long work only.

    The time left follows the pace of the last pieces, because the pace falls as a prompt gets
    longer; or of all pieces since the first update, where they take the same time.
    """

    def __init__(self, title: str, unit: str, patience: float = 0.3, *, even: bool = False) -> None:
        """`patience`: seconds before the bar appears; `even`: pieces take the same time."""
        self._even = even
        self._first: float | None = None
        self._title = title
        self._unit = unit
        self._patience = patience
        self._start = time.perf_counter()
        self._last = (self._start, 0.0)
        self._pace: float | None = None
        self._drawn_at: float | None = None

    def update(self, done: float, total: int) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = now
        then, before = self._last
        if self._even:
            self._pace = (now - self._first) / done if done > 0 else None
        elif done > before:
            pace = (now - then) / (done - before)
            self._pace = pace if self._pace is None else (self._pace + pace) / 2
            self._last = (now, done)
        early = now - self._start < self._patience
        fresh = self._drawn_at is not None and now - self._drawn_at < REDRAW_SECONDS
        if not _is_terminal() or total <= 0 or early or (fresh and done < total):
            return
        self._drawn_at = now
        left = f"{self._pace * (total - done):.0f} s left" if self._pace is not None else ""
        behind = f"{int(done):,}/{total:,} {self._unit}  {left}"
        columns = shutil.get_terminal_size().columns - 1
        width = max(
            0, min(BAR_WIDTH, columns - len(self._title) - len(behind) - 2)
        )  # The text is more important.
        filled = int(width * done / total)
        text = f"{self._title} {'━' * filled}{'─' * (width - filled)} {behind}"
        _write("\r\x1b[K" + paint(text[:columns], DIM))

    def clear(self) -> None:
        if self._drawn_at is not None:
            _write("\r\x1b[K")
            self._drawn_at = None


def percentages(shares: Sequence[float]) -> list[str]:
    """Shares in percent with one decimal that add up as the shares do (largest remainder)."""
    exact = [share * 1000 for share in shares]
    floors = [int(value // 1) for value in exact]
    missing = round(sum(exact)) - sum(floors)
    for index in sorted(range(len(exact)), key=lambda i: floors[i] - exact[i])[:missing]:
        floors[index] += 1
    return [f"{value / 10:.1f} %" for value in floors]


def describe_bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def describe_ranks(ranks: Sequence[RankFacts]) -> str:
    """What the processes of one engine have, and where they compute."""
    threads = ranks[0].threads or 1
    weights = describe_bytes(max(rank.weight_bytes for rank in ranks))
    kv = describe_bytes(max(rank.kv_bytes for rank in ranks))
    nodes = ", ".join("+".join(map(str, rank.nodes)) for rank in ranks if rank.nodes)
    each = (
        f"{len(ranks)} ranks of {threads} thread{'s' * (threads > 1)}, each with up to "
        f"{weights} of weights"
    )
    return f"{each} and {kv} of KV cache{nodes and f', bound to NUMA nodes {nodes}'}"


def model_line(name: str, quantization: str, size: int) -> str:
    """One line of `twinphase list`."""
    return f"{name:<60} {quantization:<12} {describe_bytes(size):>9}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _efficiency(row: PhaseRow) -> str:
    """How near the phase came to the machine's ceilings; "" where these are not known."""
    if row.efficiency is None:
        return ""
    text = f"{row.metric} {row.efficiency:.0%}".replace("%", " %")
    if row.efficiency > 1:
        text = paint(f"{text} (above 100 %: a count or a ceiling is wrong)", YELLOW)
    return text + (f" ({describe_bytes(row.working_set)} per step)" if row.metric == "MBU" else "")


def _phase_line(row: PhaseRow, share: str) -> str:
    tokens = f"{row.tokens:,} tokens" + (
        f" ({row.cached_tokens:,} cached)" if row.cached_tokens else ""
    )
    rate = f"{row.tokens_per_second:,.0f} tok/s" if row.tokens_per_second is not None else "-"
    line = f"{tokens:<24} {_duration(row.seconds):>12} {rate:>14} {share:>8}  "
    words = {
        "contention": "contention",
        "ranks": "bound by ranks that wait",
        "kernels": "kernels below their peak",
        "unknown": "",
    }
    bound = words.get(row.bound, f"{row.bound}-bound")
    if row.bound in NEITHER and row.nearest_limit is not None:
        bound += f", nearest limit: {row.nearest_limit}"
    if not row.tokens:
        return f"{paint(f'{row.name:<8}', BOLD, TERMINAL_CODES[row.name])} {line.rstrip()}"
    shares = ("host", row.host_share), ("waiting for ranks", row.rank_share)
    host = [f"{name} {100 * share:.0f} %" for name, share in shares if share is not None]
    known = ", ".join(text for text in (_efficiency(row), bound, *host) if text)
    return f"{paint(f'{row.name:<8}', BOLD, TERMINAL_CODES[row.name])} {line}{known}".rstrip()


def report_lines(report: PhaseReport) -> list[str]:
    """A line per phase, and one for the rest of the wall time; shares add up to 100.0 %."""
    shares = percentages([row.share for row in report.phases] + [row.share for row in report.rest])
    lines = [_phase_line(row, share) for row, share in zip(report.phases, shares, strict=False)]
    pieces = [
        f"{row.name} {_duration(row.seconds)} {share}"
        for row, share in zip(report.rest, shares[len(report.phases) :], strict=True)
        if share != "0.0 %" or row.name == "unattributed"
    ]
    return [
        *lines,
        f"{paint('rest    ', BOLD)} {', '.join(pieces)}; wall {_duration(report.wall_seconds)}",
    ]


def show_report(report: PhaseReport) -> None:
    _write("\n".join(report_lines(report)) + "\n")


def short_report(report: PhaseReport, columns: int) -> str:
    """One line of at most `columns`: TTFT, then both phases with what bound them.

    In a narrow terminal what bound them is left out first, and then TTFT.
    """
    first = "" if report.ttft is None else f"TTFT {report.ttft * 1e3:,.0f} ms"
    for with_bounds, with_ttft in ((True, True), (False, True), (False, False)):
        parts = [("", first)] if first and with_ttft else []
        for row in report.phases:
            if row.tokens_per_second is not None:
                text = f"{row.name} {row.tokens:,} tok, {row.tokens_per_second:,.0f} tok/s"
                bound = SHORT_BOUNDS.get(row.bound)
                parts.append((row.name, f"{text}, {bound}" if bound and with_bounds else text))
        plain = " | ".join(text for _, text in parts)
        if len(plain) <= columns:
            coloured = (paint(text, TERMINAL_CODES[name]) if name else text for name, text in parts)
            return " | ".join(coloured)
    return plain[:columns]


def show_short_report(report: PhaseReport) -> None:
    columns = min(shutil.get_terminal_size().columns, MAX_SHORT_COLUMNS)
    _write(short_report(report, columns) + "\n")
