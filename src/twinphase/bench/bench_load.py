"""The load of `twinphase bench`: from its options to what is sent and when, and to its parts of the report.

Not for running loads (`load.py`, `saturation.py`), nor for their sections (`load_report.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinphase.bench import load_report
from twinphase.bench.arrivals import Arrivals, Closed, Constant, Poisson, Traced
from twinphase.bench.bench_report import Parts
from twinphase.bench.client import run
from twinphase.bench.foreign_claims import claims_reader
from twinphase.bench.load import run_load
from twinphase.bench.saturation import SweepPlan, find_saturation
from twinphase.bench.slo import Slos
from twinphase.bench.traces import Scaling, trace_workload
from twinphase.bench.workload import Lengths, PromptMaker, Sizing, Workload, make_workload
from twinphase.errors import InvalidRequestError

__all__ = ["LoadOptions", "load_parts"]

Progress = Callable[[str, int, int], None]
NUM_PROMPTS = 100
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
        seed: of prompts and gaps.
        quick: fewer requests.
    """

    request_rate: float | None = None
    constant: bool = False
    max_concurrency: int | None = None
    saturate: bool = False
    trace: Path | None = None
    scale_lengths: float = 1.0
    time_scale: float = 1.0
    num_prompts: int | None = None
    input_len: int = 256
    output_len: int = 64
    goodput: tuple[str, ...] = ()
    seed: int = 0
    quick: bool = False

    @property
    def wanted(self) -> bool:
        """Whether a load was asked for at all."""
        return self.saturate or any(x is not None for x in (self.request_rate, self.max_concurrency, self.trace))

    def check(self) -> None:
        """Refuse what cannot be before anything is loaded.

        Raises:
            InvalidRequestError: options that exclude each other, or mean nothing without a load.
        """
        if self.goodput and not self.wanted:
            raise InvalidRequestError(
                "--goodput needs a load.", "Add --request-rate, --max-concurrency, --saturate or --trace."
            )
        if self.request_rate is not None and (self.max_concurrency is not None or self.saturate):
            raise InvalidRequestError(
                "--request-rate excludes --max-concurrency and --saturate.", "A load is one of these."
            )
        if self.constant and (self.max_concurrency is not None or not self.wanted):
            raise InvalidRequestError("--constant is a way of --request-rate or --saturate.", "Leave it out.")
        if self.saturate and self.trace is not None:
            raise InvalidRequestError("--saturate makes its own prompts.", "Leave --trace out.")
        Slos.parse(self.goodput)
        Lengths((self.input_len, self.input_len), (self.output_len, self.output_len))
        if self.num_prompts is not None and self.num_prompts < 1:
            raise InvalidRequestError(f"--num-prompts is {self.num_prompts}.", "Give at least 1.")
        self.arrivals()

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
        return Lengths((self.input_len, self.input_len), (self.output_len, self.output_len))

    def workload(self, sizing: Sizing) -> Workload:
        """What is sent."""
        if self.trace is not None:
            scaling = Scaling(self.scale_lengths, self.time_scale, self.num_prompts)
            return trace_workload(self.trace, sizing, scaling, seed=self.seed)
        number = self.num_prompts or (QUICK_PROMPTS if self.quick else NUM_PROMPTS)
        return make_workload(self.lengths, number, sizing, seed=self.seed)


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
    reader = claims_reader(target, PromptMaker(sizing, options.seed + 1))
    result = await run_load(target, options.workload(sizing), options.arrivals(), None, slos, progress, reader)
    return Parts(
        "load",
        load_report.load_verdicts(result),
        load_report.load_sections(result),
        load_report.load_metrics(result),
        noise=result.notes,
        data=load_report.load_data(result),
        flags={"load": f"{result.workload}, {result.arrivals}", **_of_target(target), **result.conditions},
    )


def _of_target(target: Any) -> dict[str, object]:
    """What a load's target has otherwise than that of a sweep beside it."""
    cache = target.facts.details.get("prefix caching")
    return {} if cache is None else {"prefix caching in the load": cache}
