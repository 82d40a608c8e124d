"""Measures a model for `twinphase roofline`: its steps, as a whole and in parts.

All points are measured in turn in every repetition, so that a disturbance does not affect only one
point. `findings.py` evaluates the measurements; `report.py` and `plots.py` show them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any

from twinphase import (
    EngineConfig,
    InvalidRequestError,
    Progress,
    TimedForward,
    Workshop,
    free_memory,
    model_blueprint,
)
from twinphase.phases.roofline import PartWork, parts_of_step

# Number of decode steps timed as a whole before the next ones are timed in parts, and vice versa.
STEPS_PER_TURN = 2
# For shorter prompts, one repetition measures several prefills, because each one is short.
SHORT_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Settings:
    """The points to measure, and the number of repetitions.

    Attributes:
        prompt_lengths: prompt lengths of the prefills, in tokens.
        batches: batch sizes of the decodes at `batch_context`.
        batch_context: number of tokens before the decoded ones.
        contexts: context lengths of the decodes of one sequence.
        repetitions: number of repetitions of everything, with one value each.
        steps: decode steps per repetition timed as a whole, and the same number timed in parts.
        config: configuration of the engine; with several ranks and no model, their communication is
            measured.
    """

    prompt_lengths: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048, 4096)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batch_context: int = 256
    contexts: tuple[int, ...] = (64, 256, 1024, 4096)
    repetitions: int = 5
    steps: int = 8
    config: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name in ("prompt_lengths", "batches", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) != len(values):
                given = ",".join(map(str, values)) or "empty"
                raise InvalidRequestError(
                    f"--{name.replace('_', '-')} is {given}.", "Use positive integers, each once."
                )
        for name in ("batch_context", "repetitions", "steps"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)}.", "Use a positive integer."
                )


@dataclass(frozen=True)
class RooflinePoint:
    """A prefill of `tokens`, or decode of `batch` sequences after `tokens` tokens each."""

    phase: str
    tokens: int
    batch: int = 1

    def __str__(self) -> str:
        if self.phase == "prefill":
            return f"prefill[n={self.tokens}]"
        return f"decode[batch={self.batch},context={self.tokens}]"


@dataclass(frozen=True)
class Sample:
    """One repetition of a point: a whole prompt, or the median decode step.

    Attributes:
        seconds: seconds of whole steps: schedule, forward pass, sampling, commit.
        forward: seconds of the forward pass.
        split_seconds, split_forward: the same of the steps timed in parts.
        parts: seconds of these steps by part.
        tokens: number of tokens computed in `seconds`.
        linear, attention: work of both parts.
    """

    seconds: float
    forward: float
    split_seconds: float
    split_forward: float
    parts: Mapping[str, float]
    tokens: int
    linear: PartWork
    attention: PartWork


@dataclass(frozen=True)
class ModelPoints:
    """A model's measured points.

    Attributes:
        samples: samples by point, one per repetition.
        left_out: points that do not fit the context or the memory, and why.
        workshop: the loaded model.
    """

    samples: Mapping[RooflinePoint, Sequence[Sample]]
    left_out: Sequence[str]
    workshop: Workshop


@dataclass
class _Step:
    seconds: float
    forward: float
    parts: Mapping[str, float]  # Empty if the step was not timed in parts.
    linear: PartWork
    attention: PartWork


def _sample(
    plain: Sequence[_Step],
    split: Sequence[_Step],
    tokens: int,
    whole: Callable[[Iterable[float]], float],
) -> Sample:
    """A sample from steps timed as a whole and in parts; `whole` combines their times."""
    return Sample(
        seconds=whole(step.seconds for step in plain),
        forward=whole(step.forward for step in plain),
        split_seconds=whole(step.seconds for step in split),
        split_forward=whole(step.forward for step in split),
        parts={name: whole(step.parts[name] for step in split) for name in split[0].parts},
        tokens=tokens,
        linear=reduce(PartWork.plus, (step.linear for step in plain)),
        attention=reduce(PartWork.plus, (step.attention for step in plain)),
    )


@dataclass
class _Bench:
    """An engine whose steps are timed."""

    forward: TimedForward
    workshop: Workshop
    settings: Settings
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def step(self, in_parts: bool) -> _Step:
        self.forward.in_parts = in_parts
        start = time.perf_counter()
        batch = self.workshop.stepped.step().batch
        seconds = time.perf_counter() - start
        works = parts_of_step(self.workshop.shape, self.workshop.units, batch.work)
        return _Step(seconds, self.forward.seconds, self.forward.parts, *works)

    def prompt(self, length: int, rng: random.Random) -> list[int]:
        vocabulary = self.workshop.blueprint.vocab_size
        return [rng.randrange(vocabulary // 100, vocabulary) for _ in range(length)]

    def one_prefill(self, length: int, first: int) -> list[_Step]:
        """Steps of an uncached prompt, alternately whole and in parts (`first` 1: parts first)."""
        ticket = self.workshop.stepped.submit(self.prompt(length, self.rng), 1)
        steps: list[_Step] = []
        while not ticket.times:
            steps.append(self.step(in_parts=(len(steps) + first) % 2 == 1))
        if ticket.request.counts.num_cached_tokens:
            raise RuntimeError("a random prompt was in the prefix cache")
        return steps

    def prefill(self, point: RooflinePoint, first: int) -> Sample:
        """Compute two prompts, timed as a whole and in parts in alternation."""
        plains = []
        splits = []
        for _ in range(max(1, min(4, SHORT_PROMPT_TOKENS // point.tokens))):
            pairs = zip(
                self.one_prefill(point.tokens, first),
                self.one_prefill(point.tokens, 1 - first),
                strict=True,
            )
            ordered = [sorted(pair, key=lambda step: bool(step.parts)) for pair in pairs]
            plains.append([plain for plain, _ in ordered])
            splits.append([split for _, split in ordered])
        return _sample(_middle(plains), _middle(splits), point.tokens, sum)

    def decode(self, point: RooflinePoint, first: int) -> Sample:
        # Prompts are the same in each repetition and in all batches of a context, so that the
        # prefix cache has their KV. Each sequence still has its own KV.
        room = decode_room(point, self.settings)
        prompts = [
            self.prompt(point.tokens, random.Random(f"{point.tokens} {index}"))
            for index in range(point.batch)
        ]
        tickets = [self.workshop.stepped.submit(prompt, room) for prompt in prompts]
        self.forward.in_parts = False
        self.workshop.stepped.run_until(lambda: all(ticket.times for ticket in tickets))
        found: dict[bool, list[_Step]] = {True: [], False: []}
        for turn in range(2 * _turns(self.settings)):
            in_parts = (turn + first) % 2 == 1
            self.step(in_parts)  # The threads of the other kind of step are still awake.
            found[in_parts] += [self.step(in_parts) for _ in range(STEPS_PER_TURN)]
        if any(ticket.request.counts.num_preemptions for ticket in tickets):
            raise RuntimeError("a sequence under measurement was preempted")
        self.workshop.stepped.clear()
        sample = _sample(found[False], found[True], point.batch, statistics.median)
        # These are the parts of a single step, like the times.
        middle = found[False][len(found[False]) // 2]
        return replace(sample, linear=middle.linear, attention=middle.attention)


def _middle(runs: list[list[_Step]]) -> list[_Step]:
    """The run of (lower) median time."""
    return sorted(runs, key=lambda run: sum(step.seconds for step in run))[(len(runs) - 1) // 2]


def _turns(settings: Settings) -> int:
    return -(-settings.steps // STEPS_PER_TURN)


def decode_room(point: RooflinePoint, settings: Settings) -> int:
    """Output tokens per sequence of a decode point, including those during others' prefill."""
    prefill_steps = -(-point.batch * point.tokens // settings.config.max_num_batched_tokens)
    return 2 * _turns(settings) * (1 + STEPS_PER_TURN) + prefill_steps + point.batch + 2


def planned(
    settings: Settings, max_model_len: int, capacity: int | None
) -> tuple[list[RooflinePoint], list[str], int]:
    """The points that fit, the reasons why others do not, and the KV cache tokens per repetition.

    Args:
        settings: requested points.
        max_model_len: maximum prompt + output tokens.
        capacity: tokens of KV cache that fit into the memory; None is unknown and means no limit.
    """
    points = [RooflinePoint("prefill", length) for length in settings.prompt_lengths]
    points += [RooflinePoint("decode", settings.batch_context, batch) for batch in settings.batches]
    points += [RooflinePoint("decode", context) for context in settings.contexts]
    fitting: dict[RooflinePoint, int] = {}
    left_out = []
    for point in points:
        longest = point.tokens + (1 if point.phase == "prefill" else decode_room(point, settings))
        need = point.batch * (longest + EngineConfig.block_size)  # A spare block for each sequence.
        if longest > max_model_len:
            left_out.append(f"{point}: the context holds {max_model_len} tokens")
        elif capacity is not None and need > capacity:
            left_out.append(
                f"{point}: needs a KV cache of {need} tokens, and the memory has room for "
                f"{capacity}"
            )
        else:
            fitting[point] = need
    # Batches share their prompts, all other points are stored side by side.
    shared = max((need for point, need in fitting.items() if point.batch > 1), default=0)
    room = shared + sum(need for point, need in fitting.items() if point.batch == 1)
    return list(fitting), left_out, room if capacity is None else min(room, capacity)


def measure_model(
    model: str, settings: Settings, progress: Progress = lambda what, done, total: None
) -> ModelPoints:
    """Load a model and measure its points; after Ctrl-C, return the complete repetitions.

    Raises:
        TwinphaseError: the model cannot be found, read or run.
        InvalidRequestError: no point fits.
    """
    progress("loading the model", 0, 0)
    shape = model_blueprint(model)
    memory = free_memory()
    about = 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    capacity = None if memory is None else memory // 4 // about
    points, left_out, room = planned(settings, shape.context_length, capacity)
    if not points:
        raise InvalidRequestError(
            "No point can be measured: " + "; ".join(left_out) + ".", "Ask for smaller ones."
        )
    sizes: dict[str, Any] = {
        "max_num_seqs": max(point.batch for point in points),
        "num_kv_blocks": -(-room // EngineConfig.block_size),
    }
    workshop = Workshop(
        model,
        compile_progress=lambda done, total, kernel: progress(
            f"compiling {kernel}", int(done), total
        ),
        **asdict(replace(settings.config, **sizes)),
    )
    bench = _Bench(workshop.time_forward(), workshop, settings)
    for first in (0, 1):  # This captures graphs, and touches the memory.
        bench.one_prefill(
            min(SHORT_PROMPT_TOKENS, max(settings.prompt_lengths), shape.context_length - 1), first
        )
    samples: dict[RooflinePoint, list[Sample]] = {point: [] for point in points}
    try:
        for number in range(settings.repetitions * len(points)):
            repetition, index = divmod(number, len(points))
            point = points[index]
            progress(str(point), number, settings.repetitions * len(points))
            samples[point].append(
                (bench.prefill if point.phase == "prefill" else bench.decode)(point, repetition % 2)
            )
    except KeyboardInterrupt:
        complete = min(map(len, samples.values()))
        if not complete:
            raise
        samples = {point: many[:complete] for point, many in samples.items()}
        left_out.append(f"interrupted after {complete} of {settings.repetitions} repetitions")
    return ModelPoints(samples, left_out, workshop)
