"""A plan as a report: the cheapest fleet, the runner-up, their limits, and the Pareto chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinphase import Band, capacity_of, error_sentence, read_trials
from twinphase_bench.conditions import conditions
from twinphase_bench.load.report import ledger_table
from twinphase_bench.report.plots import lines
from twinphase_bench.report.report import (
    Column,
    Plot,
    Report,
    Section,
    Status,
    Table,
    Verdict,
    table_of,
)
from twinphase_bench.simulate.plan import Candidate, Plan, Tried

# Below this share of the nearest limit, the next one is named too.
NOT_FAR = 0.05


def plan_report(plan: Plan) -> Report:
    """The whole report of a plan."""
    verdicts = [*_answer(plan), *_limits(plan), *_break_even(plan)]
    sources = {one.candidate.deployment.source for one in plan.tried} or {"datasheet"}
    errors = [error_sentence(read_trials(), source) for source in sorted(sources)]
    sections = [Section("Fleets", tables=[_table(plan)], plots=[_pareto(plan)])]
    if (ledger := ledger_table(plan.observations)) is not None:
        sections.append(Section("Ledger of the cheapest", tables=[ledger]))
    notes = [
        "Fleets are proposed by arithmetic, and simulated from the cheapest on; of a large fleet "
        "a slice with the same load per worker is simulated."
    ]
    notes += list(dict.fromkeys(plan.not_possible))
    return Report(
        kind="plan",
        title=f"Cheapest fleet that keeps {plan.levels}",
        verdicts=verdicts,
        conditions=conditions(),
        noise=[*notes, *errors],
        sections=sections,
        data={"fleets": [_data(one) for one in plan.tried]},
    )


def _answer(plan: Plan) -> list[Verdict]:
    holding = plan.holding
    if not holding:
        text = "No fleet that was simulated keeps the service levels; what would is unknown."
        nearest = plan.nearest
        reason = "; ".join([plan.left] if plan.left else [])
        if nearest is not None:
            reason += f" nearest: {described(nearest.candidate)}, {_levels(nearest)}"
        reason = reason.strip() or "; ".join(plan.not_possible[:3])
        return [Verdict(Status.UNKNOWN, text, reason), *_repairs(plan)]
    best, *others = holding
    found = [Verdict(Status.INFO, f"Cheapest: {described(best.candidate)}.", _levels(best))]
    if best.close:
        found.append(_too_close(plan, best))
    narrow = [one for one in plan.tried if one.missed and one.holds == "too close"]
    cheaper = min(narrow, key=lambda one: one.candidate.price, default=best)
    if cheaper.candidate.price < best.candidate.price:
        text = f"Cheaper, and too close to say: {described(cheaper.candidate)}."
        found.append(Verdict(Status.UNKNOWN, text, _levels(cheaper)))
    if others:
        other = others[0]
        more = other.candidate.price / best.candidate.price - 1 if best.candidate.price else 0.0
        text = f"Runner-up: {described(other.candidate)}, {more:+.0%}."
        found.append(Verdict(Status.INFO, text, _levels(other)))
    if plan.left:
        found.append(Verdict(Status.UNKNOWN, f"A cheaper one may exist: {plan.left}."))
    return found


def _too_close(plan: Plan, best: Tried) -> Verdict:
    """A verdict that the cheapest fleet may miss a level, with the cheapest one that will not."""
    parts = []
    for name in best.close:
        low, high = (1e3 * end for end in best.bands[name].around(best.levels[name]))
        bound = 1e3 * plan.levels.bounds[name]
        parts.append(f"{name} {low:,.0f} to {high:,.0f} ms around the level of {bound:,.0f} ms")
    text = f"Too close to say whether the cheapest holds: {'; '.join(parts)}."
    certain = plan.certain
    if certain is None:
        return Verdict(Status.UNKNOWN, text, "no simulated fleet keeps the levels with its bands")
    more = certain.candidate.price / best.candidate.price - 1 if best.candidate.price else 0.0
    reason = f"with its whole bands holds {described(certain.candidate)}, {more:+.0%}"
    return Verdict(Status.UNKNOWN, text, f"{reason}; {_levels(certain)}")


def _repairs(plan: Plan) -> list[Verdict]:
    found = []
    for one in plan.repairs[:3]:
        what = "misses" if one.tried.missed else "keeps"
        text = f"With {one.flag} the nearest fleet {what} the levels."
        found.append(Verdict(Status.INFO, text, _levels(one.tried)))
    return found


def described(candidate: Candidate) -> str:
    """A description of a fleet, with the flags of `serve`."""
    one = candidate.deployment
    words = [f"--{name.replace('_', '-')} {value}" for name, value in one.engine.items()]
    if one.drafts:
        words.append(f"{one.drafts} drafts at an acceptance of {one.acceptance:g}")
    return f"{one.title} at {candidate.price:,.4g} per hour ({' '.join(words)})"


def _levels(one: Tried) -> str:
    found = ", ".join(f"{name} {_with_band(one, name)} ms" for name in one.levels)
    late = f"; missed: {', '.join(one.missed)}" if one.missed else ""
    pools = "; ".join(
        f"{pool.role}: {pool.prefill:.0%} in prefill, {pool.decode:.0%} in decode"
        for pool in one.done.pools
    )
    part = f", 1/{one.slice_of} of it simulated" if one.slice_of > 1 else ""
    return f"{found}{late}; {pools}{part}"


def _with_band(one: Tried, name: str) -> str:
    """A level in ms with the ends of its band: "412 (340 to 480)"."""
    value = one.levels[name]
    text = f"{1e3 * value:,.0f}"
    if (band := one.bands.get(name)) is None:
        return text
    low, high = (f"{1e3 * end:,.0f}" for end in band.around(value))
    return f"{text} ({'at least ' if band.is_least else ''}{low} to {high})"


def uses(plan: Plan, one: Tried) -> dict[str, float]:
    """The used share of each limit of a fleet."""
    candidate = one.candidate
    deployment = candidate.deployment
    load = candidate.load
    found: dict[str, float] = {}
    readers, decoders = candidate.pools
    reader = capacity_of(deployment.worker(deployment.roles[0]), load, plan.levels.gap)
    decoder = reader
    if decoders:
        decoder = capacity_of(deployment.worker("decode"), load, plan.levels.gap)
        seconds = load.prompt * deployment.shape.kv_token_bytes * load.rate
        rate = deployment.fleet(ledgers=False).bytes_per_second
        found["the link"] = seconds / (rate * readers)
    number = decoders or readers
    decode = sum(pool.decode * pool.workers for pool in one.done.pools) / (number / one.slice_of)
    prefill = sum(pool.prefill * pool.workers for pool in one.done.pools) / (readers / one.slice_of)
    names = {"arithmetic": "arithmetic", "bandwidth": "bandwidth", "overhead": "step overhead"}
    reading = f"prefill's {_main(reader.prefill_limits, names)}"
    decoding = f"decode's {_main(decoder.decode_limits, names)}"
    if decoders:
        found |= {reading: prefill, decoding: decode}
    else:
        # One pool's time is one limit, named for the phase that takes most of it.
        found[reading if prefill > decode else decoding] = prefill + decode
    at_once = load.rate * load.output * decoder.step_seconds / number
    found["KV memory"] = at_once * (load.prompt + load.output) / decoder.kv_tokens
    found["seats"] = at_once / deployment.worker(deployment.roles[-1]).config.max_num_seqs
    for name, bound in plan.levels.bounds.items():
        found[f"the {name.upper()} level"] = one.levels[name] / bound
    return found


def _main(limits: Mapping[str, float], names: Mapping[str, str]) -> str:
    return names[max(limits, key=lambda name: limits[name])] if limits else "time"


def _limits(plan: Plan) -> list[Verdict]:
    if not plan.holding:
        return []
    found = sorted(uses(plan, plan.holding[0]).items(), key=lambda item: -item[1])
    (first, most), *others = found
    rest = ", ".join(f"{name} {used:.0%}" for name, used in others if used >= NOT_FAR)
    best = plan.holding[0]
    pools = best.done.pools
    decode = sum(pool.decode * pool.workers for pool in pools)
    prefill = sum(pool.prefill * pool.workers for pool in pools)
    phase = "decode" if decode > prefill else "prefill"
    share = max(decode, prefill) / max(1e-9, decode + prefill)
    return [
        Verdict(
            Status.INFO,
            f"The load is {phase}-limited: {share:.0%} of the busy time. Nearest limit: {first}, "
            f"used to {most:.0%}.",
            f"next: {rest}" if rest else "",
        )
    ]


def _break_even(plan: Plan) -> list[Verdict]:
    """Verdicts that compare one pool with two."""
    one, two = (plan.cheapest(layout) for layout in ("one pool", "two pools"))
    if one is None or two is None:
        missing = "two pools" if two is None else "one pool"
        dearest = max((t.candidate.price for t in plan.tried), default=0.0)
        text = f"No fleet of {missing} held the levels up to {dearest:,.4g} per hour."
        return [Verdict(Status.UNKNOWN, text)] if plan.tried else []
    cheap, dear = sorted((one, two), key=lambda tried: tried.candidate.price)
    readers, decoders = two.candidate.pools
    ratio = f"{readers}:{decoders}"
    less = 1 - cheap.candidate.price / dear.candidate.price
    if less < NOT_FAR:
        text = f"One pool and two (prefill to decode {ratio}) cost the same here: break-even."
    else:
        text = (
            f"{cheap.candidate.layout.capitalize()} cost {less:.0%} less than "
            f"{dear.candidate.layout} (prefill to decode {ratio}): the break-even is where the "
            f"price of {dear.candidate.layout} falls by that."
        )
    return [Verdict(Status.INFO, text)]


def _table(plan: Plan) -> Table:
    names = list(plan.levels.bounds)
    columns: list[Column | str] = [
        "fleet",
        "seats",
        "chunk",
        Column("per hour", "in the unit of --price; without one, workers' devices"),
        *(
            Column(
                f"{name} p{plan.levels.percentile:g}, ms",
                f"in brackets its band, which holds {Band.coverage:.0%} of real servers",
            )
            for name in names
        ),
        Column("holds", "too close: a level lies inside the band"),
    ]
    rows = []
    for one in sorted(plan.tried, key=lambda tried: tried.candidate.price):
        engine = one.candidate.deployment.engine
        rows.append(
            (
                one.candidate.deployment.title,
                str(engine.get("max_num_seqs", "")),
                str(engine.get("max_num_batched_tokens", "")),
                f"{one.candidate.price:,.4g}",
                *(_with_band(one, name) for name in names),
                one.holds,
            )
        )
    return table_of("Fleets that were simulated", columns, rows)


def _pareto(plan: Plan) -> Plot:
    name = next(iter(plan.levels.bounds))
    rows: list[dict[str, Any]] = [
        {
            "price": one.candidate.price,
            "level": 1e3 * one.levels[name],
            "layout": one.candidate.layout,
            "fleet": one.candidate.deployment.title,
        }
        for one in sorted(plan.tried, key=lambda tried: tried.candidate.price)
    ]
    bound = 1e3 * plan.levels.bounds[name]
    return lines(
        "pareto",
        f"{name.upper()} against price",
        rows,
        ("price", "price per hour"),
        ("level", f"{name.upper()} p{plan.levels.percentile:g}, ms"),
        series="layout",
        log_y=True,
        caption=f"Each point is a simulated fleet; the level is {bound:,.0f} ms.",
    )


def _data(one: Tried) -> dict[str, Any]:
    deployment = one.candidate.deployment
    return {
        "fleet": deployment.title,
        "roles": list(deployment.roles),
        "engine": dict(deployment.engine),
        "price_per_hour": one.candidate.price,
        "levels_seconds": dict(one.levels),
        "bands": {name: band.as_json(one.levels[name]) for name, band in one.bands.items()},
        "missed": list(one.missed),
        "too_close": list(one.close),
    }
