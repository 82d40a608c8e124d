"""Synthetic workloads: the lengths of the requests, and their send times.

An open loop sends at predefined times, a closed loop when another request has ended. Independent
users are an open loop: there, a slow server does not reduce its own load.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.errors import InvalidRequestError


@dataclass(frozen=True)
class Lengths:
    """(shortest, longest) prompt and output in tokens; lengths are uniform between the two."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def __post_init__(self) -> None:
        for name, (low, high) in (("prompt", self.prompt), ("output", self.output)):
            if not 1 <= low <= high:
                raise InvalidRequestError(
                    f"{name} lengths {low} to {high}.", "Give 1 <= shortest <= longest."
                )

    def draw(self, generator: random.Random) -> tuple[int, int]:
        """Prompt and output length of one request."""
        return generator.randint(*self.prompt), generator.randint(*self.output)

    def __str__(self) -> str:
        prompt, output = (
            str(low) if low == high else f"{low} to {high} (uniform)"
            for low, high in (self.prompt, self.output)
        )
        return f"prompts of {prompt} tokens, outputs of {output}"


@dataclass(frozen=True)
class Paced:
    """An open loop with mean gap 1 / rate: random (Poisson, independent users) or even."""

    rate: float  # Requests per second; infinity sends all at once.
    seed: int = 0
    even: bool = False

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise InvalidRequestError(
                f"--request-rate is {self.rate}.",
                "Give requests per second above 0, or inf to send all of them at once.",
            )

    def offsets(self, timestamps: Sequence[float | None]) -> tuple[float, ...]:
        """Seconds after the start; the first request is sent at 0."""
        generator = random.Random(f"poisson/{self.seed}")
        offsets = []
        now = 0.0
        for number in range(len(timestamps)):
            offsets.append(number / self.rate if self.even else now)
            now += generator.expovariate(self.rate)
        return tuple(offsets)

    def __str__(self) -> str:
        if math.isinf(self.rate):
            return "open loop, all at once"
        if self.even:
            return f"open loop, every {1 / self.rate:g} s ({self.rate:g} req/s)"
        return f"open loop, Poisson at {self.rate:g} req/s"


@dataclass(frozen=True)
class Traced:
    """An open loop at the workload's own timestamps."""

    def offsets(self, timestamps: Sequence[float | None]) -> tuple[float, ...]:
        """Seconds after the start.

        Raises:
            InvalidRequestError: the workload has no timestamps.
        """
        known = [timestamp for timestamp in timestamps if timestamp is not None]
        if len(known) < len(timestamps):
            raise InvalidRequestError(
                "The workload has no timestamps.",
                "Give --request-rate or --max-concurrency, or a trace with times.",
            )
        return tuple(known)

    def __str__(self) -> str:
        return "open loop, at the times of the trace"


@dataclass(frozen=True)
class Closed:
    """A fixed number of users, each of whom sends a request after each answer.

    The number of requests in flight is constant, so the load waits for a slow server.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InvalidRequestError(
                f"--max-concurrency is {self.concurrency}.", "Give at least 1."
            )

    def offsets(self, timestamps: Sequence[float | None]) -> tuple[float, ...]:
        """Empty, because each request is sent when another one has ended."""
        return ()

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} at once"


Arrivals = Paced | Traced | Closed
