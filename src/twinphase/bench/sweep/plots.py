"""Charts of a phase sweep: measured points, the fitted law, residuals."""

from __future__ import annotations

from typing import Any

from twinphase.bench.report.plots import Row, lines
from twinphase.bench.report.report import Plot
from twinphase.bench.statistics import median_interval
from twinphase.bench.sweep.fit import Fit, SweepPoint
from twinphase.bench.sweep.plan import Place
from twinphase.bench.sweep.run import PhaseSweep

__all__ = ["decode_plots", "prefill_plots"]

STEPS = 60  # of a drawn curve
HELD_OUT = "held out"
Points = list[tuple[Place, SweepPoint]]


def prefill_plots(result: PhaseSweep, found: Fit) -> list[Plot]:
    """Time and rate by prompt length, and residuals."""
    points = result.points("prefill")
    x = ("prompt tokens", "prompt tokens")
    times, rates = [], []
    for place, point in points:
        time = _milliseconds(point)
        at: Row = {"series": HELD_OUT if place.held_out else "prefill", x[0]: point.x[0]}
        times.append({**at, **time})
        per_second = {"tok/s": time["ms"], "low": time["high"], "high": time["low"]}
        rates.append({**at, **{key: point.x[0] / ms * 1000 for key, ms in per_second.items()}})
    low, high = min(point.x[0] for _, point in points), max(point.x[0] for _, point in points)
    curve = [low * (high / low) ** (index / STEPS) for index in range(STEPS + 1)]
    law = {n: found.seconds((n, 1)) for n in curve}
    return [
        lines(
            "prefill-time",
            "Prefill time by prompt length",
            times,
            x,
            ("ms", "prefill time (ms)"),
            series="series",
            fitted=[{"series": "prefill", x[0]: n, "ms": seconds * 1000} for n, seconds in law.items()],
            log_x=True,
            log_y=True,
            caption=f"{_points_text(points)}; line: {found.law.formula}.",
        ),
        lines(
            "prefill-rate",
            "Prefill rate by prompt length: short prompts bear the fixed cost, long ones pay for attention",
            rates,
            x,
            ("tok/s", "prompt tokens per second"),
            series="series",
            fitted=[{"series": "prefill", x[0]: n, "tok/s": n / seconds} for n, seconds in law.items()],
            log_x=True,
            caption=f"{_points_text(points)}; line: n / ({found.law.formula}).",
        ),
        _residuals("prefill", points, found, x[0], log_x=True),
    ]


def decode_plots(result: PhaseSweep, found: Fit) -> list[Plot]:
    """Time per step by position and by batch, and residuals."""
    points = result.points("decode")
    batches = sorted({place.batch for place, _ in points})
    by_batch = {batch: [(place, point) for place, point in points if place.batch == batch] for batch in batches}
    rows, fitted = [], []
    for batch, own in by_batch.items():
        if len(own) < 2 and batch > 1:
            continue
        rows += [
            {"series": f"batch {batch}", "position": point.x[0], **_milliseconds(point),
             "used as": HELD_OUT if place.held_out else "fit"}
            for place, point in own
        ]  # fmt: skip
        low, high = min(point.x[0] for _, point in own), max(point.x[0] for _, point in own)
        ends = [low + (high - low) * index / STEPS for index in range(STEPS + 1)]
        fitted += [{"series": f"batch {batch}", "position": at, "ms": found.seconds((at, batch)) * 1000} for at in ends]
    plots = [
        lines(
            "decode-position",
            "Decode: time per step by position",
            rows,
            ("position", "tokens before the decoded one"),
            ("ms", "time per step (ms)"),
            series="series",
            fitted=fitted,
            log_x=True,
            caption=f"{_points_text(points)}; lines: {found.law.formula}.",
        )
    ]
    if len(batches) > 2:
        plots.append(_by_batch(points, found))
    return [*plots, _residuals("decode", points, found, "fitted time (ms)")]


def _by_batch(points: Points, found: Fit) -> Plot:
    """Behind the shortest prompts, where most batch sizes were measured."""
    short = min(place.length for place, _ in points)
    chosen = [(place, point) for place, point in points if place.length == short]
    position = sum(point.x[0] for _, point in chosen) / len(chosen)
    most = max(place.batch for place, _ in chosen)
    sizes = [1 + (most - 1) * index / STEPS for index in range(STEPS + 1)]
    return lines(
        "decode-batch",
        f"Decode: time per step by batch size, behind {position:,.0f} tokens",
        [
            {"series": HELD_OUT if place.held_out else "decode", "batch": place.batch, **_milliseconds(point)}
            for place, point in chosen
        ],
        ("batch", "sequences at once"),
        ("ms", "time per step (ms)"),
        series="series",
        fitted=[{"series": "decode", "batch": size, "ms": found.seconds((position, size)) * 1000} for size in sizes],
        caption=f"{_points_text(chosen)}; line: {found.law.formula}.",
    )


def _residuals(phase: str, points: Points, found: Fit, x: str, log_x: bool = False) -> Plot:
    """How far each point lies from the law, which is the line at zero."""
    y = "residual (%)"
    rows: list[dict[str, Any]] = [
        {
            "series": HELD_OUT if place.held_out else phase,
            x: point.x[0] if phase == "prefill" else found.seconds(point.x) * 1000,
            y: (point.median / found.seconds(point.x) - 1) * 100,
            "at": str(place),
        }
        for place, point in points
    ]
    ends = (pick(row[x] for row in rows) for pick in (min, max))
    return lines(
        f"{phase}-residuals",
        f"{phase.capitalize()}: measured against the law",
        rows,
        (x, x),
        (y, "(measured - law) / law (%)"),
        series="series",
        fitted=[{"series": phase, x: end, y: 0.0} for end in ends],
        log_x=log_x,
        caption="Points along a curve: the law lacks a term.",
    )


def _points_text(points: Points) -> str:
    """What points and bars are, with the confidence that so few repetitions really give."""
    text = f"Points: median of {max(len(point.values) for _, point in points)} repetitions"
    levels = [median_interval(point.values).confidence for _, point in points if len(point.values) > 1]
    return f"{text}; bars: {min(levels):.0%} interval of the median" if levels else text


def _milliseconds(point: SweepPoint) -> dict[str, float]:
    interval = median_interval(point.values)
    return {"ms": point.median * 1000, "low": interval.low * 1000, "high": interval.high * 1000}
