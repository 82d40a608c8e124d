"""Service levels and goodput: which requests met all levels, and which phase was late.

Names and syntax are those of vLLM's benchmark: `--goodput ttft:500 tpot:50 e2el:5000`, in
milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.errors import InvalidRequestError
from twinphase.phases.observation import Observation

BLAMED_PHASE = {
    "ttft": "prefill, and the queue before it",
    "tpot": "decode",
    "e2el": "both phases together",
}
NAMES = tuple(BLAMED_PHASE)
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Slos:
    """Upper bounds in seconds of the client's TTFT, TPOT and E2E; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slos:
        """Read words like "ttft:500", in milliseconds.

        Raises:
            InvalidRequestError: a word has another form, or a level is given twice.
        """
        bounds: dict[str, float] = {}
        for word in words:
            name, _, value = word.partition(":")
            try:
                bound = float(value) / 1e3
            except ValueError:
                bound = -1.0
            if name not in NAMES or name in bounds or not 0 < bound < float("inf"):
                raise InvalidRequestError(
                    f"--goodput {word!r} cannot be used.",
                    "Give each level once, in milliseconds: ttft:500 tpot:50 e2el:5000.",
                )
            bounds[name] = bound
        return cls(**bounds)

    @property
    def bounds(self) -> dict[str, float]:
        return {name: bound for name in NAMES if (bound := getattr(self, name)) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {1e3 * bound:g} ms" for name, bound in self.bounds.items())

    def missed(self, seen: Observation) -> tuple[str, ...]:
        """Names of the levels that a request missed; ("unknown",) if a latency is unknown."""
        tpot = 0.0 if seen.num_output_tokens == 1 else seen.tpot  # A single token meets any TPOT.
        values = {"ttft": seen.ttft, "tpot": tpot, "e2el": seen.e2e}
        if any(values[name] is None for name in self.bounds):
            return (UNKNOWN,)
        return tuple(name for name, bound in self.bounds.items() if (values[name] or 0.0) > bound)


@dataclass(frozen=True)
class Goodput:
    """How many requests of a load met its service levels."""

    good: int  # Successful requests that met all levels.
    total: int  # All requests, including failures.
    seconds: float  # Duration of the load.
    missed: dict[
        str, int
    ]  # Number of the others by what they missed: "ttft", "ttft + tpot", "failed", "unknown".

    @property
    def rate(self) -> float | None:
        """Good requests per second; None if some requests cannot be judged."""
        return (
            self.good / self.seconds if self.seconds > 0 and not self.missed.get(UNKNOWN) else None
        )

    @property
    def fraction(self) -> float | None:
        """Share of good requests; None if some requests cannot be judged."""
        return self.good / self.total if self.total and not self.missed.get(UNKNOWN) else None

    @property
    def by_level(self) -> dict[str, int]:
        """Number of requests that missed each level, alone or with others."""
        found: Counter[str] = Counter()
        for names, number in self.missed.items():
            found.update({name: number for name in names.split(" + ")})
        return dict(found)


def goodput(observations: Sequence[Observation], slos: Slos, seconds: float) -> Goodput:
    """Count the requests that met all levels."""
    missed = Counter(
        " + ".join(slos.missed(seen)) if seen.succeeded else "failed" for seen in observations
    )
    good = missed.pop("", 0)
    return Goodput(good, len(observations), seconds, dict(missed))
