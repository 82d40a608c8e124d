"""Prints an explanation: a waterfall of bars that sums to 100 %, then its meaning.

The values are computed elsewhere.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from twinphase.explain.alone import alone_sentences
from twinphase.explain.levers import duration, percent
from twinphase.phases.colours import TERMINAL_CODES
from twinphase.terminal import BOLD, DIM, YELLOW, paint, percentages

# Waiting is red, and other requests in the same steps are yellow.
PREFILL = TERMINAL_CODES["prefill"]
DECODE = TERMINAL_CODES["decode"]
OTHERS = YELLOW
COLOURS = {
    "queue": "31",
    "route": "31",
    "transfer": "31",
    "prefill": PREFILL,
    "recompute": "35",
    "decode": DECODE,
    "drafting": "36",
    "rejected": "36",
    "prefill_wait": OTHERS,
    "batching": OTHERS,
    "stall": OTHERS,
    "until first token": PREFILL,
    "tokens after it": DECODE,
}
MIN_BAR_COLUMNS = 20
MAX_BAR_COLUMNS = 60
EIGHTHS = " ▏▎▍▌▋▊▉█"
TITLES = {"prefill": "Why the first token took {}", "decode": "Why each token after it took {}"}


def _paint(text: str, *codes: str) -> str:
    return paint(text, *codes, stream=sys.stdout)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the whole explanation."""
    yield _paint(f"{found['id']}: {_headline(found)}", BOLD)
    yield ""
    yield from _bars(found["waterfall"])
    yield from _efficiency(found)
    for phase, title in TITLES.items():
        yield from _diagnoses(found, phase, title)
    if found["kind"] == "client":
        yield from _section(
            "What the server itself says", [found["claims"]] if found["claims"] else []
        )
        yield from _section("Unknown from outside", [f"- {line}" for line in found["unknown"]])
    else:
        yield from _section("Had it run alone", alone_sentences(found))
    yield from _levers(found)


def _section(title: str, body: list[str]) -> Iterator[str]:
    if body:
        yield ""
        yield _paint(title, BOLD)
        yield from body


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else percent(fraction)


def _headline(found: Mapping[str, Any]) -> str:
    falls = found["waterfall"]
    if found["kind"] == "client":
        return (
            f"{found['num_requests']} requests as a client saw them, "
            f"{duration(falls['wall_seconds'])} each on average"
        )
    tpot = found.get("tpot")
    ttft = falls["first_token"]
    first = "unknown" if ttft is None else duration(ttft)
    rate = f", then {duration(tpot)} per token ({1 / tpot:,.1f} tok/s)" if tpot else ""
    return f"{duration(falls['wall_seconds'])} in all, first token after {first}{rate}"


def _bars(falls: Mapping[str, Any]) -> Iterator[str]:
    """One bar per kind, each beginning where the previous one ended."""
    bars = falls["bars"]
    wall = falls["wall_seconds"]
    width = max(MIN_BAR_COLUMNS, min(MAX_BAR_COLUMNS, shutil.get_terminal_size().columns - 42))
    shares = percentages([bar["share"] for bar in bars])
    at = 0.0
    for bar, share in zip(bars, shares, strict=True):
        start = at / wall * width
        end = min(width, (at + bar["seconds"]) / wall * width)
        at += bar["seconds"]
        blocks = _blocks(start, end)
        drawn = " " * int(start) + _paint(blocks, COLOURS.get(bar["name"], DIM))
        yield f"{bar['name']:<17} {duration(bar['seconds']):>10} {share:>8}  {drawn}".rstrip()
    yield f"{'':<17} {duration(wall):>10} {percentages([sum(bar['share'] for bar in bars)])[0]:>8}"


def _blocks(start: float, end: float) -> str:
    """Block characters from column `start` to `end`; at least an eighth, to be visible."""
    eighths = max(
        1, round(8 * (end - int(start))) if int(start) == start else round(8 * (end - start))
    )
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _efficiency(found: Mapping[str, Any]) -> Iterator[str]:
    near = found.get("efficiency")
    if not near:
        return
    rows = []
    for phase, one in near.items():
        values = " ".join(f"{name.upper()} {_percent(one[name])}" for name in ("mfu", "mbu"))
        wrong = any((one[name] or 0) > 1 for name in ("mfu", "mbu"))
        warning = _paint("  above 100 %: a count or a ceiling is wrong", YELLOW) if wrong else ""
        rows.append(f"{phase:<8} {one['bound']:<10} {values}{warning}")
    yield from _section("What bound each phase", rows)


def _diagnoses(found: Mapping[str, Any], phase: str, title: str) -> Iterator[str]:
    falls = found["waterfall"]
    measured = falls["first_token"] if phase == "prefill" else found.get("tpot")
    rows = [
        f"{_share(one, found['kind'])}{_paint(one['cause'].replace('_', ' '), BOLD)}: "
        f"{one['evidence']}"
        for one in found["diagnoses"]
        if one["phase"] == phase
    ]
    name = "as long as it did" if measured is None else duration(measured)
    yield from _section(title.format(name), rows)


def _share(one: Mapping[str, Any], kind: str) -> str:
    """The share of the symptom; a client's comparisons have no common total."""
    if kind == "client":
        return "- "
    return f"{_percent(one['share']) if one['share'] is not None else '?':>6}  "


def _levers(found: Mapping[str, Any]) -> Iterator[str]:
    median = (found.get("error") or {}).get("median")
    rows = []
    for lever in found["levers"]:
        saved = lever["saved_seconds"]
        addressed = lever["addressed_seconds"]
        error = "" if median is None else f" ± {_percent(median)}"
        unknown = "no prediction" if not addressed else f"? of {duration(addressed)}"
        gain = unknown if saved is None else f"{duration(saved)}{error}"
        rows.append(f"{gain:>16}  {_paint(lever['flag'], BOLD)}: {lever['advice']}")
    whose = "these requests" if found["kind"] == "client" else "this request"
    yield from _section(f"What to change, by what it would save {whose}", rows)
