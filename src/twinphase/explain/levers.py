"""What a user can change, ranked by what it would save.

Not for finding out what took the time (`diagnosis.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Lever:
    """Something to change.

    Attributes:
        saved_seconds: what it would save of this request's wall time; None where that cannot be
            predicted.
    """

    flag: str  # of the command line, or "prompt", "model", ...
    advice: str  # one sentence or two
    saved_seconds: float | None = None
    addressed_seconds: float | None = (
        None  # the time that it works on, which is the most it can save; None is unknown
    )


def rank(levers: Iterable[Lever]) -> tuple[Lever, ...]:
    """The most predicted gain first, then levers without a prediction, by the time that they address.

    Of several levers with the same flag only the first is kept.
    """
    ordered = sorted(
        levers,
        key=lambda one: (
            one.saved_seconds is None,
            -(one.saved_seconds or 0.0),
            -(one.addressed_seconds or 0.0),
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
