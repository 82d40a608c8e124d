"""Plots of loads: distributions, requests in time, latency against load. Not for tables (`load_report.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinphase.bench.load import LoadResult
from twinphase.bench.plots import Row, axis, lines
from twinphase.bench.report import Plot
from twinphase.bench.saturation import SweepResult
from twinphase.bench.statistics import percentile

__all__ = ["latency_plots", "sweep_plots", "timeline_plot"]

CURVE_POINTS = 400  # of a distribution that is drawn; all values are in the JSON
BARS = 150  # requests in the timeline
QUEUE, FIRST, REST, FAILED = "queue (the server's claim)", "until the first token", "output", "failed"


def latency_plots(result: LoadResult) -> tuple[Plot, ...]:
    """How TTFT and ITL are distributed."""
    found = []
    for name, title, values in (("ttft", "TTFT", result.ttft), ("itl", "ITL", result.itl)):
        if len(values) < 2:
            continue
        encoding = {
            "x": axis("ms", f"{title}, ms", log=min(values) > 0 and max(values) > 20 * min(values)),
            "y": axis("share", "share of requests" if name == "ttft" else "share of gaps", zero=True),
            "tooltip": [{"field": "ms"}, {"field": "share"}],
        }
        mark = {"type": "line", "interpolate": "step-after"}
        spec = {"data": {"values": _curve(values)}, "mark": mark, "encoding": encoding}
        caption = f"{len(values)} values; {result.arrivals}."
        found.append(Plot(_name(result, name), f"{title}: its distribution", spec, caption))
    return tuple(found)


def _curve(values: Sequence[float]) -> list[Row]:
    """The empirical distribution, thinned to a curve's worth of points, first and last among them."""
    ordered = sorted(values)
    n = len(ordered)
    ranks = range(n) if n <= CURVE_POINTS else [round(i * (n - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]
    return [{"ms": round(1e3 * ordered[rank], 4), "share": round((rank + 1) / n, 5)} for rank in ranks]


def timeline_plot(result: LoadResult) -> Plot:
    """A bar for each request: what its client waited for."""
    rows: list[Row] = []
    shown = result.observations[:BARS]
    zero = shown[0].intended if shown else 0.0
    for number, seen in enumerate(shown):
        moments = [(seen.intended, "")]
        if seen.succeeded:
            ledger = seen.claims.get("timings", {}).get("ledger_ms", {})
            queue = sum(ledger.get(kind) or 0.0 for kind in ("tokenize", "queue")) / 1e3
            if queue:
                moments.append((min(seen.sent + queue, seen.token_times[0]), QUEUE))
            moments += [(seen.token_times[0], FIRST), (seen.last_token or seen.token_times[-1], REST)]
        else:
            moments.append((seen.ended, FAILED))
        for (start, _), (end, part) in zip(moments, moments[1:], strict=False):
            row = {"request": number, "from": round(start - zero, 5), "to": round(end - zero, 5), "part": part}
            rows.append(row)
    encoding: dict[str, Any] = {
        "y": {"field": "request", "type": "ordinal", "title": "request", "axis": {"labels": len(shown) <= 30}},
        "x": axis("from", "s since the first intended send", zero=True),
        "x2": {"field": "to"},
        "color": {"field": "part", "type": "nominal", "title": None, "sort": [QUEUE, FIRST, REST, FAILED]},
        "tooltip": [{"field": key} for key in ("request", "part", "from", "to")],
    }
    left = len(result.observations) - len(shown)
    caption = f"As the client saw it. The first {BARS} requests; {left} more are in the JSON." if left else ""
    spec = {"data": {"values": rows}, "mark": {"type": "bar"}, "encoding": encoding}
    return Plot(_name(result, "timeline"), "Requests in time", spec, caption or "As the client saw it.")


def sweep_plots(sweep: SweepResult) -> tuple[Plot, ...]:
    """Latency, and what was served, against the load; void points are left out."""
    points = [point for point in sweep.ordered if not point.result.void]
    x = ("load", "offered, req/s" if sweep.plan.mode == "rate" else "requests at once")
    latency, served = [], []
    for point in points:
        result = point.result
        for name, values in (("TTFT", result.ttft), ("TPOT", result.tpot)):
            for q in (50, 99):
                if values:
                    row = {"load": point.value, "ms": 1e3 * percentile(values, q), "series": f"{name} p{q}"}
                    latency.append(row)
        served.append({"load": point.value, "rate": result.request_rate, "series": "served"})
        goodput = result.goodput
        if goodput is not None and goodput.rate is not None:
            served.append({"load": point.value, "rate": goodput.rate, "series": f"goodput ({result.slos})"})
    found = []
    if latency:
        caption = "Requests that succeeded; the last load is the one at which the sweep stopped."
        title = "Latency against load"
        found.append(
            lines("load-latency", title, latency, x, ("ms", "ms"), series="series", log_y=True, caption=caption)
        )
    if served:
        title = "Served and good requests against load"
        found.append(lines("load-goodput", title, served, x, ("rate", "req/s"), series="series", caption=sweep.stopped))
    return tuple(found)


def _name(result: LoadResult, plot: str) -> str:
    """Unique in a report that has several loads."""
    at = "at-once" if result.concurrency is None else f"closed-{result.concurrency}"
    at = at if result.rate is None else f"rate-{result.rate:.3g}"
    return f"load-{at}-{plot}".replace(".", "_")
