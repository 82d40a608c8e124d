"""The progress bar of `LLM.generate`: finished prompts, and both phases' token rates."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twinphase.phases.timeline import StepRecord

RATE_WINDOW_SECONDS = 1.0


def token_rates(records: deque[StepRecord]) -> tuple[float, float]:
    """Tokens per second of prefill and of decode, over the steps in `records`."""
    if not records:
        return 0.0, 0.0
    seconds = max(records[-1].end - records[0].start, 1e-9)
    return (
        sum(record.prefill_tokens for record in records) / seconds,
        sum(record.decode_tokens for record in records) / seconds,
    )


class GenerateProgress:
    """A bar on stderr within its `with` block; it shows nothing if stderr is not a terminal."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        rates = TextColumn(
            "[cyan]prefill {task.fields[prefill]:,.0f}[/] [green]decode "
            "{task.fields[decode]:,.0f}[/] tok/s"
        )
        columns = (
            TextColumn("Processed prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            rates,
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, prefill=0.0, decode=0.0)
        self._records: deque[StepRecord] = deque()

    def __enter__(self) -> GenerateProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, record: StepRecord, finished: int) -> None:
        self._records.append(record)
        while record.end - self._records[0].end > RATE_WINDOW_SECONDS:
            self._records.popleft()
        if not self._bar.disable:
            prefill, decode = token_rates(self._records)
            self._bar.update(self._task, completed=finished, prefill=prefill, decode=decode)
