"""`twinphase plan`: finds the cheapest fleet that meets service levels under a load."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from twinphase import InvalidRequestError
from twinphase_bench.commands.publish import save_report, show_report

PROMPT = "lognormal:512:0.8"
OUTPUT = "lognormal:200:0.6"


def plan(
    model: str = typer.Argument(
        ..., help="A known name, a config.json, a GGUF file, or a model in the cache."
    ),
    slo: str = typer.Option(
        ..., help="Service levels: ttft, itl or tpot, such as ttft=500ms,itl=50ms."
    ),
    hardware: str = typer.Option(
        "this", help="Machines to choose from, with commas: names of datasheets, or this."
    ),
    price: str = typer.Option(
        None,
        help="Price per hour of one device of each machine: h100-sxm=2.5,l40s=0.9. [default: 1 "
        "each]",
    ),
    users: int = typer.Option(
        None, min=1, help="Users who wait for an answer, think, and ask again."
    ),
    think_time: float = typer.Option(
        30.0, min=0.0, help="Mean seconds between an answer and the next question."
    ),
    request_rate: float = typer.Option(None, help="Requests per second, instead of users."),
    prompt_tokens: str = typer.Option(
        PROMPT,
        help="Tokens of each prompt: 500, 100-900, exponential:MEAN, or lognormal:MEAN:SIGMA.",
    ),
    output_tokens: str = typer.Option(OUTPUT, help="Tokens of each answer, in the same forms."),
    reasoning_tokens: str = typer.Option(
        None, help="Reasoning tokens before each answer, in the same forms. [default: none]"
    ),
    shared_prefix_tokens: int = typer.Option(
        0, min=0, help="Tokens that begin every prompt, as a system prompt."
    ),
    percentile: float = typer.Option(
        99.0, min=1.0, max=99.9, help="Percentile at which each level is kept."
    ),
    max_num_seqs: str = typer.Option("64,256", help="Numbers of seats to choose from."),
    max_num_batched_tokens: str = typer.Option("512,2048", help="Token budgets to choose from."),
    kv_cache_dtype: str = typer.Option("auto", help="KV types to choose from: auto,int8."),
    tensor_parallel_size: str = typer.Option(
        "1,2,4,8", "--tensor-parallel-size", "-tp", help="Ranks per worker to choose from."
    ),
    speculative_config: str = typer.Option(
        None, help="Speculation to try beside none, such as ngram. [needs --acceptance]"
    ),
    acceptance: float = typer.Option(
        None, min=0.0, max=1.0, help="Chance that a drafted token is right."
    ),
    dtype: str = typer.Option(
        None, help="Storage type of the weights: fp16, fp8, Q4_0. [default: as in the file]"
    ),
    calibrate: Path = typer.Option(
        None,
        help="Step log, saved calibration, or result of bench or roofline, of the one machine in "
        "--hardware.",
    ),
    max_seconds: float = typer.Option(60.0, min=1.0, help="Time limit of the search."),
    seed: int = typer.Option(1, min=0, help="Seed of lengths and gaps."),
    out: Path = typer.Option(
        None, help="Folder for the report: HTML, Markdown and JSON. [default: no files]"
    ),
    html: bool = typer.Option(
        False, "--html", help="Write the report, as --out twinphase-plan-DATE-TIME."
    ),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Find the cheapest fleet that keeps service levels: arithmetic proposes, simulation decides.

    Searches machines, replicas, prefill and decode pools on equal or different machines, ranks,
    seats, token budgets, KV types, and speculation where its acceptance is given.
    """
    given = locals()
    from twinphase import Distribution, live
    from twinphase_bench.simulate.levels import Levels
    from twinphase_bench.simulate.plan import Demand, search
    from twinphase_bench.simulate.plan_report import plan_report

    if (users is None) == (request_rate is None):
        raise InvalidRequestError("plan needs one load.", "Give --users or --request-rate.")
    if request_rate is not None and not 0 < request_rate < math.inf:
        raise InvalidRequestError(
            f"--request-rate is {request_rate}.", "Give requests per second above 0."
        )
    if (speculative_config is None) != (acceptance is None):
        raise InvalidRequestError(
            "--speculative-config and --acceptance belong together.",
            "Give both, such as ngram and 0.7, or neither.",
        )
    demand = Demand(
        Distribution.parse(prompt_tokens),
        Distribution.parse(output_tokens),
        Distribution.parse(reasoning_tokens) if reasoning_tokens else None,
        shared_prefix=shared_prefix_tokens,
        rate=request_rate,
        users=users or 0,
        think_time=think_time,
    )
    levels = Levels.parse(slo, percentile)
    with live("twinphase plan", percent=True) as progress:
        space = _space(given, progress)
        found = search(space, demand, levels, progress, seconds=max_seconds, seed=seed)
    report = plan_report(found)
    show_report(report, json)
    if out is not None or html:
        save_report(report, out)


def _space(given: dict[str, Any], progress: Any) -> Any:
    from twinphase import Deployment, Machine, drafted, read_calibration
    from twinphase_bench.simulate.calibrate import calibration_here
    from twinphase_bench.simulate.from_bench import is_result, measured_machine
    from twinphase_bench.simulate.plan import Space

    names = [name.strip() for name in given["hardware"].split(",") if name.strip()]
    prices = _prices(given["price"], names)
    for name in names:
        if name != "this":
            Machine(name).hardware  # noqa: B018  refuses an unknown name
    calibrated = {}
    if given["calibrate"] is not None:
        if len(names) != 1:
            raise InvalidRequestError(
                "--calibrate is of one machine, and --hardware names several.", "Name one."
            )
        machine = Machine(names[0])
        if is_result(given["calibrate"]):
            one = Deployment(given["model"], machine, dtype=given["dtype"] or "")
            calibrated[names[0]] = measured_machine(given["calibrate"], one)
        else:
            calibrated[names[0]] = replace(
                machine, calibration=read_calibration(given["calibrate"])
            )
    elif "this" in names:
        calibrated["this"] = Machine("this", calibration_here(given["model"], {}, progress))
    return Space(
        given["model"],
        {name: prices.get(name, 1.0) for name in names},
        dtype=given["dtype"] or "",
        seats=_numbers("--max-num-seqs", given["max_num_seqs"]),
        chunks=_numbers("--max-num-batched-tokens", given["max_num_batched_tokens"]),
        kv_types=[word.strip() for word in given["kv_cache_dtype"].split(",")],
        ranks=_numbers("--tensor-parallel-size", given["tensor_parallel_size"]),
        calibrated=calibrated,
        drafts=drafted(given["speculative_config"]) if given["speculative_config"] else 0,
        acceptance=given["acceptance"] or 0.0,
    )


def _prices(text: str | None, names: list[str]) -> dict[str, float]:
    found = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in names or not 0 <= found[name] < math.inf:
            raise InvalidRequestError(
                f"--price {part!r} cannot be used.",
                f"Give MACHINE=PRICE with a machine of --hardware: {', '.join(names)}.",
            )
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise InvalidRequestError(f"{option} is {text!r}.", "Give numbers from 1 on, with commas.")
    return found
