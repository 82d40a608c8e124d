"""One answer on a terminal: streams it, then says where the time went.

Joins what may not know each other: the engine's stream, the measuring of ceilings, the report, the
screen. Not for reading the command line (cli.py) nor for drawing (terminal.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from twinphase import terminal
from twinphase.chat.wrapping import UNWRAPPED, WrappedOutput
from twinphase.phases.hardware import Ceilings, hint_is_due, save_ceilings
from twinphase.phases.report import PhaseReport, phase_report

if TYPE_CHECKING:  # cli.py imports the engine once all other checks have passed.
    from twinphase.config import EngineConfig
    from twinphase.engine.frontends.checks import Prompt
    from twinphase.engine.frontends.llm import LLM
    from twinphase.engine.frontends.outputs import RequestOutput
    from twinphase.request import SamplingParams

# Exit code of a process that Ctrl-C ended, as in shells.
INTERRUPTED = 130


@dataclass(frozen=True)
class Answer:
    """What a stream brought, finished or not."""

    output: RequestOutput
    interrupted: bool


def stream_answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, *, show: bool = True, wrap: bool = True
) -> Answer:
    """Stream one answer to stdout (if `show`), with a bar on stderr during a long prefill.

    On a terminal, lines are broken between words (if `wrap`). Ctrl-C ends the answer; the part
    so far is returned.

    Raises:
        KeyboardInterrupt: before the first step was done.
    """
    from twinphase.batch import Phase

    shown = WrappedOutput(columns=None if wrap else UNWRAPPED)
    bar = terminal.Bar("Reading the prompt", "tokens")
    last = None
    pressed = False
    try:
        with closing(llm.stream(prompt, params)) as updates:  # type: ignore[type-var]
            for last in updates:
                if last.phase is Phase.PREFILL:
                    bar.update(last.num_prefilled, last.num_prompt_tokens)
                    continue
                bar.clear()
                if show and last.text:
                    shown.write(last.text)
    except KeyboardInterrupt:
        pressed = True
        if last is None:
            raise
    finally:
        bar.clear()
    assert last is not None, "a stream has at least one update"
    output = last.output
    text = output.outputs[0].text
    if show and text:
        shown.close(with_newline=not text.endswith("\n"))
    return Answer(output, interrupted=pressed or output.outputs[0].finish_reason == "abort")


def report_answer(
    llm: LLM, answer: Answer, wall_seconds: float, before: Mapping[str, float] | None = None
) -> tuple[PhaseReport, Ceilings | None]:
    """Divide the time of an answer by what is known of this machine; nothing is measured here.

    Ceilings that a phase exceeded are measured again in the next idle moment.
    """
    from twinphase.engine.loading.ceilings import compute_units, measured_ceilings

    ceilings = measured_ceilings(llm.config)
    result = phase_report(
        answer.output.metrics,
        units=compute_units(llm.checkpoint, llm.config),
        ceilings=ceilings,
        wall_seconds=wall_seconds,
        before=before,
        num_cached_tokens=answer.output.num_cached_tokens,
    )
    if ceilings is not None and result.over_ceiling and not ceilings.provisional:
        ceilings = replace(ceilings, provisional=True)
        with suppress(OSError):
            save_ceilings(ceilings)
    return result, ceilings


def hint_about_ceilings(config: EngineConfig, ceilings: Ceilings | None) -> None:
    """Mention, at most once a day, how MFU and MBU become known where they are not."""
    from twinphase.engine.loading.ceilings import device_of

    if ceilings is None and device_of(config).ceilings and hint_is_due():
        backend = "" if config.backend == "cpu" else f" --backend {config.backend}"
        terminal.note(
            f"`twinphase roofline{backend}` measures this machine once, so that answers show how "
            "near they came to its limits (MFU, MBU)."
        )


def result_json(
    model: str, answer: Answer, result: PhaseReport, ceilings: Ceilings | None
) -> dict[str, Any]:
    """The whole result as plain values, named as in OpenAI's API where that has a name."""
    from twinphase.engine.frontends.outputs import plain_logprobs

    completion = answer.output.outputs[0]
    prompt_tokens = len(answer.output.prompt_token_ids)
    scored = answer.output.prompt_logprobs
    return {
        "model": model,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": completion.logprobs
        and [plain_logprobs(position) for position in completion.logprobs],
        "prompt_logprobs": scored and [plain_logprobs(position) for position in scored],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(completion.token_ids),
            "total_tokens": prompt_tokens + len(completion.token_ids),
            "prompt_tokens_details": {"cached_tokens": answer.output.num_cached_tokens},
        },
        "error": answer.output.error,
        "timing": result.as_dict(),
        "ceilings": asdict(ceilings) if ceilings else None,
    }
