"""Plots of loads: distributions of latencies, and requests over time."""

from __future__ import annotations

from twinphase_bench.load.run import LoadResult
from twinphase_bench.report.plots import Row, distribution, spans
from twinphase_bench.report.report import Plot

MAX_TIMELINE_REQUESTS = 150
# The height, unless bars would be too thin or too thick.
TIMELINE_PIXELS = 400
QUEUE = "queue (the server's claim)"
FIRST = "until the first token"
REST = "output"
FAILED = "failed"
# Failures are not red, which is too similar to decode's colour.
COLOURS = {QUEUE: "neutral", FIRST: "prefill", REST: "decode", FAILED: "text"}


def latency_plots(result: LoadResult) -> list[Plot]:
    """The distributions of TTFT and ITL."""
    found = []
    for name, values, limit in (("TTFT", result.ttft, result.slos.ttft), ("ITL", result.itl, None)):
        if len(values) < 2:
            continue
        found.append(
            distribution(
                _name(result, name.lower()),
                f"{name}: its distribution",
                {name: [1e3 * value for value in values]},
                f"{name}, ms",
                limit=None if limit is None else 1e3 * limit,
                log_x=min(values) > 0 and max(values) > 20 * min(values),
                caption=f"{len(values)} values; {result.arrivals}.",
            )
        )
    return found


def timeline_plot(result: LoadResult) -> Plot:
    """A bar per request, divided by what its client waited for."""
    rows: list[Row] = []
    shown = result.observations[:MAX_TIMELINE_REQUESTS]
    zero = shown[0].intended if shown else 0.0
    for number, seen in enumerate(shown):
        moments = [(seen.intended, "")]
        if seen.succeeded:
            ledger = seen.claims.get("timings", {}).get("ledger_ms", {})
            queue = sum(ledger.get(kind) or 0.0 for kind in ("tokenize", "queue")) / 1e3
            if queue:
                moments.append((min(seen.sent + queue, seen.token_times[0]), QUEUE))
            moments += [
                (seen.token_times[0], FIRST),
                (seen.last_token or seen.token_times[-1], REST),
            ]
        else:
            moments.append((seen.ended, FAILED))
        for (start, _), (end, part) in zip(moments, moments[1:], strict=False):
            row = {
                "request": number,
                "from": round(start - zero, 5),
                "to": round(end - zero, 5),
                "part": part,
            }
            rows.append(row)
    left = len(result.observations) - len(shown)
    caption = "As the client saw it."
    if left:
        caption += f" The first {MAX_TIMELINE_REQUESTS} requests; {left} more are in the JSON."
    return spans(
        _name(result, "timeline"),
        "Requests in time",
        rows,
        ("request", "request"),
        "s since the first intended send",
        part="part",
        roles=COLOURS,
        height=max(4, min(26, TIMELINE_PIXELS // max(1, len(shown)))) * len(shown),
        caption=caption,
    )


def _name(result: LoadResult, plot: str) -> str:
    """A name that is unique in a report with several loads."""
    at = "at-once" if result.concurrency is None else f"closed-{result.concurrency}"
    at = at if result.rate is None else f"rate-{result.rate:.3g}"
    return f"load-{at}-{plot}".replace(".", "_")
