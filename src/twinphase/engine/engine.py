"""The engine: a step is schedule, execute, commit. It sees token ids only and owns all state of its requests.

Single-threaded: every method is called from one thread, between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from twinphase.batch import Batch, StepOutput
from twinphase.engine.cpu_wait import thread_cpu_wait
from twinphase.engine.executor import Executor
from twinphase.engine.trace import TraceWriter
from twinphase.errors import ContextLengthError, InvalidRequestError, RequestNotFoundError
from twinphase.phases.cost import CostModel
from twinphase.phases.ledger import Ledger
from twinphase.phases.timeline import RequestTimeline, StepRecord
from twinphase.phases.work import ModelShape
from twinphase.request import FinishReason, Request
from twinphase.sampling.rng import derive_seed
from twinphase.scheduler.scheduler import Scheduler

__all__ = ["Engine", "StepResult"]

LONGEST_GAP = 0.1  # seconds between steps that count as the front end's work on a token; more is idleness


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        batch: what was scheduled.
        output: the tokens each request sampled; those behind the end of a request included.
        finished: requests that ended in this step.
        record: tokens, work and time by phase.
    """

    batch: Batch
    output: StepOutput
    finished: list[Request]
    record: StepRecord


class Engine:
    """Requests in, tokens out, one step at a time.

    Attributes:
        scheduler: decides steps.
        executor: computes them.
        cost_model: predicts their times, and learns from them.
        ledger: says where each request's time went.
        shape: the model's numbers for FLOP and bytes.
        trace: where every call and decision is logged, if anywhere.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        cost_model: CostModel,
        *,
        shape: ModelShape,
        vocab_size: int,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        trace: TraceWriter | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            scheduler: decides steps, with the step times of `cost_model`.
            executor: computes them.
            cost_model: learns from them.
            shape: the model's numbers for FLOP and bytes.
            vocab_size: token ids are below it.
            seed: where the seeds of requests without one come from.
            clock: monotonic seconds, the clock of `Request.arrival_time`.
            trace: logs calls and decisions.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.cost_model = cost_model
        self.shape = shape
        self.ledger = Ledger(shape, cost_model)
        self.vocab_size = vocab_size
        self.seed = seed
        self.clock = clock
        self.cpu_wait: Callable[[], float] = thread_cpu_wait
        self.trace = trace
        self._num_seedless = 0
        self._last_end: float | None = None  # of the last step, while requests were running after it

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return self.scheduler.has_work

    @property
    def timelines(self) -> dict[str, RequestTimeline]:
        """Timelines of the unfinished requests."""
        return self.ledger.timelines

    def add_request(self, request: Request, *, timeline: RequestTimeline | None = None) -> RequestTimeline:
        """Validate and queue a request.

        Args:
            request: new; a seed is chosen for it if it needs one and has none.
            timeline: what happened to the request before, such as tokenizing; a new one if None.

        Returns:
            The request's timeline, which grows with its steps.

        Raises:
            InvalidRequestError: empty prompt, id in use, token id out of the vocabulary, a priority where the policy
                has none, or a value that is not supported.
            ContextLengthError: prompt and `max_tokens` do not fit `max_model_len`.
            CacheCapacityError: the KV cache is too small for it, even when empty.
        """
        self._validate(request)
        params = request.sampling_params
        seedless = params.seed is None and not params.greedy
        if seedless:
            request.sampling_params = replace(params, seed=derive_seed(self.seed, self._num_seedless))
        self.scheduler.add(request)
        self._num_seedless += seedless
        timeline = timeline or RequestTimeline(request.arrival_time)
        self.ledger.open(request.request_id, timeline)
        if self.trace:
            self.trace.add(request)
        return timeline

    def step(self) -> StepResult:
        """Schedule, execute, commit. Needs `has_work`.

        Where the executor fails on the whole batch, each request is computed by itself, and those that fail alone end
        with `FinishReason.ERROR`.
        """
        start = self.clock()
        batch = self.scheduler.schedule()
        scheduled = self.clock()
        waited = self.cpu_wait()
        output, whole = self._execute(batch)
        waited = self.cpu_wait() - waited
        executed = self.clock() - scheduled
        if self.trace:
            self.trace.step(batch, output)
        finished = self.scheduler.commit(batch, output)
        end = self.clock()
        record = self.ledger.add_step(batch, start, end, executed, output.sampling_seconds, waited)
        gap = start - self._last_end if self._last_end is not None else 0.0
        gap = gap if gap < LONGEST_GAP else 0.0
        if whole:  # a step that failed on the way did not take what its work takes
            self.cost_model.observe(batch.work, end - start, gap)
            if self.trace:
                self.trace.observe(end - start, gap)
        for request in finished:
            self.ledger.close(request.request_id, end)
        self._last_end = end if self.scheduler.running else None
        self.ledger.settle(self.clock())
        return StepResult(batch, output, finished, record)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request between steps, such as at a stop string; unknown and finished ones are left alone."""
        if self.scheduler.get(request_id) is None:
            return
        if self.trace:
            self.trace.finish(request_id, reason)
        self.scheduler.finish(request_id, reason)
        self.ledger.close(request_id, self.clock())

    def abort(self, request_id: str) -> None:
        """End a request at its user's wish; its blocks are free at once.

        Raises:
            RequestNotFoundError: no unfinished request has that id.
        """
        if self.scheduler.get(request_id) is None:
            raise RequestNotFoundError(
                f"No unfinished request has the id {request_id!r}.", "It was never added, or has finished already."
            )
        self.finish(request_id, FinishReason.ABORT)

    def _execute(self, batch: Batch) -> tuple[StepOutput, bool]:
        """Compute a batch; if that fails, its shares one by one, so that the one at fault fails alone.

        The results are the same: a request's bits do not depend on who is computed with it.

        Returns:
            The output, and whether it came of one go.
        """
        try:
            return self.executor.execute(batch), True
        except Exception as error:
            if len(batch.scheduled) == 1:
                return StepOutput(errors={batch.scheduled[0].request_id: _one_line(error)}), False
        output = StepOutput()
        parts = [Batch([share], []) for share in batch.decodes] + [Batch([], [share]) for share in batch.prefills]
        for part, _ in map(self._execute, parts):
            output.token_ids |= part.token_ids
            output.logprobs |= part.logprobs
            output.errors |= part.errors
        return output, False

    def _validate(self, request: Request) -> None:
        params, prompt = request.sampling_params, request.prompt_token_ids
        if not isinstance(request.request_id, str) or not request.request_id:
            raise InvalidRequestError(f"The request id is {request.request_id!r}.", "Use a text that is not empty.")
        if not prompt:
            raise InvalidRequestError("The prompt is empty.", "Give at least one token.")
        if params.n != 1:
            raise InvalidRequestError(f"n is {params.n}, but only 1 is supported.", "Send the prompt n times.")
        limit = self.scheduler.max_model_len
        if len(prompt) >= limit:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens; the context holds {limit}, the answer's first token included.",
                f"Shorten the prompt by {len(prompt) - limit + 1} tokens or more.",
            )
        if params.max_tokens is not None and len(prompt) + params.max_tokens > limit:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, together "
                f"{len(prompt) + params.max_tokens}; the context holds {limit}.",
                f"Lower max_tokens to {limit - len(prompt)}, or shorten the prompt.",
            )
        self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"Token id {token_id!r} in {name} is not in the vocabulary.",
                    f"Use integers from 0 to {self.vocab_size - 1}.",
                )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
