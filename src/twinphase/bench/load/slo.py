"""Service levels and goodput: which requests met every one of them, and which half of the others was late.

Names and form are those of vLLM's benchmark: `--goodput ttft:500 tpot:50 e2el:5000`, in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.bench.client.observation import Observation
from twinphase.errors import InvalidRequestError

__all__ = ["PHASES", "Goodput", "Slos", "goodput"]

NAMES = ("ttft", "tpot", "e2el")
# Which half a missed level blames.
PHASES = {"ttft": "prefill (and the queue before it)", "tpot": "decode", "e2el": "both halves together"}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Slos:
    """Bounds in seconds; None is no bound.

    Attributes:
        ttft: of the client's TTFT.
        tpot: of TPOT; a request of one output token meets it.
        e2el: of E2E.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, given: Sequence[str]) -> Slos:
        """Of words like "ttft:500".

        Raises:
            InvalidRequestError: one is not of that form.
        """
        bounds: dict[str, float] = {}
        for word in given:
            name, _, value = word.partition(":")
            try:
                bound = float(value) / 1e3
            except ValueError:
                bound = -1.0
            if name not in NAMES or name in bounds or not 0 < bound < float("inf"):
                raise InvalidRequestError(
                    f"--goodput {word!r} cannot be used.",
                    "Give each once, in milliseconds: ttft:500 tpot:50 e2el:5000.",
                )
            bounds[name] = bound
        return cls(**bounds)

    @property
    def bounds(self) -> dict[str, float]:
        """Those that are set, seconds."""
        return {name: bound for name in NAMES if (bound := getattr(self, name)) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {1e3 * bound:g} ms" for name, bound in self.bounds.items())

    def missed(self, seen: Observation) -> tuple[str, ...]:
        """Names of the levels that a request missed; ("unknown",) if one cannot be told."""
        values = {"ttft": seen.ttft, "tpot": seen.tpot, "e2el": seen.e2e}
        if seen.num_output_tokens == 1:
            values["tpot"] = 0.0
        if any(values[name] is None for name in self.bounds):
            return (UNKNOWN,)
        return tuple(name for name, bound in self.bounds.items() if (values[name] or 0.0) > bound)


@dataclass(frozen=True)
class Goodput:
    """What a load achieved of its levels.

    Attributes:
        good: requests that succeeded and met all.
        total: requests sent; failures are among them.
        seconds: of the load.
        missed: requests by what they missed: "ttft", "tpot", "ttft + tpot", ..., "failed", "unknown".
    """

    good: int
    total: int
    seconds: float
    missed: dict[str, int]

    @property
    def rate(self) -> float | None:
        """Good requests / seconds; None if some cannot be told, or nothing took time."""
        return self.good / self.seconds if self.seconds > 0 and not self.missed.get(UNKNOWN) else None

    @property
    def fraction(self) -> float | None:
        """Good requests / all that were sent; None if some cannot be told."""
        return self.good / self.total if self.total and not self.missed.get(UNKNOWN) else None

    @property
    def by_level(self) -> dict[str, int]:
        """Requests that missed each level, whatever else they missed."""
        found: Counter[str] = Counter()
        for names, number in self.missed.items():
            found.update({name: number for name in names.split(" + ")})
        return dict(found)


def goodput(observations: Sequence[Observation], slos: Slos, seconds: float) -> Goodput:
    """Count the requests that met all levels."""
    missed: Counter[str] = Counter()
    good = 0
    for seen in observations:
        names = slos.missed(seen) if seen.succeeded else ("failed",)
        if names:
            missed[" + ".join(names)] += 1
        else:
            good += 1
    return Goodput(good, len(observations), seconds, dict(missed))
