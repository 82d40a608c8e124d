"""Ranks what a user can change by the time it saves; `diagnosis.py` finds the causes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Lever:
    """A setting or input to change.

    Attributes:
        flag: option of the command line, or "prompt", "model" and the like.
        advice: one or two sentences.
        saved_seconds: predicted reduction of this request's wall time; None is unknown.
        addressed_seconds: upper bound of the reduction; None is unknown.
    """

    flag: str
    advice: str
    saved_seconds: float | None = None
    addressed_seconds: float | None = None


About = tuple[str, Lever | None]


def rank(levers: Iterable[Lever]) -> tuple[Lever, ...]:
    """Rank levers by predicted gain, then those without a prediction by the time that they address.

    Only the first lever of each flag is kept.
    """
    ordered = sorted(
        levers,
        key=lambda lever: (
            lever.saved_seconds is None,
            -(lever.saved_seconds or 0.0),
            -(lever.addressed_seconds or 0.0),
        ),
    )
    by_flag: dict[str, Lever] = {}
    for lever in ordered:
        by_flag.setdefault(lever.flag, lever)
    return tuple(by_flag.values())


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
