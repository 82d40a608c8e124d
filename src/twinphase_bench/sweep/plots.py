"""Charts of a phase sweep: measured points with their intervals."""

from __future__ import annotations

from twinphase.phases.statistics import median_interval
from twinphase_bench.report.plots import Row, lines
from twinphase_bench.report.report import Plot
from twinphase_bench.sweep.plan import Place
from twinphase_bench.sweep.run import PhaseSweep, SweepPoint

Points = list[tuple[Place, SweepPoint]]


def prefill_plots(result: PhaseSweep) -> list[Plot]:
    """Time and rate by prompt length."""
    points = result.points("prefill")
    x = ("prompt tokens", "prompt tokens")
    times = []
    rates = []
    for _, point in points:
        time = _milliseconds(point)
        at: Row = {"series": "prefill", x[0]: point.x[0]}
        times.append({**at, **time})
        per_second = {"tok/s": time["ms"], "low": time["high"], "high": time["low"]}
        rates.append({**at, **{key: point.x[0] / ms * 1000 for key, ms in per_second.items()}})
    if not points:
        return []
    title = "Prefill time by prompt length"
    caption = _points_text(points)
    fast = (
        "Prefill rate by prompt length: short prompts bear the fixed cost, long ones pay for "
        "attention"
    )
    time_axis = ("ms", "prefill time (ms)")
    rate_axis = ("tok/s", "prompt tokens per second")
    return [
        lines(
            "prefill-time",
            title,
            times,
            x,
            time_axis,
            series="series",
            log_x=True,
            log_y=True,
            caption=caption,
        ),
        lines(
            "prefill-rate", fast, rates, x, rate_axis, series="series", log_x=True, caption=caption
        ),
    ]


def decode_plots(result: PhaseSweep) -> list[Plot]:
    """Time per step by position, and after the shortest prompts by batch."""
    points = result.points("decode")
    if not points:
        return []
    rows = [
        {"series": f"batch {place.batch}", "position": point.x[0], **_milliseconds(point)}
        for place, point in points
    ]
    x = ("position", "tokens before the decoded one")
    y = ("ms", "time per step (ms)")
    title = "Decode: time per step by position"
    caption = _points_text(points)
    plots = [
        lines("decode-position", title, rows, x, y, series="series", log_x=True, caption=caption)
    ]
    short = min(place.length for place, _ in points)
    chosen = [(place, point) for place, point in points if place.length == short]
    if len(chosen) > 2:
        position = sum(point.x[0] for _, point in chosen) / len(chosen)
        rows = [
            {"series": "decode", "batch": place.batch, **_milliseconds(point)}
            for place, point in chosen
        ]
        title = f"Decode: time per step by batch size, after {position:,.0f} tokens"
        x = ("batch", "sequences at once")
        plots.append(
            lines("decode-batch", title, rows, x, y, series="series", caption=_points_text(chosen))
        )
    return plots


def _points_text(points: Points) -> str:
    """What points and bars are, with the confidence that so few repetitions really give."""
    text = f"Points: median of {max(len(point.values) for _, point in points)} repetitions"
    levels = [
        median_interval(point.values).confidence for _, point in points if len(point.values) > 1
    ]
    return f"{text}; bars: {min(levels):.0%} interval of the median." if levels else f"{text}."


def _milliseconds(point: SweepPoint) -> dict[str, float]:
    interval = median_interval(point.values)
    return {"ms": point.median * 1000, "low": interval.low * 1000, "high": interval.high * 1000}
