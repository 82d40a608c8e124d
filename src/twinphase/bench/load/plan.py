"""The load of `twinphase bench`: from its options to what is sent and when, and to its parts of the report.

Not for running loads (`load.py`, `saturation.py`), nor for their sections (`load_report.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from twinphase.bench.client.client import run
from twinphase.bench.load import report as load_report
from twinphase.bench.load.arrivals import Arrivals, Closed, Constant, Poisson, Traced
from twinphase.bench.load.repeat import run_loads
from twinphase.bench.load.repeat_report import runs_section, runs_verdicts
from twinphase.bench.load.run import LoadLimits, LoadResult
from twinphase.bench.load.saturation import SweepPlan, find_saturation
from twinphase.bench.load.slo import Slos
from twinphase.bench.load.traces import Scaling, trace_workload
from twinphase.bench.load.workload import Lengths, PromptMaker, Sizing, Workload, make_workload
from twinphase.bench.run import Parts
from twinphase.bench.targets.claims import claims_reader
from twinphase.errors import InvalidRequestError

__all__ = ["LoadOptions", "load_parts"]

Progress = Callable[[str, int, int], None]
NUM_PROMPTS = 100
INPUT_LEN, OUTPUT_LEN = 256, 64  # tokens
SEEDS_A_RUN = 100_003  # so that neither prompts nor random gaps of two runs begin alike
QUICK_PROMPTS = 20
QUICK_SECONDS = 8.0  # of a rate of the search for saturation


@dataclass(frozen=True)
class LoadOptions:
    """What was asked for; None or False: not given.

    Attributes:
        request_rate: requests a second, open loop.
        constant: even gaps instead of random (Poisson) ones.
        max_concurrency: that many at once, closed loop.
        saturate: raise the rate until it is too much; with `max_concurrency` the concurrency instead.
        trace: file of requests, at its own times unless a rate or a concurrency is given.
        scale_lengths, time_scale: of the trace.
        num_prompts: requests; all of a trace, 100 otherwise.
        input_len, output_len: tokens of each prompt and output.
        goodput: words like "ttft:500".
        repetitions: of the whole load, with other prompts each time; 1 unless given.
        max_seconds: send nothing after so many seconds.
        seed: of prompts and gaps.
        quick: fewer requests.
        beside_sweep: a phase sweep is run as well, which may have use for what a load has none for.
    """

    request_rate: float | None = None
    constant: bool = False
    max_concurrency: int | None = None
    saturate: bool = False
    trace: Path | None = None
    scale_lengths: float | None = None
    time_scale: float | None = None
    num_prompts: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    goodput: tuple[str, ...] = ()
    repetitions: int | None = None
    max_seconds: float | None = None
    seed: int = 0
    quick: bool = False
    beside_sweep: bool = False

    @property
    def wanted(self) -> bool:
        """Whether a load was asked for at all."""
        return self.saturate or any(x is not None for x in (self.request_rate, self.max_concurrency, self.trace))

    def check(self) -> None:
        """Refuse what cannot be, and what would be ignored, before anything is loaded.

        Raises:
            InvalidRequestError: naming the option.
        """
        if not self.wanted:
            for option, given in self._given.items():
                if given:
                    raise InvalidRequestError(
                        f"{option} needs a load.", "Add --request-rate, --max-concurrency, --saturate or --trace."
                    )
            return
        if self.request_rate is not None and self.saturate:
            raise InvalidRequestError("--request-rate excludes --saturate.", "A load is one of these.")
        if self.request_rate is not None and self.max_concurrency is not None:
            raise InvalidRequestError(
                "--request-rate with --max-concurrency, a cap on the open loop in vLLM, is not supported: requests "
                "that wait for a place would make it a closed loop.",
                "Give one of them.",
            )
        for option, given, why in self._ignored():
            if given:
                raise InvalidRequestError(f"{option} {why}.", "Leave it out.")
        Slos.parse(self.goodput)
        _ = self.lengths, self.scaling
        if self.num_prompts is not None and self.num_prompts < 1:
            raise InvalidRequestError(f"--num-prompts is {self.num_prompts}.", "Give at least 1.")
        self.arrivals()

    @property
    def _given(self) -> dict[str, bool]:
        """Options of loads only, and whether each was given."""
        return {
            "--goodput": bool(self.goodput),
            "--constant": self.constant,
            "--scale-lengths": self.scale_lengths is not None,
            "--time-scale": self.time_scale is not None,
            "--num-prompts": self.num_prompts is not None,
            "--random-input-len": self.input_len is not None,
            "--random-output-len": self.output_len is not None,
        }

    def _ignored(self) -> Iterator[tuple[str, bool, str]]:
        """(option, whether it is given and would change nothing, why)."""
        given, traced = self._given, self.trace is not None
        paced = self.request_rate is not None or self.max_concurrency is not None
        closed = self.max_concurrency is not None
        yield "--trace", traced and self.saturate, "has no meaning with --saturate, which makes its own prompts"
        yield (
            "--constant",
            self.constant and closed,
            "is a way of --request-rate or --saturate, not of --max-concurrency",
        )
        yield "--constant", self.constant and traced and not paced, "has no meaning at the times of a trace"
        yield "--num-prompts", self.saturate and given["--num-prompts"], "has no meaning with --saturate, which counts"
        for option in ("--scale-lengths", "--time-scale"):
            yield option, given[option] and not traced, "needs --trace"
        yield "--time-scale", given["--time-scale"] and paced, "has no meaning where a rate or a concurrency is given"
        for option in ("--random-input-len", "--random-output-len"):
            yield option, given[option] and traced, "has no meaning with --trace, which has lengths"
        if not self.beside_sweep:
            yield "--quick", self.quick and traced, "has no meaning with --trace (see --num-prompts)"
            for option, value in (("--repetitions", self.repetitions), ("--max-seconds", self.max_seconds)):
                yield option, value is not None and self.saturate, "has no meaning with --saturate"

    def arrivals(self) -> Arrivals:
        """When requests are sent."""
        if self.max_concurrency is not None:
            return Closed(self.max_concurrency)
        if self.request_rate is not None:
            return Constant(self.request_rate) if self.constant else Poisson(self.request_rate, self.seed)
        return Traced()

    @property
    def lengths(self) -> Lengths:
        """Of made-up requests."""
        prompt = INPUT_LEN if self.input_len is None else self.input_len
        output = OUTPUT_LEN if self.output_len is None else self.output_len
        return Lengths((prompt, prompt), (output, output))

    @property
    def scaling(self) -> Scaling:
        """Of a trace."""
        lengths = 1.0 if self.scale_lengths is None else self.scale_lengths
        return Scaling(lengths, 1.0 if self.time_scale is None else self.time_scale, self.num_prompts)

    def workload(self, sizing: Sizing, run: int = 0) -> Workload:
        """What is sent in a run, the first being 0: other prompts in each."""
        seed = self.seed + run * SEEDS_A_RUN
        if self.trace is not None:
            return trace_workload(self.trace, sizing, self.scaling, seed=seed)
        number = self.num_prompts or (QUICK_PROMPTS if self.quick else NUM_PROMPTS)
        return make_workload(self.lengths, number, sizing, seed=seed)


def load_parts(target: Any, options: LoadOptions, progress: Progress) -> Parts:
    """Run the load against a `LoadTarget` with `sizing()`, close it, and give its parts of the report."""

    async def load_and_close() -> Parts:
        try:
            return await _load(target, options, progress)
        finally:
            await target.close()

    return run(load_and_close())


async def _load(target: Any, options: LoadOptions, progress: Progress) -> Parts:
    sizing, slos = await target.sizing(), Slos.parse(options.goodput)
    if options.saturate:
        plan = SweepPlan(
            mode="rate" if options.max_concurrency is None else "concurrency",
            seconds=QUICK_SECONDS if options.quick else SweepPlan.seconds,
            poisson=not options.constant,
            seed=options.seed,
        )

        def make(number: int, seed: int) -> Workload:
            return make_workload(options.lengths, number, sizing, seed=seed, num_warm_up=1)

        found = await find_saturation(target, make, plan, slos, progress)
        return Parts(
            "saturation",
            load_report.sweep_verdicts(found),
            load_report.sweep_sections(found),
            load_report.sweep_metrics(found),
            data=load_report.sweep_data(found),
            flags={"load": f"raised until saturated, {options.lengths}", **_of_target(target)},
        )
    runs = options.repetitions or 1
    if runs > 1 and options.trace is not None:
        _refuse_same_prompts(options.workload(sizing), options.workload(sizing, 1))
    seeds = count(options.seed + 1, SEEDS_A_RUN)
    results = await run_loads(
        target,
        lambda number: options.workload(sizing, number),
        options.arrivals(),
        runs,
        LoadLimits(send_seconds=options.max_seconds or math.inf),
        slos,
        progress,
        lambda: claims_reader(target, PromptMaker(sizing, next(seeds))),
    )
    return _parts_of_runs(results, _of_target(target))


def _refuse_same_prompts(first: Workload, second: Workload) -> None:
    same = [a.prompt == b.prompt for a, b in zip(first.requests, second.requests, strict=False)]
    if any(same):
        raise InvalidRequestError(
            "--repetitions of a trace with texts of its own would find them in the server's prefix cache.",
            "Leave it out.",
        )


def _parts_of_runs(results: Sequence[LoadResult], flags: Mapping[str, object]) -> Parts:
    """All runs together first, where there are several; then the first one whole."""
    first = results[0]
    verdicts, sections = list(load_report.load_verdicts(first)), list(load_report.load_sections(first))
    data = load_report.load_data(first)
    if len(results) > 1:
        verdicts = [*runs_verdicts(results), *verdicts]
        sections.insert(0, runs_section(results))
        data |= {"further runs": [load_report.load_data(result) for result in results[1:]]}
        flags = {**flags, "runs of the load": len(results)}
    shown = {"load": f"{first.workload}, {first.arrivals}", **flags, **first.conditions}
    return Parts(
        "load", verdicts, sections, load_report.load_metrics(results), noise=first.notes, data=data, flags=shown
    )


def _of_target(target: Any) -> dict[str, object]:
    """What a load's target has otherwise than that of a sweep beside it."""
    cache = target.facts.details.get("prefix caching")
    return {} if cache is None else {"prefix caching in the load": cache}
