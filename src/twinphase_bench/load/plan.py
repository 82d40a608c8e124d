"""The load of `twinphase bench`: converts options to a load, and its result to report parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twinphase import (
    Arrivals,
    Closed,
    InvalidRequestError,
    Lengths,
    Paced,
    Progress,
    Scaling,
    Traced,
)
from twinphase.phases.slo import Slos
from twinphase_bench.client.client import run
from twinphase_bench.load import report
from twinphase_bench.load.run import LoadResult, run_load
from twinphase_bench.load.traces import trace_workload
from twinphase_bench.load.workload import Sizing, Workload, make_workload
from twinphase_bench.run import Parts

NUM_PROMPTS = 100
QUICK_PROMPTS = 20
# In tokens.
INPUT_LEN = 256
OUTPUT_LEN = 64
# The seeds of two runs differ by this, so that neither prompts nor random gaps are the same.
SEED_STEP = 100_003
WITHOUT_LOAD = "needs a load: --request-rate, --max-concurrency or --trace"


@dataclass(frozen=True)
class LoadOptions:
    """The given options; None or False means that an option was not given.

    Attributes:
        request_rate: requests per second of an open loop.
        constant: whether gaps are even instead of random (Poisson).
        max_concurrency: requests in flight of a closed loop.
        trace: file of requests, sent at its own times unless a rate or a concurrency is given.
        num_prompts: number of requests; by default all of a trace, or 100.
        random_input_len, random_output_len: tokens of each prompt, and of each output.
        goodput: service levels, as words like "ttft:500".
        repetitions: repetitions of the whole load, with other prompts each time; default: 1.
        max_seconds: maximum sending time.
        seed: random seed of prompts and gaps.
        beside_sweep: whether a phase sweep runs too, which may use options that a load does not.
    """

    request_rate: float | None = None
    constant: bool = False
    max_concurrency: int | None = None
    trace: Path | None = None
    scale_lengths: float | None = None
    time_scale: float | None = None
    num_prompts: int | None = None
    random_input_len: int | None = None
    random_output_len: int | None = None
    goodput: tuple[str, ...] = ()
    repetitions: int | None = None
    max_seconds: float | None = None
    seed: int = 0
    quick: bool = False
    beside_sweep: bool = False

    @property
    def wanted(self) -> bool:
        """Whether a load was requested."""
        return any(x is not None for x in (self.request_rate, self.max_concurrency, self.trace))

    def check(self) -> None:
        """Refuse options that are invalid or have no effect, before anything is loaded.

        Raises:
            InvalidRequestError: an option is invalid or has no effect; the message names it.
        """
        if self.request_rate is not None and self.max_concurrency is not None:
            raise InvalidRequestError(
                "--request-rate with --max-concurrency, a cap on the open loop in vLLM, is not "
                "supported: requests that wait for a place would make it a closed loop.",
                "Give one of them.",
            )
        for option, why in self._ignored():
            raise InvalidRequestError(f"{option} {why}.", "Leave it out.")
        if self.wanted:
            Slos.parse(self.goodput)
            _ = self.lengths, self.scaling, self.arrivals()

    def _ignored(self) -> Iterator[tuple[str, str]]:
        """Each given option that has no effect, and the reason."""
        closed = self.max_concurrency is not None
        traced = self.trace is not None
        paced = closed or self.request_rate is not None
        alone = self.wanted and not self.beside_sweep
        lengths = ("random_input_len", "random_output_len")
        scales = ("scale_lengths", "time_scale")
        all_options = ("goodput", "constant", *scales, "num_prompts", *lengths)
        rules: list[tuple[bool, tuple[str, ...], str]] = [
            (not self.wanted, all_options, WITHOUT_LOAD),
            (closed, ("constant",), "is a way of --request-rate, not of --max-concurrency"),
            (traced and not paced, ("constant",), "has no meaning at the times of a trace"),
            (not traced, scales, "needs --trace"),
            (paced, ("time_scale",), "has no meaning where a rate or a concurrency is given"),
            (traced, lengths, "has no meaning with --trace, which has lengths"),
            (traced and alone, ("quick",), "has no meaning with --trace (see --num-prompts)"),
        ]
        for applies, names, why in rules:
            for name in names:
                value = getattr(self, name)
                if applies and value is not None and value is not False and value != ():
                    yield f"--{name.replace('_', '-')}", why

    def arrivals(self, run: int = 0) -> Arrivals:
        """The send times of a run; each run, from 0 on, has its own random gaps."""
        if self.max_concurrency is not None:
            return Closed(self.max_concurrency)
        if self.request_rate is not None:
            return Paced(self.request_rate, self.seed + run, self.constant)
        return Traced()

    @property
    def lengths(self) -> Lengths:
        """Lengths of synthetic requests, in words."""
        prompt = INPUT_LEN if self.random_input_len is None else self.random_input_len
        output = OUTPUT_LEN if self.random_output_len is None else self.random_output_len
        return Lengths((prompt, prompt), (output, output))

    @property
    def scaling(self) -> Scaling:
        """How a trace is scaled, in words."""
        lengths, time = (
            1.0 if scale is None else scale for scale in (self.scale_lengths, self.time_scale)
        )
        return Scaling(lengths, time, self.num_prompts)

    def workload(self, sizing: Sizing, run: int = 0) -> Workload:
        """The requests of a run; each run, from 0 on, has other prompts."""
        seed = self.seed + run * SEED_STEP
        if self.trace is not None:
            return trace_workload(self.trace, sizing, self.scaling, seed=seed)
        number = self.num_prompts or (QUICK_PROMPTS if self.quick else NUM_PROMPTS)
        return make_workload(self.lengths, number, sizing, seed=seed)


def load_parts(target: Any, options: LoadOptions, progress: Progress) -> Parts:
    """Run the load against a target with `sizing()`, close it, and return the report's parts."""

    async def load_and_close() -> Parts:
        try:
            sizing = await target.sizing()
            parts = await _runs(target, options, sizing, progress)
        finally:
            await target.close()
        # A sweep beside the load has another setting.
        cache = target.facts.details.get("prefix caching")
        return (
            parts
            if cache is None
            else replace(parts, flags={**parts.flags, "prefix caching in the load": cache})
        )

    return run(load_and_close())


async def _runs(target: Any, options: LoadOptions, sizing: Sizing, progress: Progress) -> Parts:
    """The runs of the load; runs are independent, but the requests of a run share a queue."""
    number = options.repetitions or 1
    slos = Slos.parse(options.goodput)
    if number > 1 and options.trace is not None:
        _refuse_same_prompts(options.workload(sizing), options.workload(sizing, 1))
    results = []
    for index in range(number):
        if number > 1:
            progress("repetition", index, number)
        results.append(
            await run_load(
                target,
                options.workload(sizing, index),
                options.arrivals(index),
                slos=slos,
                send_seconds=options.max_seconds or math.inf,
                progress=progress,
            )
        )
    return _parts_of_runs(results)


def _refuse_same_prompts(first: Workload, second: Workload) -> None:
    if any(a.prompt == b.prompt for a, b in zip(first.requests, second.requests, strict=False)):
        raise InvalidRequestError(
            "--repetitions of a trace with texts of its own would find them in the server's prefix "
            "cache.",
            "Leave it out.",
        )


def _parts_of_runs(results: Sequence[LoadResult]) -> Parts:
    """Report all runs together if there are several, then the first one in full."""
    first = results[0]
    others = results[1:]
    verdicts = report.load_verdicts(first)
    sections = report.load_sections(first)
    data = report.load_data(first)
    flags = {"load": f"{first.workload}, {first.arrivals}", **first.conditions}
    if others:
        verdicts = report.runs_verdicts(results) + verdicts
        sections.insert(0, report.runs_section(results))
        data["further runs"] = [report.load_data(result) for result in others]
        flags["runs of the load"] = str(len(results))
    return Parts(
        "load",
        verdicts,
        sections,
        metrics=report.load_metrics(results),
        noise=report.notes_of(first),
        data=data,
        flags=flags,
    )
