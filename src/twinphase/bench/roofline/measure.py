"""What `twinphase roofline` measures of a model: its steps, whole and in parts.

Everything is repeated with all points in turn, so that a disturbance does not meet one point alone. Not for
judging (`roofline.py`) nor for showing (`roofline_report.py`, `roofline_plots.py`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from twinphase.backends.base import Backend, Forward, StepInputs
from twinphase.bench.conditions import Bystanders
from twinphase.bench.progress import Progress
from twinphase.bench.roofline.arithmetic import Part, attention_part, linear_part
from twinphase.bench.targets.stepped import Stepped, TimedRequest
from twinphase.config import EngineConfig, available_cores, free_memory
from twinphase.engine.load import LoadedEngine, compute_units
from twinphase.engine.runner import Runner
from twinphase.errors import InvalidRequestError
from twinphase.models.loader import read_config
from twinphase.phases.report import Units
from twinphase.phases.work import ModelShape
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import resolve_model

__all__ = ["ModelPoints", "Point", "Sample", "Settings", "measure_model", "planned"]

QUIET_CORES = 0.1  # others may use this much of the machine before a measurement counts as disturbed
LONG_SECONDS = 1.0  # a measurement of so long averages over disturbances itself
TURN_STEPS = 2  # decode steps of one kind, before those of the other
SHORT_PROMPT = 256  # shorter prefills are over so soon that one repetition measures several


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often.

    Attributes:
        prompt_lengths: of the prefills, tokens.
        batches: of the decodes at `batch_context`.
        batch_context: tokens before the decoded ones.
        contexts: of the decodes of one sequence.
        repetitions: of everything; one value each.
        steps: decode steps of one repetition, so many whole and as many in parts.
        retries: more tries of a point of less than a second while others use the CPU; the quietest counts.
        threads: of the model; None is one a core.
        isa: instruction-set path; None is the best.
        kv_cache_dtype: as for `EngineConfig`.
        max_num_batched_tokens: as for `EngineConfig`: the largest prefill chunk.
    """

    prompt_lengths: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048, 4096)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batch_context: int = 256
    contexts: tuple[int, ...] = (64, 256, 1024, 4096)
    repetitions: int = 5
    steps: int = 8
    retries: int = 1
    threads: int | None = None
    isa: str | None = None
    kv_cache_dtype: str = "auto"
    max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens

    def __post_init__(self) -> None:
        lists = {"prompt length": self.prompt_lengths, "batch": self.batches, "context": self.contexts}
        for name, values in lists.items():
            if not values or min(values) < 1 or len(set(values)) != len(values):
                raise InvalidRequestError(
                    f"The list of {name} values is {','.join(map(str, values)) or 'empty'}.",
                    "Give positive integers, each once, with commas.",
                )
        for name in ("batch_context", "repetitions", "steps"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}.", "Use a positive integer.")


@dataclass(frozen=True)
class Point:
    """What is measured: a prefill of `tokens`, or decode of `batch` sequences behind `tokens` tokens each."""

    phase: str
    tokens: int
    batch: int = 1

    def __str__(self) -> str:
        if self.phase == "prefill":
            return f"prefill[n={self.tokens}]"
        return f"decode[batch={self.batch},context={self.tokens}]"


@dataclass(frozen=True)
class Sample:
    """One repetition of one point: a whole prompt, or the median decode step.

    Attributes:
        seconds: whole steps: schedule, forward pass, sampling, commit.
        forward: of which in the forward pass.
        split_seconds, split_forward: the same of the steps with clock readings inside.
        parts: seconds of the latter by `stamps.PARTS`.
        tokens: computed in `seconds`.
        linear, attention: the work of both parts.
        others: cores that other processes used meanwhile; None is unknown.
    """

    seconds: float
    forward: float
    split_seconds: float
    split_forward: float
    parts: Mapping[str, float]
    tokens: int
    linear: Part
    attention: Part
    others: float | None

    @property
    def whole(self) -> Part:
        """The work of the whole step."""
        return self.linear.plus(self.attention)


@dataclass(frozen=True)
class ModelPoints:
    """A model's measured points.

    Attributes:
        samples: by point, one a repetition.
        left_out: points that do not fit the context or the memory, and why.
        loaded: the model.
        shape, units: its numbers, and which unit does what.
    """

    samples: Mapping[Point, Sequence[Sample]]
    left_out: Sequence[str]
    loaded: LoadedEngine
    shape: ModelShape
    units: Units


class _TimedBackend:
    """Stands before a backend, times its forward pass, and on request its parts."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.in_parts = False
        self.seconds = 0.0
        self.parts: Mapping[str, float] = {}

    def execute(self, forward: Forward, inputs: StepInputs) -> Any:
        start = time.perf_counter()
        if self.in_parts:
            logits, self.parts = self._backend.execute_in_parts(forward, inputs)
        else:
            logits = self._backend.execute(forward, inputs)
        self.seconds = time.perf_counter() - start
        return logits


@dataclass
class _Step:
    seconds: float
    forward: float
    parts: Mapping[str, float]
    linear: Part
    attention: Part


@dataclass
class _Bench:
    """An engine whose steps are timed."""

    stepped: Stepped
    backend: _TimedBackend
    units: Units
    settings: Settings
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def step(self, in_parts: bool) -> _Step:
        self.backend.in_parts = in_parts
        start = time.perf_counter()
        batch = self.stepped.step().batch
        seconds = time.perf_counter() - start
        shape, kv_tokens = self.stepped.engine.shape, 0
        for share in batch.scheduled:
            kv_tokens += share.num_computed_tokens + share.num_scheduled_tokens
        linear, attention = (part(shape, self.units, batch.work, kv_tokens) for part in (linear_part, attention_part))
        parts = self.backend.parts if in_parts else {}
        return _Step(seconds, self.backend.seconds, parts, linear, attention)

    def prompt(self, length: int, rng: random.Random) -> list[int]:
        vocabulary = self.stepped.engine.vocab_size
        return [rng.randrange(vocabulary // 100, vocabulary) for _ in range(length)]

    def one_prefill(self, length: int, first: int) -> list[_Step]:
        """The steps of a prompt that nothing of is cached, in turn whole and in parts; `first` 1 begins in parts."""
        ticket = self.stepped.submit(self.prompt(length, self.rng), 1)
        steps: list[_Step] = []
        while not ticket.times:
            steps.append(self.step(in_parts=(len(steps) + first) % 2 == 1))
        if ticket.request.num_cached_tokens:
            raise RuntimeError("a random prompt was in the prefix cache")
        return steps

    def prefill(self, point: Point, first: int) -> Sample:
        """Two prompts at a time, whose steps are timed whole and in parts in turn: both kinds see the same machine."""
        pairs = []
        for _ in range(max(1, min(4, SHORT_PROMPT // point.tokens))):
            one, other = (self.one_prefill(point.tokens, (first + run) % 2) for run in (0, 1))
            plain = [a if (i + first) % 2 == 0 else b for i, (a, b) in enumerate(zip(one, other, strict=True))]
            split = [b if (i + first) % 2 == 0 else a for i, (a, b) in enumerate(zip(one, other, strict=True))]
            pairs.append((plain, split))
        plain, _ = _middle(pairs, lambda pair: sum(step.seconds for step in pair[0]))
        _, split = _middle(pairs, lambda pair: sum(step.seconds for step in pair[1]))
        linear, attention = plain[0].linear, plain[0].attention
        for step in plain[1:]:
            linear, attention = linear.plus(step.linear), attention.plus(step.attention)
        return Sample(
            sum(step.seconds for step in plain),
            sum(step.forward for step in plain),
            sum(step.seconds for step in split),
            sum(step.forward for step in split),
            {name: sum(step.parts[name] for step in split) for name in split[0].parts},
            point.tokens,
            linear,
            attention,
            None,
        )

    def decode(self, point: Point, first: int) -> Sample:
        # The same prompts in each repetition, and in each batch of one context: the prefix cache holds their KV, which
        # need not be computed again. Each sequence has its own KV all the same.
        tickets: list[TimedRequest] = []
        for index in range(point.batch):
            prompt = self.prompt(point.tokens, random.Random(f"{point.tokens} {index}"))
            tickets.append(self.stepped.submit(prompt, decode_room(point, self.settings)))
        self.backend.in_parts = False
        self.stepped.run_until(lambda: all(ticket.times for ticket in tickets))
        found: dict[bool, list[_Step]] = {True: [], False: []}
        for turn in range(2 * _turns(self.settings)):
            in_parts = (turn + first) % 2 == 1
            self.step(in_parts)  # the other kind's threads are still awake
            found[in_parts] += [self.step(in_parts) for _ in range(TURN_STEPS)]
        if any(ticket.request.num_preemptions for ticket in tickets):
            raise RuntimeError("a sequence under measurement was preempted")
        self.stepped.clear()
        plain, split = found[False], found[True]
        middle = plain[len(plain) // 2]
        return Sample(
            statistics.median(step.seconds for step in plain),
            statistics.median(step.forward for step in plain),
            statistics.median(step.seconds for step in split),
            statistics.median(step.forward for step in split),
            {name: statistics.median(step.parts[name] for step in split) for name in split[0].parts},
            point.batch,
            middle.linear,
            middle.attention,
            None,
        )

    def sample(self, point: Point, first: int) -> Sample:
        """Measure a point, a short one once more while others use the CPU; the quietest try counts.

        Args:
            point: which.
            first: 0 begins with a whole step, 1 with one in parts.
        """
        tries: list[tuple[float, Sample]] = []
        for _ in range(self.settings.retries + 1):
            start = time.perf_counter()
            with Bystanders() as others:
                sample = (self.prefill if point.phase == "prefill" else self.decode)(point, first)
            tries.append((others.cores or 0.0, Sample(**{**vars(sample), "others": others.cores})))
            if tries[-1][0] <= QUIET_CORES or time.perf_counter() - start > LONG_SECONDS:
                break
        return min(tries, key=lambda item: item[0])[1]


def _middle(runs: list[Any], key: Callable[[Any], float]) -> Any:
    """The run whose key is the (lower) median."""
    return sorted(runs, key=key)[(len(runs) - 1) // 2]


def _turns(settings: Settings) -> int:
    return -(-settings.steps // TURN_STEPS)


def decode_room(point: Point, settings: Settings) -> int:
    """Output tokens a sequence of a decode point may need: those measured, and those while others are prefilled."""
    prefill_steps = -(-point.batch * point.tokens // settings.max_num_batched_tokens)
    return 2 * _turns(settings) * (1 + TURN_STEPS) + prefill_steps + point.batch + 2


def planned(settings: Settings, max_model_len: int, capacity: int | None) -> tuple[list[Point], list[str], int]:
    """The points that fit, why others do not, and the tokens of KV cache that hold all of a repetition.

    Args:
        settings: what is wanted.
        max_model_len: longest prompt + output.
        capacity: tokens of KV cache that the memory has room for; None is unknown, and no limit.
    """
    points = [Point("prefill", length) for length in settings.prompt_lengths]
    points += [Point("decode", settings.batch_context, batch) for batch in settings.batches]
    points += [Point("decode", context) for context in settings.contexts]
    fitting: dict[Point, int] = {}
    left_out = []
    for point in points:
        longest = point.tokens + (1 if point.phase == "prefill" else decode_room(point, settings))
        # A block of slack for each sequence.
        need = point.batch * (longest + 16)
        if longest > max_model_len:
            left_out.append(f"{point}: the context holds {max_model_len} tokens")
        elif capacity is not None and need > capacity:
            left_out.append(f"{point}: needs a KV cache of {need} tokens, and the memory has room for {capacity}")
        else:
            fitting[point] = need
    # Batches share their prompts; everything else is beside each other.
    shared = max((need for point, need in fitting.items() if point.batch > 1), default=0)
    room = shared + sum(need for point, need in fitting.items() if point.batch == 1)
    return list(fitting), left_out, room if capacity is None else min(room, capacity)


def measure_model(model: str, settings: Settings, progress: Progress = lambda what, done, total: None) -> ModelPoints:
    """Load a model on the cpu backend and measure its points; after Ctrl-C those repetitions that are complete.

    Raises:
        TwinphaseError: the model cannot be found, read or run.
        InvalidRequestError: no point fits.
    """
    progress("loading the model", 0, 0)
    shape = read_config(open_gguf(resolve_model(model)))
    memory, about = free_memory(), 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    capacity = None if memory is None else memory // 4 // about
    points, left_out, room = planned(settings, shape.context_length, capacity)
    if not points:
        raise InvalidRequestError("No point can be measured: " + "; ".join(left_out) + ".", "Ask for smaller ones.")
    loaded = LoadedEngine(
        model,
        compile_progress=lambda done, total, kernel: progress(f"compiling {kernel}", done, total),
        threads=settings.threads or available_cores(),
        isa=settings.isa,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=max(point.batch for point in points),
        num_kv_blocks=-(-room // EngineConfig.block_size),
    )
    engine, runner = loaded.engine, cast(Runner, loaded.engine.executor)
    backend = _TimedBackend(runner.backend)
    runner.backend = cast(Backend, backend)
    units = compute_units(loaded.checkpoint, loaded.config)
    bench = _Bench(Stepped(engine), backend, units, settings)
    for run in (0, 1):  # captures, and touches the memory
        longest = min(SHORT_PROMPT, max(settings.prompt_lengths), shape.context_length - 1)
        bench.one_prefill(longest, run)
    samples: dict[Point, list[Sample]] = {point: [] for point in points}
    total = settings.repetitions * len(points)
    try:
        for number in range(total):
            repetition, index = divmod(number, len(points))
            progress(str(points[index]), number, total)
            samples[points[index]].append(bench.sample(points[index], repetition % 2))
    except KeyboardInterrupt:
        complete = min(map(len, samples.values()))
        if not complete:
            raise
        samples = {point: many[:complete] for point, many in samples.items()}
        left_out.append(f"interrupted after {complete} of {settings.repetitions} repetitions")
    return ModelPoints(samples, left_out, loaded, engine.shape, units)
