"""Charts of a phase sweep: measured points with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinphase.phases.statistics import median_interval
from twinphase_bench.report.plots import Row, lines
from twinphase_bench.report.report import Plot
from twinphase_bench.sweep.run import PhaseSweep, SweepPoint


def prefill_plots(result: PhaseSweep) -> list[Plot]:
    """Time and rate by prompt length."""
    points = result.points("prefill")
    if not points:
        return []
    x = ("prompt tokens", "prompt tokens")
    times: list[Row] = []
    rates: list[Row] = []
    for point in points:
        length = {"series": "prefill", x[0]: point.tokens}
        time = _milliseconds(point)
        per_second = {"tok/s": time["ms"], "low": time["high"], "high": time["low"]}
        times.append({**length, **time})
        rates.append(
            {**length, **{key: 1000 * point.tokens / ms for key, ms in per_second.items()}}
        )
    style: dict[str, Any] = {"series": "series", "log_x": True, "caption": _points_text(points)}
    fast = (
        "Prefill rate by prompt length: short prompts bear the fixed cost, long ones pay for "
        "attention"
    )
    time_axis = ("ms", "prefill time (ms)")
    rate_axis = ("tok/s", "prompt tokens per second")
    return [
        lines(
            "prefill-time",
            "Prefill time by prompt length",
            times,
            x,
            time_axis,
            log_y=True,
            **style,
        ),
        lines("prefill-rate", fast, rates, x, rate_axis, **style),
    ]


def decode_plots(result: PhaseSweep) -> list[Plot]:
    """Time per step by position, and by batch after the shortest prompts."""
    points = result.points("decode")
    if not points:
        return []
    rows = [
        {
            "series": f"batch {point.place.batch}",
            "position": point.tokens,
            **_milliseconds(point),
        }
        for point in points
    ]
    x = ("position", "tokens before the decoded one")
    y = ("ms", "time per step (ms)")
    title = "Decode: time per step by position"
    caption = _points_text(points)
    plots = [
        lines("decode-position", title, rows, x, y, series="series", log_x=True, caption=caption)
    ]
    shortest = min(point.place.length for point in points)
    chosen = [point for point in points if point.place.length == shortest]
    if len(chosen) > 2:
        position = sum(point.tokens for point in chosen) / len(chosen)
        rows = [
            {"series": "decode", "batch": point.place.batch, **_milliseconds(point)}
            for point in chosen
        ]
        title = f"Decode: time per step by batch size, after {position:,.0f} tokens"
        x = ("batch", "sequences at once")
        plots.append(
            lines("decode-batch", title, rows, x, y, series="series", caption=_points_text(chosen))
        )
    return plots


def _points_text(points: Sequence[SweepPoint]) -> str:
    """A description of points and bars, with the actual confidence of the few repetitions."""
    text = f"Points: median of {max(len(point.values) for point in points)} repetitions"
    levels = [median_interval(point.values).confidence for point in points if len(point.values) > 1]
    return f"{text}; bars: {min(levels):.0%} interval of the median." if levels else f"{text}."


def _milliseconds(point: SweepPoint) -> dict[str, float]:
    interval = median_interval(point.values)
    return {"ms": point.median * 1000, "low": interval.low * 1000, "high": interval.high * 1000}
