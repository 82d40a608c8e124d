"""`twinphase roofline`: this machine's ceilings, and a model's two phases under them.

It combines measurements (`ceilings.py`, `measure.py`), evaluation (`findings.py`), text
(`report.py`) and drawings (`plots.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from twinphase import (
    EngineConfig,
    InvalidRequestError,
    LinkRates,
    Progress,
    device_of,
    measure_ceilings,
    measure_link,
    measured_ceilings,
)
from twinphase.phases.hardware import Ceilings, cache_levels
from twinphase.phases.roofline import Roofline, measured_roofline
from twinphase_bench.conditions import MIN_NOTABLE_CORES, Bystanders, conditions
from twinphase_bench.report.report import Report, Section
from twinphase_bench.roofline import report as words
from twinphase_bench.roofline.ceilings import CeilingSweep
from twinphase_bench.roofline.findings import PointFinding, find
from twinphase_bench.roofline.measure import ModelPoints, Settings, measure_model
from twinphase_bench.roofline.plots import DrawnPart, roofline_plot


def roofline(
    model: str | None,
    settings: Settings,
    ceiling_repetitions: int = 3,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Measure this machine, and a model on it; the measured ceilings are stored.

    Args:
        model: name or path as for `twinphase run`; None measures only the machine.
        settings: settings of the model's points.
        ceiling_repetitions: number of measurements of the ceilings.
        progress: called before each measurement.

    Raises:
        InvalidRequestError: a model or another backend is combined with ranks.
        TwinphaseError: the model cannot be found, read or run, or the ceilings could not be
            measured.
    """
    config = settings.config
    device = device_of(config)
    if model is not None and config.backend == "cpu":
        config = replace(config, threads=device.threads)
    points = None
    found = []

    def measured() -> list[Ceilings]:
        return measure_ceilings(
            config, ceiling_repetitions, lambda done, total: progress("ceilings", int(done), total)
        )

    with Bystanders() as others:
        link = _link(config, model, progress)
        sweep = CeilingSweep(measured(), measured_ceilings(config))
        if model is not None:
            points = measure_model(model, replace(settings, config=config), progress)
            # Bandwidth changes, so ceilings are measured before and after the model. They are
            # measured once more if a step was faster, before the counts are doubted.
            for _ in range(2):
                sweep = replace(sweep, runs=[*sweep.runs, *measured()])
                found = [
                    find(point, samples, sweep.now) for point, samples in points.samples.items()
                ]
                if not any(placed.over_ceiling for one in found for _, placed in one.placed):
                    break
    ceilings = sweep.now
    problem = sweep.save()
    on_gpu = device.free_memory() is not None
    line = measured_roofline(ceilings, () if on_gpu else cache_levels(device.threads))
    marks = _marks(found)
    sections = [_machine_section(sweep, line, marks, link)]
    if points:
        sections += [_phase_section(found, phase) for phase in ("prefill", "decode")]
        sections.append(Section("How the parts were timed", (), (words.HOW_APART,)))
    return Report(
        kind="roofline",
        title=f"Roofline of {points.workshop.path.name if points else 'this machine'}",
        verdicts=words.verdicts(line, found, _disturbance(others, ceilings)),
        conditions=_conditions(points, settings, ceilings, ceiling_repetitions),
        noise=_noise(sweep, problem, points, others),
        sections=sections,
        metrics=words.metrics(sweep, found),
        data=_data(sweep, line, points) | {"link": link and asdict(link)},
    )


def _disturbance(others: Bystanders, ceilings: Ceilings) -> str:
    """The reason why the measurement decides nothing; "" if it was undisturbed."""
    if others.cores is not None and others.cores >= MIN_NOTABLE_CORES:
        return f"other programs used {others.cores:.2f} cores meanwhile; repeat on a quiet machine"
    if ceilings.provisional:
        return "the ceilings were disturbed; repeat on a quiet machine"
    return ""


def _link(config: EngineConfig, model: str | None, progress: Progress) -> LinkRates | None:
    """Measure the communication of several ranks; raises InvalidRequestError if not supported."""
    ranks = config.tensor_parallel_size
    if ranks == 1:
        return None
    if model is not None or config.backend != "cpu":
        raise InvalidRequestError(
            "What ranks exchange is measured on the cpu backend, without a model.",
            "Leave out MODEL and --backend, or --tensor-parallel-size.",
        )
    progress("what ranks exchange", 0, 1)
    return measure_link(ranks, config.rank_threads or 1, config.isa)


def settings_of(given: Mapping[str, Any], engine: Mapping[str, Any]) -> Settings:
    """Settings from the command line's options; `given` has only the given ones.

    Raises:
        InvalidRequestError: a list is malformed, or a value is out of range.
    """
    values = {name: given[name] for name in Settings.__dataclass_fields__ if name in given}
    for name in {"prompt_lengths", "batches", "contexts"} & values.keys():
        try:
            values[name] = tuple(int(word) for word in values[name].split(","))
        except ValueError:
            option = name.replace("_", "-")
            raise InvalidRequestError(
                f"--{option} is {values[name]!r}.", "Use numbers such as 1,2,4."
            ) from None
    return Settings(**values, config=EngineConfig(**engine))


def _conditions(
    points: ModelPoints | None, settings: Settings, ceilings: Ceilings, ceiling_repetitions: int
) -> dict[str, str]:
    flags: dict[str, object] = {
        "ceilings": f"{ceiling_repetitions} repetitions before and after; MBU counts from the best "
        "bandwidth of these"
    }
    if points is None:
        return conditions(threads=ceilings.threads, isa=ceilings.isa, flags=flags)
    shape = points.workshop.shape
    units = points.workshop.units
    flags |= {
        "repetitions": f"{min(map(len, points.samples.values()))}, all points in turn; figures are "
        "medians",
        "decode steps": f"{settings.steps} whole and {settings.steps} in parts per repetition",
        "largest prefill chunk": f"{settings.config.max_num_batched_tokens} tokens",
        "KV cache": f"{settings.config.kv_cache_dtype}, {shape.kv_token_bytes:,} bytes per token",
        "weights": f"{shape.linear_bytes + shape.head_bytes:,} bytes read per step",
        "units": f"linear layers {units.linear}; attention {units.scores} (scores), {units.values} "
        "(values)",
    }
    return conditions(
        model=points.workshop.path, threads=ceilings.threads, isa=ceilings.isa, flags=flags
    )


def _noise(
    sweep: CeilingSweep, problem: str, points: ModelPoints | None, others: Bystanders
) -> list[str]:
    lines = [others.noise()]
    if sweep.kept.provisional:
        lines.append(
            "Other processes took the cores while ceilings were measured: later runs measure them "
            "again."
        )
    if problem:
        lines.append(f"The ceilings could not be kept for later runs: {problem}.")
    if points:
        seconds = [[sample.seconds for sample in many] for many in points.samples.values()]
        middle = statistics.median(
            (max(many) - min(many)) / statistics.median(many) / 2 for many in seconds
        )
        lines.append(
            f"Half the range of a point's time is {middle:.0%} of its median (median point)."
        )
        lines += [f"Left out: {reason}." for reason in points.left_out]
    return lines


def _machine_section(
    sweep: CeilingSweep, line: Roofline, marks: Sequence[DrawnPart], link: LinkRates | None
) -> Section:
    caption = (
        "Solid lines: bandwidth by working set; dashed: peaks of the arithmetic units; crosses: "
        "balance points."
    )
    if marks:
        caption += (
            " Points: medians; the labels are prompt lengths, batches and contexts of a line's "
            "ends."
        )
    plots = (roofline_plot(line, marks, caption),) if line.roofs and line.slopes else ()
    tables = [words.balance_table(line), words.ceilings_table(sweep)]
    if link:
        tables.append(words.link_table(link))
    return Section("The machine", tables=tables, plots=plots)


def _phase_section(found: Sequence[PointFinding], phase: str) -> Section:
    tables = words.point_table(found, phase), words.part_table(found, phase)
    return Section(phase.capitalize(), tables=[table for table in tables if table.rows])


def _series(found: Sequence[PointFinding], series: str) -> list[PointFinding]:
    """Points of a series: "prefill" varies the prompt, the others the "batch" or "context"."""
    if series == "prefill":
        return sorted(
            (one for one in found if one.point.phase == series), key=lambda one: one.point.tokens
        )
    decodes = [one for one in found if one.point.phase == "decode"]
    if series == "context":
        return sorted(
            (one for one in decodes if one.point.batch == 1), key=lambda one: one.point.tokens
        )
    context = max(decodes, key=lambda one: one.point.batch).point.tokens if decodes else 0
    return sorted(
        (one for one in decodes if one.point.tokens == context), key=lambda one: one.point.batch
    )


def _marks(found: Sequence[PointFinding]) -> list[DrawnPart]:
    """The parts to draw, series by series."""
    marks = []
    # Linear layers do not depend on the context.
    drawn = [("linear", "prefill"), ("linear", "batch")]
    drawn += [("attention", series) for series in ("prefill", "batch", "context")]
    for part, series in drawn:
        for one in _series(found, series):
            placed = one.linear if part == "linear" else one.attention
            point = one.point
            if not one.adds_up or placed.intensity is None or placed.rate <= 0:
                continue
            label = f"batch {point.batch}" if series == "batch" else f"context {point.tokens:,}"
            label = f"n = {point.tokens:,}" if series == "prefill" else label
            facts = {
                "MFU": words.percent(placed.mfu),
                "MBU": words.percent(placed.mbu),
                "bound by": placed.bound,
            }
            name = f"{series} {part}"
            marks.append(
                DrawnPart(
                    point.phase, part, name, label, placed.intensity, rate=placed.rate, facts=facts
                )
            )
    return marks


def _data(sweep: CeilingSweep, line: Roofline, points: ModelPoints | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "ceilings": {"best": asdict(sweep.kept), "runs": [asdict(one) for one in sweep.runs]},
        "roofline": asdict(line),
        "balance points": [
            {"unit": roof.unit, "memory": slope.name, "flop_per_byte": balance}
            for roof, slope, balance in line.balances
        ],
    }
    if points is not None:
        data["samples"] = {
            str(point): [asdict(sample) for sample in many]
            for point, many in points.samples.items()
        }
        data["left out"] = list(points.left_out)
    return data
