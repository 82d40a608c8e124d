"""A simulated worker: a real scheduler with made-up tokens, which can jump over decode steps."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, field

from twinphase.batch import Batch, ScheduledRequest, StepOutput
from twinphase.cache.prefix_cache import PrefixCache
from twinphase.engine.engine import Engine
from twinphase.phases.ledger import Ledger
from twinphase.scheduler.scheduler import Scheduler
from twinphase.scheduler.steady import SteadySteps
from twinphase.simulate.estimated import decode_seconds
from twinphase.simulate.spec import WorkerSpec
from twinphase.speculation.draft_lengths import Acceptance
from twinphase.speculation.proposer import Draft

ANSWER_TOKEN_ID = 7


class GivenAcceptance(Acceptance):
    """Acceptance rates as `choose_lengths` needs them, with one rate for all drafts."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def probability(self, request_id: str, draft: Draft, position: int) -> float:
        return self._rate


class SimulatedExecutor:
    """An executor without a model: each sampling request gets a token and its accepted drafts."""

    def __init__(self, acceptance: float = 0.0, seed: int = 0) -> None:
        self._acceptance = acceptance
        self._random = random.Random(f"drafts/{seed}")

    def execute(self, batch: Batch) -> StepOutput:
        return StepOutput(
            {
                share.request_id: [ANSWER_TOKEN_ID] * (1 + self._accepted(share))
                for share in batch.scheduled
                if share.samples
            }
        )

    def _accepted(self, share: ScheduledRequest) -> int:
        accepted = 0
        while accepted < share.num_drafts and self._random.random() < self._acceptance:
            accepted += 1
        return accepted


@dataclass
class Jump:
    """Consecutive decode steps of a worker that are simulated together until another event.

    Attributes:
        predicted: predicted seconds of each step; step i lasts from `begins[i]` to `ends[i]`.
        draws: measured / predicted factor of each step.
        hides_beginnings: whether the first block of a request is incomplete when the jump begins.
        due: time of the next visible change of the KV cache.
        num_begun, num_committed: number of steps whose time, and whose tokens, are counted.
    """

    steps: SteadySteps
    predicted: list[float]
    draws: list[float]
    begins: list[float]
    ends: list[float]
    hides_beginnings: bool
    due: float = 0.0
    num_begun: int = 0
    num_committed: int = 0

    def __post_init__(self) -> None:
        self._find_due()

    def reach(self, now: float) -> None:
        """Apply the changes of all completed steps to the KV cache."""
        ended = bisect_right(self.ends, now)
        self.steps.reach(ended, ended)
        self._find_due()

    def _find_due(self) -> None:
        step = self.steps.due
        self.due = math.inf if step is None or step >= len(self.ends) else self.ends[step]

    def shorten(self, number: int) -> int:
        """Keep the first `number` steps; return the number of dropped ones."""
        dropped = len(self.ends) - number
        for values in (self.predicted, self.draws, self.begins, self.ends):
            del values[number:]
        return dropped


@dataclass
class SimulatedWorker:
    """A worker and its present step.

    Attributes:
        engine: its engine, with ledgers if they are kept.
        batch: the batch of the present step, kept until the next step begins.
        jump: the jump that begins with that step, if any.
        num_scheduled: number of steps that were not jumped over.
        places: positions of the next step in the noise without and with prefill.
    """

    name: str
    spec: WorkerSpec
    scheduler: Scheduler
    engine: Engine | None
    places: list[int]
    began: float = 0.0
    batch: Batch | None = None
    jump: Jump | None = None
    num_scheduled: int = 0
    usual: Acceptance = field(default_factory=Acceptance)

    def draw(self, has_prefill: bool) -> float:
        """The factor measured / predicted of the next step."""
        noise = self.spec.prefill_noise if has_prefill else self.spec.noise
        if not noise:
            return 1.0
        self.places[has_prefill] += 1
        return noise[self.places[has_prefill] % len(noise)]

    def gap(self, num_requests: int) -> float:
        """Seconds between a step with `num_requests` requests and the next step."""
        return self.spec.between_steps + self.spec.between_steps_per_request * num_requests

    @property
    def prefix_cache(self) -> PrefixCache:
        return self.scheduler.kv_cache.prefix_cache

    @property
    def ledger(self) -> Ledger | None:
        return self.engine.ledger if self.engine is not None else None

    def new_jump(self, batch: Batch, number: int, now: float) -> Jump:
        """A jump of `number` steps that begin now, each with the requests of `batch`."""
        predicted = decode_seconds(self.spec.times, batch, number)
        draws = [self.draw(False) for _ in range(number)]
        gap = self.gap(len(batch.decodes))
        begins = []
        ends = []
        for seconds, draw in zip(predicted, draws, strict=True):
            begins.append(now)
            ends.append(now + seconds * draw)
            now = ends[-1] + gap
        steps = SteadySteps(self.scheduler, number, ANSWER_TOKEN_ID)
        hides = any(one.num_computed_tokens < steps.block_size for one in steps.requests)
        return Jump(steps, predicted, draws, begins, ends, hides)
