"""The points of a phase sweep, shortened to fit a time limit.

`run.py` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A shorter prefill is measured several times in a row, and the median is used.
MIN_PREFILL_SECONDS = 0.06
SHORTEST_PROMPT = 10
POWERS = tuple(2**k for k in range(5, 24))
# Context to plan for if the target does not report its own.
DEFAULT_CONTEXT_TOKENS = 2048
QUICK_LENGTH = 1024
DECODE_TOKENS = 24
# A plan's estimate may take at most this share of the time limit.
MAX_PLANNED_SHARE = 0.85
# The margin covers attention, which grows with the prompt, and repetitions after disturbances.
ESTIMATE_MARGIN = 1.3
MIN_PLANNED_TOKENS = 128


@dataclass(frozen=True)
class SweepOptions:
    """The user's options for a sweep."""

    # Concurrent sequences; only batches that the target can hold are measured.
    batches: tuple[int, ...] = (1, 2, 4, 8)
    # Take a quick look in about a minute, with fewer places and shorter prompts.
    quick: bool = False
    repetitions: int | None = None  # Default: five, or three if `quick`.
    max_seconds: float | None = 300.0  # Time limit of the sweep.
    max_length: int | None = None  # Longest prompt + output; by default the context.
    seed: int = 0  # Random seed of prompts and order.


@dataclass(frozen=True)
class Place:
    """A point of the sweep."""

    phase: str  # "prefill" or "decode".
    length: int  # Prompt tokens, or in decode the tokens before the first decoded one.
    batch: int = 1  # Number of sequences that decode together.

    def __str__(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.length:,} tokens"
        return f"decode at batch {self.batch} after {self.length:,} tokens"


@dataclass(frozen=True)
class Plan:
    """The places to measure."""

    places: tuple[Place, ...]  # Prefill first, from short to long.
    repetitions: int = 5  # Number of rounds over all places.
    decode_tokens: int = DECODE_TOKENS  # Steps of one decode measurement.
    max_seconds: float | None = None  # Time limit of the rounds.
    seed: int = 0  # Random seed of the order.
    # Requested longest prompt + output; the time limit may have reduced it.
    wanted_length: int = 0

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max((place.length for place in self.places), default=0)


@dataclass(frozen=True)
class Pace:
    """The approximate speed of a target: seconds per prompt token, and per decode step."""

    token: float
    step: float

    def estimate(self, plan: Plan) -> float:
        """The approximate number of seconds that a plan takes."""
        decode = plan.decode_tokens * self.step
        prompts = sum(place.length * place.batch for place in plan.places) * self.token
        # A short prefill is repeated in a row.
        more = sum(
            decode if place.phase == "decode" else MIN_PREFILL_SECONDS for place in plan.places
        )
        return ESTIMATE_MARGIN * plan.repetitions * (prompts + more)


def make_plan(context_length: int | None, options: SweepOptions, pace: Pace | None = None) -> Plan:
    """Places for a context: prompt lengths by ratio; decode on a grid of positions and batches.

    Args:
        context_length: longest prompt + output; None is unknown (`DEFAULT_CONTEXT_TOKENS`).
        options: given options.
        pace: speed of the target (`calibrate`); prompts are shortened until the plan fits into
            `max_seconds`.
    """
    quick = options.quick
    limit = options.max_seconds
    wanted = min(
        context_length or DEFAULT_CONTEXT_TOKENS,
        options.max_length or (QUICK_LENGTH if quick else 1 << 40),
    )
    rounds = options.repetitions or (3 if quick else 5)
    length = wanted
    while True:
        places, tokens = _places(length, options.batches, quick)
        plan = Plan(places, rounds, tokens, limit, options.seed, wanted)
        fits = pace is None or limit is None or pace.estimate(plan) <= MAX_PLANNED_SHARE * limit
        if fits or length <= MIN_PLANNED_TOKENS:
            return plan
        length = max(MIN_PLANNED_TOKENS, length * 9 // 10)


def _places(length: int, batches: Sequence[int], quick: bool) -> tuple[tuple[Place, ...], int]:
    """Places for prompt + output up to a length, and the steps of a decode measurement."""
    tokens = min(12 if quick else DECODE_TOKENS, max(1, length // 4))
    sizes = sorted(set(batches))
    # This leaves room after the longest prompt for a batch whose prompts are prefilled one by one.
    longest = max(2, length - tokens - 4)
    places = [Place("prefill", n) for n in _lengths(longest, quick)]
    powers = [n for n in POWERS if n <= longest // 2]
    low = 32 if longest >= 256 else max(1, longest // 16)
    middle = powers[-1] if powers else max(1, longest // 2)
    far = [n for n in powers[2 if quick else 0 :: 2] if n > low]
    grid = {(position, 1) for position in (low, *far, middle, longest)}
    # Batches follow only short prompts, because every repetition prefills them for each sequence.
    near = {low, min(middle, 512), *(() if quick else (min(middle, 1024),))}
    grid |= {(position, size) for size in sizes if size > 1 for position in near}
    places += [
        Place("decode", position, batch)
        for position, batch in sorted(grid, key=lambda at: at[::-1])
    ]
    return tuple(places), tokens


def _lengths(longest: int, quick: bool) -> list[int]:
    """Prompt lengths: powers of two, which sweeps of other lengths share, and both ends."""
    powers = [n for n in (16, *POWERS) if n < 0.75 * longest][quick:]
    shortest = min(SHORTEST_PROMPT, longest)
    if len(powers) < 4:
        count = 6 if quick else 8
        return sorted(
            {round(shortest * (longest / shortest) ** (i / (count - 1))) for i in range(count)}
        )
    return [shortest, *powers, longest]
