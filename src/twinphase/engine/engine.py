"""The engine: a step is schedule, execute, commit.

It sees token ids only and owns all state of its requests. One thread calls all methods, between
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from twinphase.batch import Batch, Phase, StepOutput
from twinphase.cache.prefix_cache import Acceptance, CachedBlock
from twinphase.engine.executor import Executor
from twinphase.engine.frontends.checks import check_id, check_token_ids, unknown_request
from twinphase.engine.recorder import StepRecorder
from twinphase.errors import ContextLengthError, EngineDeadError, InvalidRequestError, one_line
from twinphase.outcome import FinishReason
from twinphase.phases.cost import CostModel
from twinphase.phases.ledger import Ledger
from twinphase.phases.timeline import RequestTimeline, StepRecord
from twinphase.phases.work import ModelShape
from twinphase.request import Request
from twinphase.sampling.rng import derive_seed
from twinphase.scheduler.pace import Pace
from twinphase.scheduler.phase import phase_of
from twinphase.scheduler.scheduler import Scheduler
from twinphase.speculation.drafter import Drafter


@dataclass(frozen=True)
class StepResult:
    """Result of one step; `output` also has tokens after the end of a request."""

    batch: Batch
    output: StepOutput
    finished: list[Request]
    record: StepRecord


class Engine:
    """Turns requests into tokens: the scheduler decides, the executor computes."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        recorder: StepRecorder,
        *,
        shape: ModelShape,
        vocab_size: int,
        seed: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.recorder = recorder
        self.shape = shape
        self.vocab_size = vocab_size
        self.seed = seed
        self.drafter = drafter
        self._num_seedless = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def clock(self) -> Callable[[], float]:
        return self.recorder.clock

    @property
    def cost_model(self) -> CostModel:
        return self.recorder.cost_model

    @property
    def ledger(self) -> Ledger:
        return self.recorder.ledger

    @property
    def timelines(self) -> dict[str, RequestTimeline]:
        return self.ledger.timelines

    def add_request(
        self, request: Request, *, timeline: RequestTimeline | None = None
    ) -> RequestTimeline:
        """Validate and queue a request.

        Args:
            request: a new request, or one with the output tokens of another engine, which this
                engine continues with the same result. A request that needs a seed and has none gets
                one.
            timeline: the request's earlier intervals, such as tokenizing; None begins a new
                timeline.

        Returns:
            The request's timeline, which grows with its steps.

        Raises:
            InvalidRequestError: the prompt is empty, the id is in use, a token id is out of the
                vocabulary, the policy has no priorities, the output has ended already, or a value
                is not supported.
            ContextLengthError: prompt and `max_tokens` do not fit `max_model_len`.
            CacheCapacityError: the KV cache is too small for it, even when empty.
        """
        self._validate(request)
        params = request.sampling_params
        seedless = params.seed is None and not params.greedy
        if seedless:
            request.sampling_params = replace(
                params, seed=derive_seed(self.seed, self._num_seedless)
            )
        self.scheduler.add(request)
        self._num_seedless += seedless
        timeline = timeline or RequestTimeline(request.arrival_time)
        self.recorder.request_added(request, timeline)
        return timeline

    def step(self) -> StepResult:
        """Schedule, execute and commit one step; requires `has_work`."""
        self.recorder.step_begins()
        drafts = self._draft() if self.drafter else {}
        batch = self.scheduler.schedule(drafts)
        output = self.recorder.execute(self._execute, batch, drafts)
        if self.drafter:
            self.drafter.observe(batch, output)
        finished = self.scheduler.commit(batch, output)
        for request in finished:
            self._forget(request)
        work = self.scheduler.step_work
        running = bool(self.scheduler.running)
        record = self.recorder.step_ends(batch, output, finished, work, running=running)
        return StepResult(batch, output, finished, record)

    def keep_pace(self, pace: Pace) -> None:
        """From the next step on, limit prefill chunks so that running requests keep this pace."""
        self.scheduler.pace = pace
        if self.recorder.trace:
            self.recorder.trace.pace(pace)

    def limit_prefill(self, num_tokens: int | None) -> None:
        """Limit the prefill tokens per step, from the next step on; None removes the limit."""
        self.scheduler.max_prefill_tokens = num_tokens
        if self.recorder.trace:
            self.recorder.trace.read_at_most(num_tokens)

    def accept(
        self, blocks: Sequence[CachedBlock], write: Callable[[list[int], list[int]], None]
    ) -> list[Acceptance]:
        """Between steps, cache blocks that another engine computed; see `KVCacheManager.accept`."""
        verdicts = self.scheduler.kv_cache.accept(blocks, write)
        if self.recorder.trace:
            self.recorder.trace.accept(blocks, verdicts)
        return verdicts

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request between steps, as at a stop string; ignore unknown and finished ids."""
        request = self.scheduler.get(request_id)
        if request is not None:
            self.scheduler.finish(request_id, reason)
            self.recorder.request_finished(request_id, reason)
            self._forget(request)

    def abort(self, request_id: str) -> None:
        """End a request that its user cancelled; its blocks become free at once.

        Raises:
            RequestNotFoundError: no unfinished request has that id.
        """
        if self.scheduler.get(request_id) is None:
            raise unknown_request(request_id)
        self.finish(request_id, FinishReason.ABORT)

    def _draft(self) -> dict[str, list[int]]:
        """Drafts for the requests that decode next, each cut at its first invalid token id."""
        assert self.drafter is not None
        running = self.scheduler.running if self.scheduler.takes_drafts else ()
        decoding = [request for request in running if phase_of(request) is Phase.DECODE]
        drafts = self.drafter.draft(decoding) if decoding else {}
        tokens = range(self.vocab_size)
        found = {
            name: list(takewhile(tokens.__contains__, draft)) for name, draft in drafts.items()
        }
        self.recorder.drafted()
        return found

    def _forget(self, request: Request) -> None:
        if self.drafter:
            self.drafter.forget(request)

    def _execute(self, batch: Batch) -> StepOutput:
        """Compute a batch; if that fails, compute its requests singly to isolate the faulty ones.

        A request that fails alone ends with `FinishReason.ERROR`. The results of the others do not
        change, because a request's bits do not depend on its batch.
        """
        try:
            return self.executor.execute(batch)
        except EngineDeadError:
            raise  # The backend cannot compute any more.
        except Exception as error:
            if len(batch.scheduled) == 1:
                return StepOutput(
                    errors={batch.scheduled[0].request_id: one_line(error)}, computed_singly=True
                )
        output = StepOutput(computed_singly=True)
        parts = [Batch([share], []) for share in batch.decodes] + [
            Batch([], [share]) for share in batch.prefills
        ]
        for part in map(self._execute, parts):
            output.token_ids |= part.token_ids
            output.logprobs |= part.logprobs
            output.prompt_logprobs |= part.prompt_logprobs
            output.errors |= part.errors
        return output

    def _validate(self, request: Request) -> None:
        params = request.sampling_params
        prompt = request.prompt_token_ids
        check_id(request.request_id)
        if not prompt:
            raise InvalidRequestError("The prompt is empty.", "Give at least one token.")
        if params.n != 1:
            raise InvalidRequestError(
                f"n is {params.n}, but only 1 is supported.", "Send the prompt n times."
            )
        limit = self.scheduler.max_model_len
        if len(prompt) >= limit:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens; the context holds {limit}, the answer's "
                "first token included.",
                f"Shorten the prompt by {len(prompt) - limit + 1} tokens or more.",
            )
        if params.max_tokens is not None and len(prompt) + params.max_tokens > limit:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, "
                "together "
                f"{len(prompt) + params.max_tokens}; the context holds {limit}.",
                f"Lower max_tokens to {limit - len(prompt)}, or shorten the prompt.",
            )
        output = request.output_token_ids
        scheduler = self.scheduler
        for name, token_ids in {
            "prompt": prompt,
            "output": output,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids,
        }.items():
            check_token_ids(token_ids or (), name, self.vocab_size)
        whole = request.num_tokens >= scheduler.max_tokens_total(request)
        if output and (whole or params.ends_at(output[-1], len(output), scheduler.eos_token_ids)):
            raise InvalidRequestError(
                "The answer has ended with the tokens it has.", "There is nothing to continue."
            )
