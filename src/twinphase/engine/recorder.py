"""Measures steps from outside: clock, processor waits, ledger, cost model, step log.

The engine decides and computes the same without it. `phases/ledger.py` divides a step's time among
requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from twinphase.batch import Batch, StepOutput
from twinphase.engine.cpu_wait import thread_cpu_wait
from twinphase.engine.trace import TraceWriter
from twinphase.outcome import FinishReason
from twinphase.phases.cost import CostModel
from twinphase.phases.ledger import Ledger
from twinphase.phases.timeline import RequestTimeline, StepRecord
from twinphase.phases.work import ModelShape
from twinphase.request import Request

# A gap between steps up to this is the front end's work on a token; a longer one is idleness.
MAX_GAP_SECONDS = 0.1


class StepRecorder:
    """Records what the engine does: fills the ledger and trains the cost model.

    Attributes:
        clock: monotonic seconds, the clock of `Request.arrival_time`.
        cpu_wait: seconds that the engine's threads have waited for a processor so far.
    """

    def __init__(
        self,
        shape: ModelShape,
        cost_model: CostModel,
        clock: Callable[[], float] = time.perf_counter,
        trace: TraceWriter | None = None,
    ) -> None:
        self.cost_model = cost_model
        self.ledger = Ledger(shape, cost_model)
        self.clock = clock
        self.cpu_wait: Callable[[], float] = thread_cpu_wait
        self.trace = trace
        self._start = self._drafting = 0.0
        self._last_end: float | None = (
            None  # The end of the last step, if requests were running after it.
        )

    def request_added(self, request: Request, timeline: RequestTimeline) -> None:
        if self.trace:
            self.trace.add(request)
        self.ledger.open(request.request_id, timeline, request.tenant)

    def request_finished(self, request_id: str, reason: FinishReason) -> None:
        """A request was ended between two steps."""
        if self.trace:
            self.trace.finish(request_id, reason)
        self.ledger.close(request_id, self.clock())

    def step_begins(self) -> None:
        self._start = self.clock()
        self._drafting = 0.0

    def drafted(self) -> None:
        """Count the time since the step began as drafting."""
        self._drafting = self.clock() - self._start

    def execute(
        self,
        compute: Callable[[Batch], StepOutput],
        batch: Batch,
        drafts: Mapping[str, Sequence[int]],
    ) -> StepOutput:
        """Compute, measure and log a batch; it is logged now, because the commit changes its lists.

        `drafts` are those that the batch was scheduled with.
        """
        start = self.clock()
        waited = self.cpu_wait()
        output = compute(batch)
        output.times.cpu_wait = self.cpu_wait() - waited
        output.times.executed = self.clock() - start
        output.times.drafting = self._drafting
        if self.trace:
            self.trace.step(drafts, batch, output)
        return output

    def step_ends(
        self,
        batch: Batch,
        output: StepOutput,
        finished: list[Request],
        work: Mapping[str, float],
        *,
        running: bool,
    ) -> StepRecord:
        """Record a committed step: predicted `work` by tenant; `running` if requests continue."""
        start = self._start
        end = self.clock()
        record = self.ledger.add_step(batch, output, start, end, work)
        gap = start - self._last_end if self._last_end is not None else 0.0
        if not output.computed_singly:  # Otherwise the time of the step does not match its work.
            seconds = end - start - self._drafting
            self._learn(
                batch, seconds, gap if gap < MAX_GAP_SECONDS else 0.0, output.times.cpu_wait
            )
        for request in finished:
            self.ledger.close(request.request_id, end)
        self._last_end = end if running else None
        self.ledger.settle(self.clock())
        return record

    def _learn(self, batch: Batch, seconds: float, gap: float, cpu_wait: float) -> None:
        self.cost_model.observe(batch.work, seconds, gap)
        if self.trace:
            self.trace.observe(
                seconds, gap, start=self._start, drafting=self._drafting, cpu_wait=cpu_wait
            )
