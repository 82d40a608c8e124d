"""`twinphase simulate`: simulates a load on any deployment with the real scheduler."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twinphase import ClusterConfig, EngineConfig, InvalidRequestError, Options, with_options
from twinphase_bench.commands.publish import save_report, show_report
from twinphase_bench.simulate.names import CLUSTER_OPTIONS, ENGINE_OPTIONS

if TYPE_CHECKING:
    from twinphase_bench.simulate.report import Answer

GIVEN_DEFAULTS = {"speculative_config": "none", "itl_slo_ms": "auto"}
ENGINE = Options(EngineConfig, only=ENGINE_OPTIONS, defaults=GIVEN_DEFAULTS, group="Engine")
CLUSTER = Options(ClusterConfig, only=CLUSTER_OPTIONS, group="Cluster")


@with_options(cluster=CLUSTER, engine=ENGINE)
def simulate(
    model: str = typer.Argument(
        ..., help="A known name, a config.json, a GGUF file, or a model in the cache."
    ),
    hardware: str = typer.Option(
        "this", help="Hardware of each worker: this (measured once), or the name of a datasheet."
    ),
    decode_hardware: str = typer.Option(
        None, help="Hardware of the decode pool. [default: as --hardware]"
    ),
    trace: Path = typer.Option(
        None, "--trace", "--dataset-path", help="Trace: a Mooncake or Azure file."
    ),
    request_rate: float = typer.Option(None, help="Requests per second (open loop)."),
    constant: bool = typer.Option(
        False, "--constant", help="Send at even gaps instead of a Poisson process."
    ),
    max_concurrency: int = typer.Option(
        None, min=1, help="Number of requests to keep in flight (closed loop)."
    ),
    scale_lengths: float = typer.Option(None, help="Factor for the lengths of a trace."),
    time_scale: float = typer.Option(None, help="Factor for the gaps of a trace."),
    num_prompts: int = typer.Option(
        None, min=1, help="Number of requests. [default: 100, the whole trace, or 4 per user]"
    ),
    random_input_len: int = typer.Option(None, help="Tokens per prompt. [default: 256]"),
    random_output_len: int = typer.Option(None, help="Tokens per output. [default: 64]"),
    users: int = typer.Option(
        None, min=1, help="Users who wait for an answer, think, and ask again."
    ),
    prompt_tokens: str = typer.Option(
        None,
        help="Tokens of each question: 500, 100-900, exponential:MEAN, or lognormal:MEAN:SIGMA. "
        "[default: lognormal:512:0.8]",
    ),
    output_tokens: str = typer.Option(
        None, help="Tokens of each answer, in the same forms. [default: lognormal:200:0.6]"
    ),
    reasoning_tokens: str = typer.Option(
        None, help="Reasoning tokens before each answer, in the same forms. [default: none]"
    ),
    think_time: float = typer.Option(
        None, min=0.0, help="Mean seconds between an answer and the next question. [default: 30]"
    ),
    shared_prefix_tokens: int = typer.Option(
        None, min=0, help="Tokens that begin every user's prompt, as a system prompt. [default: 0]"
    ),
    turns: int = typer.Option(
        None, min=1, help="Turns per conversation; a prompt has all earlier turns. [default: 1]"
    ),
    goodput: list[str] = typer.Option(
        [], help="Service level in milliseconds, such as ttft:500 or tpot:50; repeatable."
    ),
    repair: bool = typer.Option(
        True,
        "--repair/--no-repair",
        show_default=False,
        help="If a service level is missed, simulate changes of one flag each. [default: on]",
    ),
    acceptance: float = typer.Option(
        None,
        min=0.0,
        max=1.0,
        help="Chance that a drafted token is right. [needs --speculative-config]",
    ),
    dtype: str = typer.Option(
        None, help="Storage type of the weights: fp16, fp8, Q4_0. [default: as in the file]"
    ),
    mfu: float = typer.Option(
        None, min=0.01, max=1.0, help="Share of the peak FLOP/s that prefill reaches."
    ),
    mbu: float = typer.Option(
        None, min=0.01, max=1.0, help="Share of the memory bandwidth that decode reaches."
    ),
    kv_link: float = typer.Option(
        None, min=1.0, help="Bytes per second between two workers. [default: 4e8 here, or 25e9]"
    ),
    price: list[float] = typer.Option(
        [],
        help="Price of a worker per hour; give it twice for a prefill and a decode worker.",
    ),
    calibrate: Path = typer.Option(
        None,
        help="Step log (`serve --trace-file`), saved calibration, or result of `bench` or "
        "`roofline` (which gives a datasheet its MFU and MBU) of the machine with this model.",
    ),
    save_calibration: Path = typer.Option(
        None, help="Write the calibration of this machine into this file."
    ),
    recalibrate: bool = typer.Option(
        False, "--recalibrate", help="Measure this machine again (half a minute)."
    ),
    recording: Path = typer.Option(
        None, help="Write a recording for the live page into this file, FILE.jsonl.gz."
    ),
    seed: int = typer.Option(None, min=0, help="Seed of lengths and gaps. [default: random]"),
    out: Path = typer.Option(
        None, help="Folder for the report: HTML, Markdown and JSON. [default: no files]"
    ),
    html: bool = typer.Option(
        False, "--html", help="Write the report, as --out twinphase-simulate-DATE-TIME."
    ),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    *,
    cluster: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Simulate a load on a deployment: real scheduler, caches and router; predicted step times.

    Prints what `bench` prints for a real server, and the measured error of such simulations.
    """
    given = locals()
    if len(price) > 2:
        raise InvalidRequestError(
            f"--price is given {len(price)} times.", "Give it once, or once for each pool."
        )
    drawn = secrets.randbelow(1 << 31) if seed is None else seed
    given = {**given, "seed": drawn, "goodput": tuple(goodput)}
    from twinphase_bench.simulate.report import simulation_report

    answer = _answered(given)
    report = simulation_report(answer)
    show_report(report, json)
    if out is not None or html:
        save_report(report, out)


def _answered(given: dict[str, Any]) -> Answer:
    from twinphase import live
    from twinphase_bench.simulate.ask import Question, ask

    with live("twinphase simulate") as progress:
        return ask(Question(given), progress)
