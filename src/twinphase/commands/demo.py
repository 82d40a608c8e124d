"""`twinphase demo`: asks a question about a page of text twice, and reports both phases."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from twinphase.arguments import DEFAULT_MODEL, complete_model
from twinphase.errors import StorageError, TwinphaseError

if TYPE_CHECKING:
    from twinphase.config import EngineConfig
    from twinphase.phases.hardware import Ceilings
    from twinphase.phases.report import PhaseReport, PhaseRow

TEXT_NAME = "two-phases.md"
QUESTION = "In one sentence: what is the difference between prefill and decode?"
MAX_TOKENS = 64
MAX_MEASUREMENTS = 3


def demo(
    model: str = typer.Argument(
        DEFAULT_MODEL, help="Any model that `twinphase run` takes.", autocompletion=complete_model
    ),
) -> None:
    """Ask a question about a page of text twice, and show the time of prefill and decode.

    The page is twinphase's own docs/two-phases.md. The second time its keys and values are in the
    prefix cache. If this machine's limits are unknown, they are measured first.
    """
    raise typer.Exit(_demo(model))


def page() -> str:
    """The page of documentation that the question is about.

    Raises:
        StorageError: this installation has no such file.
    """
    package = Path(__file__).parents[1]
    for folder in (package, package.parents[1] / "docs"):
        try:
            return (folder / TEXT_NAME).read_text(encoding="utf-8")
        except OSError:
            continue
    raise StorageError(f"This installation has no {TEXT_NAME}.", "Install twinphase again.")


def _demo(model: str) -> int:
    from twinphase.answer import INTERRUPTED, report_answer, stream_answer
    from twinphase.config import EngineConfig
    from twinphase.engine.frontends.llm import LLM
    from twinphase.request import SamplingParams
    from twinphase.terminal import Bar, heading, paragraph, show_report

    text = page()
    bar = Bar("Compiling kernels", "kernels", even=True)
    # Drafts would put several tokens into a step; the demo needs one token per step.
    llm = LLM(
        model,
        compile_progress=lambda done, total, kernel: bar.update(done, total),
        config=EngineConfig(speculative_config="none"),
        task="generate",
    )
    bar.clear()
    _measure_once(llm.config)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    messages = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
    reports: list[PhaseReport] = []
    for title in (
        f"{QUESTION} (after a text of {len(text.split()):,} words)",
        "The same again: the text is in the prefix cache now.",
    ):
        heading(title)
        began = time.perf_counter()
        answer = stream_answer(llm, messages, params)
        report, _ = report_answer(llm, answer, time.perf_counter() - began)
        show_report(report)
        if answer.interrupted:
            return INTERRUPTED
        reports.append(report)
    heading("What to see")
    for line in findings(*reports):
        paragraph(line)
    return 0


def _measure_once(config: EngineConfig) -> None:
    """Measure this machine's ceilings, with a progress bar, if they are unknown."""
    from twinphase.engine.loading.ceilings import device_of, keep_ceilings, measured_ceilings
    from twinphase.terminal import note

    if not device_of(config).ceilings or measured_ceilings(config) is not None:
        return
    title = "Measuring this machine's limits, once"
    try:
        for _ in range(MAX_MEASUREMENTS):
            if keep_ceilings(None, _measure(config, title)) is not None:
                return
            title = "Measuring again: other programs disturbed it"
        note("Other programs disturbed the measurements, so MFU and MBU are not shown.")
    except (TwinphaseError, OSError) as error:
        note(f"This machine's limits are not known: {error}")


def _measure(config: EngineConfig, title: str) -> Ceilings:
    from twinphase.engine.loading.ceilings import measure_ceilings
    from twinphase.terminal import Bar

    bar = Bar(title, "%")
    try:
        [found] = measure_ceilings(
            config, 1, lambda done, total: bar.update(round(100 * done), 100 * total)
        )
    finally:
        bar.clear()
    return found


def findings(first: PhaseReport, again: PhaseReport) -> list[str]:
    """Findings from the two reports, in sentences with figures."""
    prefill, decode = first.phases
    lines = []
    if prefill.tokens and decode.tokens:
        times = decode.seconds / decode.tokens / (prefill.seconds / prefill.tokens)
        lines.append(
            f"Prefill computed {prefill.tokens:,} tokens in parallel, "
            f"{prefill.seconds / prefill.tokens * 1e3:.2f} ms per token; decode computed one per "
            f"step, {decode.seconds / decode.tokens * 1e3:.2f} ms per token: {times:.1f} times as "
            f"long, because each step reads {decode.working_set / 1e6:,.0f} MB for a single token."
        )
    shares = [
        f"{row.name} used {_share(row, 'MFU')} of this machine's arithmetic and "
        f"{_share(row, 'MBU')} of its memory bandwidth"
        for row in first.phases
        if row.nearest_limit is not None
    ]
    if len(shares) == len(first.phases):
        lines.append(f"Of the limits measured here, {'; '.join(shares)}.")
    cached = again.phases[0]
    if first.ttft and again.ttft and cached.cached_tokens:
        lines.append(
            f"The second time, {cached.cached_tokens:,} of the prompt's tokens were in the cache: "
            f"the first token came after {again.ttft * 1e3:,.0f} ms instead of "
            f"{first.ttft * 1e3:,.0f} ms."
        )
    lines.append("docs/two-phases.md, the text of the question, explains both phases.")
    return lines


def _share(row: PhaseRow, metric: str) -> str:
    value = row.efficiency if row.metric == metric else row.other_efficiency
    percent = 100 * (value or 0)
    return f"{percent:.0f} %" if percent >= 1 else "under 1 %"
