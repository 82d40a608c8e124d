"""Charts of a phase sweep: measured points, the fitted law with its claimed interval, residuals."""

from __future__ import annotations

from twinphase.bench.report.plots import Row, lines, scatter
from twinphase.bench.report.report import Plot
from twinphase.bench.statistics import median_interval
from twinphase.bench.sweep.fit import Fit, Point
from twinphase.bench.sweep.plan import Place
from twinphase.bench.sweep.run import SweepResult

__all__ = ["decode_plots", "prefill_plots"]

STEPS = 60  # of a drawn curve
LOWEST_SHARE = 0.05  # of the fitted value: a logarithmic axis has no zero for an interval to end at
HELD_OUT = "held out"
BAND = "band: where a new measurement is to be expected (95 %), the law's claimed error"


def prefill_plots(result: SweepResult, found: Fit) -> list[Plot]:
    """Time and rate by prompt length, and residuals."""
    points = result.points("prefill")
    rows = [
        {"series": HELD_OUT if place.held_out else "prefill", "prompt tokens": point.x[0], **_milliseconds(point)}
        for place, point in points
    ]
    low, high = _range([point.x[0] for _, point in points])
    curve = [low * (high / low) ** (index / STEPS) for index in range(STEPS + 1)]
    caption = f"{_points_text(points)}; line: {found.law.formula}; {BAND}."
    rates = [
        {
            "series": row["series"],
            "prompt tokens": point.x[0],
            "tok/s": point.x[0] / point.median,
            "low": point.x[0] / median_interval(point.values).high,
            "high": point.x[0] / median_interval(point.values).low,
        }
        for row, (_, point) in zip(rows, points, strict=True)
    ]
    fitted_rates = [{"series": "prefill", "prompt tokens": n, "tok/s": n / found.line((n, 1))} for n in curve]
    return [
        lines(
            "prefill-time",
            "Prefill time by prompt length",
            rows,
            ("prompt tokens", "prompt tokens"),
            ("ms", "prefill time (ms)"),
            series="series",
            fitted=[{"series": "prefill", "prompt tokens": n, **_band(found, (n, 1))} for n in curve],
            log_x=True,
            log_y=True,
            caption=caption,
        ),
        lines(
            "prefill-rate",
            "Prefill rate by prompt length: short prompts share out what every prompt costs, long ones pay attention",
            rates,
            ("prompt tokens", "prompt tokens"),
            ("tok/s", "prompt tokens a second"),
            series="series",
            fitted=fitted_rates,
            log_x=True,
            caption=f"{_points_text(points)}; line: n / ({found.law.formula}).",
        ),
        _residuals("prefill", points, found, "prompt tokens", log_x=True),
    ]


def decode_plots(result: SweepResult, found: Fit) -> list[Plot]:
    """Time a step by position and by batch, and residuals."""
    points = result.points("decode")
    batches = sorted({place.batch for place, _ in points})
    wide = [batch for batch in batches if batch == 1 or sum(place.batch == batch for place, _ in points) > 1]
    names = {batch: f"batch {batch}" for batch in batches}
    rows = [{"series": names[p.batch], "position": at.x[0], **_milliseconds(at), "used as": _use(p)}
            for p, at in points if p.batch in wide]  # fmt: skip
    fitted = []
    for batch in wide:
        low, high = _range([at.x[0] for place, at in points if place.batch == batch])
        ends = [low + (high - low) * index / STEPS for index in range(STEPS + 1)]
        # Without the bands, which would lie on top of each other: the residuals' chart has the claimed error.
        line = ({"series": names[batch], "position": x, "ms": found.line((x, batch)) * 1000} for x in ends)
        fitted += list(line)
    caption = f"{_points_text(points)}; lines: {found.law.formula}."
    plots = [
        lines(
            "decode-position",
            "Decode: time a step by position",
            rows,
            ("position", "tokens before the decoded one"),
            ("ms", "time a step (ms)"),
            series="series",
            fitted=fitted,
            log_x=True,
            caption=caption,
        )
    ]
    if len(batches) > 2:
        plots.append(_by_batch(points, found))
    return [*plots, _residuals("decode", points, found, "fitted time (ms)")]


def _points_text(points: list[tuple[Place, Point]]) -> str:
    """What points and bars are, with the confidence that so few repetitions really give."""
    text = f"Points: median of {_repetitions(points)} repetitions"
    levels = sorted({median_interval(point.values).confidence for _, point in points if len(point.values) > 1})
    if not levels:
        return text
    shown = dict.fromkeys(f"{100 * level:.0f} %" for level in (levels[0], levels[-1]))
    fewest = min(len(point.values) for _, point in points)
    span = f"range of {fewest}, " if len({len(point.values) for _, point in points}) == 1 and fewest < 9 else ""
    return f"{text}; bars: interval of the median ({span}{' to '.join(shown)})"


def _by_batch(points: list[tuple[Place, Point]], found: Fit) -> Plot:
    """Behind the shortest prompts, where most batch sizes were measured."""
    short = min(place.length for place, _ in points)
    chosen = [(place, point) for place, point in points if place.length == short]
    rows = [
        {"series": HELD_OUT if place.held_out else "decode", "batch": place.batch, **_milliseconds(point)}
        for place, point in chosen
    ]
    position = sum(point.x[0] for _, point in chosen) / len(chosen)
    low, high = _range([float(place.batch) for place, _ in chosen])
    sizes = [low + (high - low) * index / STEPS for index in range(STEPS + 1)]
    return lines(
        "decode-batch",
        f"Decode: time a step by batch size, behind {position:,.0f} tokens",
        rows,
        ("batch", "sequences at once"),
        ("ms", "time a step (ms)"),
        series="series",
        fitted=[{"series": "decode", "batch": size, **_band(found, (position, size))} for size in sizes],
        caption=f"{_points_text(chosen)}; line: {found.law.formula}; {BAND}.",
    )


def _residuals(phase: str, points: list[tuple[Place, Point]], found: Fit, x_title: str, log_x: bool = False) -> Plot:
    """How far each point lies from the law, over the error that the law claims there."""
    rows, band = [], []
    for place, point in points:
        predicted = found.predict(point.x)
        x = point.x[0] if phase == "prefill" else predicted.value * 1000
        rows.append(
            {
                "series": HELD_OUT if place.held_out else phase,
                x_title: x,
                "residual (%)": (point.median / predicted.value - 1) * 100,
                "at": str(place),
            }
        )
        band.append({x_title: x, "low": -predicted.error * 100, "high": predicted.error * 100})
    return scatter(
        f"{phase}-residuals",
        f"{phase.capitalize()}: measured against the law",
        rows,
        (x_title, x_title),
        ("residual (%)", "(measured - law) / law (%)"),
        series="series",
        band=sorted(band, key=lambda row: row[x_title]),
        log_x=log_x,
        caption="Band: the error that the law claims (95 %). Points along a curve: the law lacks a term.",
    )


def _milliseconds(point: Point) -> Row:
    interval = median_interval(point.values)
    return {"ms": point.median * 1000, "low": interval.low * 1000, "high": interval.high * 1000}


def _band(found: Fit, x: tuple[float, float]) -> Row:
    predicted = found.predict(x)
    low = max(predicted.low, LOWEST_SHARE * predicted.value)
    return {"ms": predicted.value * 1000, "low": low * 1000, "high": predicted.high * 1000}


def _use(place: Place) -> str:
    return HELD_OUT if place.held_out else "fit"


def _range(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def _repetitions(points: list[tuple[Place, Point]]) -> int:
    return max(len(point.values) for _, point in points)
