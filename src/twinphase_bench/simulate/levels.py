"""Service levels of a plan: latencies at a percentile, with their error bands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase import Band, InvalidRequestError, Simulated, Trial, bands, level_figure
from twinphase.phases.statistics import percentile

LEVELS = ("ttft", "itl", "tpot")
UNITS = {"ms": 1e-3, "s": 1.0}
# Share of the first requests that is ignored, because the fleet is idle at the start.
WARM_UP_SHARE = 0.15


@dataclass(frozen=True)
class Levels:
    """Upper bounds in seconds at a percentile of all requests (of all gaps, for the ITL)."""

    bounds: Mapping[str, float]
    percentile: float = 99.0

    @classmethod
    def parse(cls, text: str, at: float = 99.0) -> Levels:
        """Read "ttft=500ms,itl=50ms".

        Raises:
            InvalidRequestError: the text has another form, or a level is unknown.
        """
        bounds = {}
        for part in text.split(","):
            name, _, value = part.strip().lower().partition("=")
            unit = next((one for one in UNITS if value.endswith(one)), "?")
            try:
                bound = float(value.removesuffix(unit)) * UNITS[unit]
            except (ValueError, KeyError):
                bound = 0.0
            if name not in LEVELS or name in bounds or not 0 < bound < math.inf:
                raise InvalidRequestError(
                    f"--slo {part!r} cannot be used.",
                    "Give each level once, with its unit: ttft=500ms,itl=50ms (or tpot).",
                )
            bounds[name] = bound
        return cls(bounds, at)

    def measured(self, done: Simulated) -> dict[str, float]:
        """The percentile of each level's latency, without the first requests."""
        seen = done.observations[round(WARM_UP_SHARE * len(done.observations)) :]
        values = {
            "ttft": [one.ttft for one in seen if one.ttft is not None],
            "tpot": [one.tpot for one in seen if one.tpot is not None],
            "itl": [gap for one in seen for gap in one.itl],
        }
        return {name: percentile(values[name], self.percentile) for name in self.bounds}

    def missed(self, found: Mapping[str, float]) -> list[str]:
        return [name for name, bound in self.bounds.items() if found[name] > bound]

    @property
    def gap(self) -> float | None:
        """The upper bound of a decode step in seconds."""
        known = [self.bounds[name] for name in ("itl", "tpot") if name in self.bounds]
        return min(known, default=None)

    def bands(self, trials: Sequence[Trial], source: str) -> dict[str, Band]:
        """The band of each level for step times from that source."""
        known = bands(trials, source)
        figures = {name: level_figure(name, self.percentile) for name in self.bounds}
        return {name: known[figure] for name, figure in figures.items() if figure in known}

    def __str__(self) -> str:
        return ", ".join(
            f"{name} p{self.percentile:g} <= {1e3 * bound:g} ms"
            for name, bound in self.bounds.items()
        )
