"""The report of a simulated load: that of `bench`, plus facts that only a simulation has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinphase import (
    Band,
    Deployment,
    FleetSpec,
    Simulated,
    TokenPrices,
    __version__,
    bands,
    error_sentence,
    read_trials,
)
from twinphase.phases.slo import Slos, goodput
from twinphase.phases.statistics import has_percentile, percentile
from twinphase_bench.client.health import ClientHealth
from twinphase_bench.conditions import conditions
from twinphase_bench.load import report as load_report
from twinphase_bench.load.run import LoadResult
from twinphase_bench.report.plots import bars
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
from twinphase_bench.simulate.options import LoadPlan
from twinphase_bench.targets.target import TargetFacts

DEFINITION = "predicted times of the steps that the scheduler decided"
BUSY = 0.85


@dataclass(frozen=True)
class Answer:
    """A simulation and its inputs.

    Attributes:
        prices: prices of tokens, if a price was given.
        repairs: changes that would meet the service levels.
    """

    deployment: Deployment
    spec: FleetSpec
    plan: LoadPlan
    done: Simulated
    slos: Slos
    prices: TokenPrices | None = None
    repairs: Sequence[Verdict] = ()


def load_result(answer: Answer) -> LoadResult:
    """The simulation in the form of a load measured by `bench`."""
    deployment = answer.deployment
    config = answer.spec.workers[0].config
    plan = answer.plan
    details = {
        "seats": f"{config.max_num_seqs:,}",
        "token budget": f"{config.max_num_batched_tokens:,}",
        "KV blocks": f"{config.num_kv_blocks or 0:,} of {config.block_size} tokens",
        "ITL SLO": str(config.itl_slo_ms or "off"),
    }
    facts = TargetFacts(
        name=deployment.title,
        kind=load_report.SIMULATION,
        engine=f"twinphase {__version__} (simulated)",
        model=deployment.model,
        precision=deployment.dtype or deployment.decoder.dtype or "as in the file",
        context_length=config.max_model_len,
        prefill_definition=DEFINITION,
        decode_definition=DEFINITION,
        details=details,
    )
    return LoadResult(
        facts=facts,
        workload=plan.workload,
        arrivals=plan.arrivals,
        rate=plan.rate,
        concurrency=plan.concurrency or (plan.users.count if plan.users else None),
        observations=answer.done.observations,
        num_requests=len(answer.done.observations),
        client=ClientHealth(),
        slos=answer.slos,
        conditions=dict(plan.conditions),
        notes=[*plan.notes, "simulated: no token was computed"],
    )


def simulation_report(answer: Answer) -> Report:
    """The whole report of a simulation."""
    result = load_result(answer)
    deployment = answer.deployment
    trials = read_trials()
    error = error_sentence(trials, deployment.source)
    known = bands(trials, deployment.source)
    simulated = simulated_figures(result)
    verdicts = [
        *load_report.load_verdicts(result),
        Verdict(Status.INFO, limit_sentence(answer)),
        *answer.repairs,
    ]
    sections = [
        Section("Bands", tables=_one(_bands(simulated, known))),
        Section("Latencies", tables=[latency_table(result)]),
        Section("Ledger", tables=_one(load_report.ledger_table(result.succeeded))),
        Section("Workers", tables=[_pools(answer)], plots=[_use_plot(answer)]),
        Section("Who stalled whom", tables=_one(_culprits(answer))),
    ]
    if answer.prices is not None:
        sections.append(Section("Prices", tables=[_prices(answer.prices)]))
    sections += load_report.load_sections(result)
    return Report(
        kind="simulate",
        title=f"{deployment.model} on {deployment.title}: simulated load",
        verdicts=verdicts,
        conditions=conditions(result.facts, flags=_assumptions(answer)),
        noise=[*load_report.notes_of(result), error],
        sections=sections,
        metrics=load_report.load_metrics([result]),
        data={"load": load_report.load_data(result), "bands": _band_data(simulated, known)},
    )


def simulated_figures(result: LoadResult) -> dict[str, float]:
    """The figures that have bands, in seconds and requests per second."""
    gaps = [gap for one in result.succeeded for gap in one.itl]
    found = {}
    for name, values in (("ttft", result.ttft), ("itl", gaps)):
        for at in (50, 99):
            if has_percentile(len(values), at):
                found[f"{name}_p{at}"] = percentile(values, at)
    if result.slos.bounds:
        met = goodput(result.observations, result.slos, result.seconds)
        found["goodput"] = met.rate or 0.0
    return found


def _band_data(simulated: Mapping[str, float], known: Mapping[str, Band]) -> dict[str, Any]:
    """Each figure with the ends of its band, in the figure's unit."""
    return {
        figure: {"simulated": value, **known[figure].as_json(value)}
        for figure, value in simulated.items()
        if figure in known
    }


def _bands(simulated: Mapping[str, float], known: Mapping[str, Band]) -> Table | None:
    rows = []
    for figure, value in simulated.items():
        if band := known.get(figure):
            unit = "req/s" if figure == "goodput" else "ms"
            scale = 1.0 if figure == "goodput" else 1e3
            ends = " to ".join(load_report.shown(scale * end) for end in band.around(value))
            least = "at least " if band.is_least else ""
            cells = (load_report.shown(scale * value), least + ends, str(band.pairs))
            rows.append((f"{band.name}, {unit}", *cells))
    columns = (
        "figure",
        "simulated",
        Column("band", f"a real server's figure lies inside {Band.coverage:.0%} of the time"),
        Column("pairs", "of a real and a simulated run, from which the band was computed"),
    )
    return table_of("What a real server would show", columns, rows) if rows else None


def latency_table(result: LoadResult) -> Table:
    """The latencies without their definitions, short enough for a terminal."""
    (latencies, *_) = load_report.load_sections(result)[0].tables
    rows = [row[:-1] for row in latencies.rows]
    return Table(latencies.title, latencies.columns[:-1], rows)


def limit_sentence(answer: Answer) -> str:
    """A sentence with the phase that takes most of the workers' time, and what delays requests."""
    pools = answer.done.pools
    prefill = sum(pool.prefill * pool.workers for pool in pools)
    decode = sum(pool.decode * pool.workers for pool in pools)
    workers = sum(pool.workers for pool in pools)
    busy = prefill + decode
    phase = "prefill" if prefill > decode else "decode"
    shares = f"{prefill / workers:.0%} in prefill, {decode / workers:.0%} in decode"
    text = f"The workers were busy {busy / workers:.0%} of the time: {shares}."
    waits = [
        one.claims["timings"]["ledger_ms"]
        for one in answer.done.observations
        if "timings" in one.claims
    ]
    queued = sum(one["queue"] for one in waits) / max(1, len(waits))
    if busy / workers < BUSY:
        return f"{text} The load is {phase}-heavy and within what they can do."
    return f"{text} The load is {phase}-limited; a request queued {queued:,.0f} ms on average."


def _one(table: Table | None) -> list[Table]:
    return [] if table is None else [table]


def _pools(answer: Answer) -> Table:
    rows = [
        (
            {"both": "prefill and decode"}.get(pool.role, pool.role),
            str(pool.workers),
            f"{pool.prefill:.1%}",
            f"{pool.decode:.1%}",
            f"{pool.idle:.1%}",
        )
        for pool in answer.done.pools
    ]
    columns = (
        "pool",
        "workers",
        Column("in prefill", "share of the load's time that prefill chunks added to steps"),
        Column("in decode", "share of the load's time of the decodes in steps"),
        Column("idle", "the rest, with the time between steps"),
    )
    return table_of("Utilisation of both phases", columns, rows)


def _use_plot(answer: Answer) -> Plot:
    rows = [
        {"pool": pool.role, "share": round(share, 4), "phase": phase}
        for pool in answer.done.pools
        for phase, share in (("prefill", pool.prefill), ("decode", pool.decode))
    ]
    return bars(
        "utilisation",
        "Utilisation of both phases",
        rows,
        ("pool", "pool"),
        ("share", "share of the time"),
        part="phase",
    )


def _culprits(answer: Answer) -> Table | None:
    done = answer.done
    if not done.culprits:
        return None
    rows = [
        (
            f"request {one.number}",
            f"{one.prompt_tokens:,}",
            f"{one.stalled:,}",
            f"{1e3 * one.seconds:,.0f}",
            f"{one.seconds / done.stall_seconds:.1%}",
        )
        for one in done.culprits
    ]
    columns = (
        Column("prefill of", "by the order of arrival, from 0"),
        "prompt tokens",
        Column("stalled", "requests whose decode waited for it"),
        Column("ms in all", "over these requests"),
        "of all stalls",
    )
    title = f"Prefill that stalled decode ({done.stall_seconds:,.1f} s over all requests)"
    return table_of(title, columns, rows)


def _prices(prices: TokenPrices) -> Table:
    rows = [
        (f"a million {kind} tokens", "-" if value is None else f"{value:,.4g}")
        for kind, value in prices.rows.items()
    ]
    share = prices.prefill / prices.total if prices.total else 0.0
    rows += [
        ("the mean request", f"{prices.request:,.4g}"),
        ("all requests", f"{prices.total:,.4g}"),
        ("of it, prefill", f"{share:.0%}"),
    ]
    value = Column("price", "in the unit of --price; idle time is divided as busy time is")
    return table_of("Prices", ["of", value], rows)


def _assumptions(answer: Answer) -> dict[str, str]:
    """The assumptions of the simulation, by name."""
    machine = answer.deployment.machine
    calibration = machine.calibration
    front = answer.spec.front
    outside = (
        f"{1e3 * front.request:.2f} ms per request and {1e6 * front.per_prompt_token:.1f} µs "
        "per prompt token outside the engine"
    )
    if calibration is not None:
        is_log = calibration.source in ("steps", "kept")
        what = "steps" if is_log else f"points of {calibration.source}"
        return {
            "step times": f"measured on {calibration.processor}, {calibration.threads} threads, "
            f"{calibration.date}: {calibration.steps:,} {what}, median error "
            f"{calibration.median_error:.1%}",
            "front end": outside,
        }
    efficiency = machine.efficiency
    return {
        "step times": f"datasheet of {machine.hardware.name} at MFU {efficiency.mfu:g}, MBU "
        f"{efficiency.mbu:g} and {1e3 * efficiency.step_seconds:g} ms per step",
        "efficiencies from": efficiency.source,
        "front end": f"assumed: {outside}",
        **({"datasheet": " ".join(machine.hardware.notes)} if machine.hardware.notes else {}),
    }
