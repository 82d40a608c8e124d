"""Parses distributions of lengths, such as `lognormal:512:0.8`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from twinphase.errors import InvalidRequestError

# Parameters of each distribution.
FORMS = {
    "fixed": ("TOKENS",),
    "uniform": ("LOW", "HIGH"),
    "exponential": ("MEAN",),
    "lognormal": ("MEAN", "SIGMA"),
}
FIX = "Use a number, LOW-HIGH, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEAN:SIGMA."
MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class Distribution:
    """A distribution of lengths in tokens, each at least 1; `parse` creates it."""

    name: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Read "256", "128-512", "uniform:128:512", "exponential:300" or "lognormal:512:0.8".

        The mean is that of the lengths; sigma is the standard deviation of their logarithms.

        Raises:
            InvalidRequestError: the text has another form, or its values cannot be lengths.
        """
        name, *rest = text.strip().lower().split(":")
        if not rest:
            rest = name.split("-")
            name = "fixed" if len(rest) == 1 else "uniform"
        try:
            numbers = tuple(float(one) for one in rest)
        except ValueError:
            numbers = ()
        is_known = name in FORMS and len(numbers) == len(FORMS[name])
        lengths = numbers[:1] if name == "lognormal" else numbers
        if (
            not is_known
            or not all(0 < one <= MAX_TOKENS for one in numbers)
            or list(lengths) != sorted(lengths)
            or min(lengths) < 1
        ):
            raise InvalidRequestError(f"{text[:60]!r} is not a distribution of lengths.", FIX)
        return cls(name, numbers)

    @property
    def mean(self) -> float:
        return sum(self.parameters) / 2 if self.name == "uniform" else self.parameters[0]

    def quantile(self, share: float) -> float:
        """The quantile: the length that a `share` of all lengths does not exceed."""
        first, *more = self.parameters
        if self.name == "uniform":
            return first + share * (more[0] - first)
        if self.name == "exponential":
            return -first * math.log(1 - share)
        if self.name == "lognormal":
            sigma = more[0]
            return first * math.exp(sigma * NormalDist().inv_cdf(share) - sigma * sigma / 2)
        return first

    def draw(self, generator: random.Random) -> int:
        """One length in tokens, at least 1."""
        first, *more = self.parameters
        if self.name == "uniform":
            return generator.randint(round(first), round(more[0]))
        if self.name == "exponential":
            first = generator.expovariate(1 / first)
        elif self.name == "lognormal":
            sigma = more[0]
            first = generator.lognormvariate(math.log(first) - sigma * sigma / 2, sigma)
        return max(1, min(MAX_TOKENS, round(first)))

    def __str__(self) -> str:
        return f"{self.name}:{':'.join(f'{one:g}' for one in self.parameters)}"
