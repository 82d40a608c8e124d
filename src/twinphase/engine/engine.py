"""The engine: a step is schedule, execute, commit. It sees token ids only and owns all state of its requests.

Single-threaded: every method is called from one thread, between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from twinphase.batch import Batch, ScheduledRequest, StepOutput
from twinphase.engine.executor import Executor
from twinphase.errors import ContextLengthError, InvalidRequestError
from twinphase.phases.cost import Cost, ModelShape, rows_cost, weight_bytes_read
from twinphase.phases.timeline import RequestTimeline, StepRecord
from twinphase.request import FinishReason, Request
from twinphase.sampling.rng import derive_seed
from twinphase.scheduler.scheduler import Scheduler

__all__ = ["Engine", "StepResult"]


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
    """Requests in, tokens out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        shape: ModelShape,
        vocab_size: int,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Put the parts together.

        Args:
            scheduler: decides steps.
            executor: computes them.
            shape: the model's numbers for FLOP and bytes.
            vocab_size: token ids are below it.
            seed: where the seeds of requests without one come from.
            clock: monotonic seconds, the clock of `Request.arrival_time`.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.shape = shape
        self.vocab_size = vocab_size
        self.seed = seed
        self.clock = clock
        self.timelines: dict[str, RequestTimeline] = {}  # of unfinished requests
        self._num_seedless = 0

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return self.scheduler.has_work

    def add_request(
        self, request: Request, *, keep_kv: bool = False, timeline: RequestTimeline | None = None
    ) -> RequestTimeline:
        """Validate and queue a request.

        Args:
            request: new; a seed is chosen for it if it needs one and has none.
            keep_kv: the request is a turn of a conversation, see `Scheduler.add`.
            timeline: what happened to the request before, such as tokenizing; a new one if None.

        Returns:
            The request's timeline, which grows with its steps.

        Raises:
            InvalidRequestError: empty prompt, token id out of the vocabulary, or a value that is not supported.
            ContextLengthError: prompt and `max_tokens` do not fit `max_model_len`.
            CacheFullError: the KV cache is too small for it, even when empty.
        """
        self._validate(request)
        params = request.sampling_params
        seedless = params.seed is None and not params.greedy
        if seedless:
            request.sampling_params = replace(params, seed=derive_seed(self.seed, self._num_seedless))
        self.scheduler.add(request, keep_kv=keep_kv)
        self._num_seedless += seedless
        timeline = timeline or RequestTimeline(request.arrival_time)
        self.timelines[request.request_id] = timeline
        return timeline

    def step(self) -> StepResult:
        """Schedule, execute, commit. Needs `has_work`.

        If the executor raises, nothing is committed: the same tokens are scheduled again by the next step.
        """
        start = self.clock()
        batch = self.scheduler.schedule()
        output = self.executor.execute(batch)
        costs = [self._cost(share) for share in batch.scheduled]  # commit lets the shares' lists grow
        finished = self.scheduler.commit(batch, output)
        record = self._record(batch, costs, start, self.clock())
        self._stamp(batch, costs, record)
        for request in finished:
            del self.timelines[request.request_id]
        return StepResult(batch, output, finished, record)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request between steps, such as at a stop string; unknown and finished ones are left alone."""
        self.scheduler.finish(request_id, reason)
        self.timelines.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """End a request at its user's wish."""
        self.finish(request_id, FinishReason.ABORT)

    def _validate(self, request: Request) -> None:
        params, prompt = request.sampling_params, request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("The prompt is empty.", "Give at least one token.")
        self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
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

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"Token id {token_id!r} in {name} is not in the vocabulary.",
                    f"Use integers from 0 to {self.vocab_size - 1}.",
                )

    def _cost(self, share: ScheduledRequest) -> Cost:
        """A share's own work, weights left out."""
        return rows_cost(self.shape, share.num_computed_tokens, share.num_scheduled_tokens, int(share.samples))

    def _record(self, batch: Batch, costs: list[Cost], start: float, end: float) -> StepRecord:
        weights = Cost(bytes=weight_bytes_read(self.shape, sum(share.samples for share in batch.scheduled)))
        num_decodes = len(batch.decodes)
        decode = sum(costs[:num_decodes], weights if batch.decodes else Cost())
        prefill = sum(costs[num_decodes:], Cost() if batch.decodes else weights)
        decode_tokens = sum(share.num_scheduled_tokens for share in batch.decodes)
        return StepRecord(start, end, batch.num_tokens - decode_tokens, decode_tokens, prefill, decode)

    def _stamp(self, batch: Batch, costs: list[Cost], record: StepRecord) -> None:
        """Enter the step in every timeline; each scheduled request bears an equal part of the weights' bytes."""
        shares = batch.scheduled
        weights = record.prefill + record.decode
        weight_bytes = (weights.bytes - sum(cost.bytes for cost in costs)) // max(len(shares), 1)
        for share, cost in zip(shares, costs, strict=True):
            timeline = self.timelines[share.request_id]
            timeline.add_step(record, share.phase, share.num_scheduled_tokens, cost + Cost(bytes=weight_bytes))
        scheduled = {share.request_id for share in shares}
        for request_id, timeline in self.timelines.items():
            if request_id not in scheduled:
                timeline.skip_step(record)
