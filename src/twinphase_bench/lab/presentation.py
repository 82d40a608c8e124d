"""The table, the plot and the metrics of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinphase_bench.lab.experiment import Experiment, Reading, Trial
from twinphase_bench.report.plots import bars, lines
from twinphase_bench.report.report import Column, Metric, Plot, Table, table_of

CURVE_POINTS = 40


def cell(values: Sequence[float]) -> str:
    """Median and interval: "12.3 (11.9 to 13)"."""
    reading = Reading.of(values)
    whole = abs(reading.high) >= 1000 or all(float(value).is_integer() for value in values)
    return reading.shown(lambda value: format(value, ",.0f" if whole else ",.3g"))


def table(experiment: Experiment, trial: Trial) -> Table:
    """A table with a row per variant and a column per quantity."""
    quantities = (*experiment.figure.quantities, *experiment.also)
    definition = "median of the repetitions and its interval (90 % or more)"
    columns = [Column(quantity, definition) for quantity in quantities]
    rows = (
        (
            _label(variant),
            *(cell(found[quantity]) if quantity in found else "" for quantity in quantities),
        )
        for variant, found in trial.runs.items()
    )
    return table_of("What was measured", [experiment.figure.x, *columns], rows)


def plot(experiment: Experiment, trial: Trial) -> Plot:
    """Lines over numeric variants, otherwise bars."""
    figure = experiment.figure
    several = len(figure.quantities) > 1
    x = figure.x
    y = figure.quantities[0].rpartition(", ")[2] if several else figure.quantities[0]
    rows: list[dict[str, Any]] = []
    for quantity in figure.quantities:
        for variant, found in trial.runs.items():
            reading = Reading.of(found.get(quantity, ()))
            if reading.n:
                ends = (
                    {"low": reading.low, "high": reading.high} if reading.low < reading.high else {}
                )
                rows.append({x: variant, y: reading.value, **ends, "what": _series(quantity)})
    name = experiment.name.replace("-", "_")
    caption = f"Medians with their intervals. {experiment.method}"
    if all(isinstance(variant, int) for variant in trial.runs):
        return lines(
            name,
            figure.title,
            rows,
            (x, x),
            (y, y),
            series="what",
            fitted=_curves(rows, trial, x, y),
            log_x=figure.log,
            log_y=figure.log,
            caption=caption,
        )
    return bars(
        name,
        figure.title,
        rows,
        (x, ""),
        (y, y),
        part="what" if several else None,
        order=list(trial.runs),
        grouped=several and not figure.stacked,
        caption=caption,
    )


def _curves(rows: Sequence[dict[str, Any]], trial: Trial, x: str, y: str) -> list[dict[str, Any]]:
    """Lines of a plot: the curves, and lines through the points of series without a curve."""
    through = [
        {key: row[key] for key in (x, y, "what")} for row in rows if row["what"] not in trial.curves
    ]
    first = min(trial.runs)
    last = max(trial.runs)
    for name, curve in trial.curves.items():
        for step in range(CURVE_POINTS + 1):
            at = first + (last - first) * step / CURVE_POINTS
            through.append({x: at, y: curve(at), "what": name})
    return through


def metrics(experiment: Experiment, trial: Trial) -> list[Metric]:
    """The metrics for `bench compare`: the repeated times of the table."""
    found = []
    for variant, quantities in trial.runs.items():
        for quantity in (*experiment.figure.quantities, *experiment.also):
            values = quantities.get(quantity, ())
            if quantity.endswith(", ms") and len(values) > 1:
                name = f"{experiment.name} {_series(quantity)} [{_label(variant)}]"
                seconds = tuple(value / 1e3 for value in values)
                found.append(Metric(name, "s", "lower", seconds, experiment.method))
    return found


def _series(quantity: str) -> str:
    """The name of a quantity without its unit."""
    return quantity.rpartition(", ")[0] or quantity


def _label(variant: Any) -> str:
    return f"{variant:,}" if isinstance(variant, int) else str(variant)
