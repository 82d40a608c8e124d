"""A scheduler without a model: requests of made-up tokens, steps whose tokens the test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.batch import Batch, StepOutput, StepWork
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.scheduler import Scheduler

EOS = 2


@dataclass
class Times:
    """Step times by hand: so much a row, and so much a step."""

    row: float = 1.0
    step: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return self.step + self.row * work.rows

    def step_limit(self, slo_seconds: float) -> float:
        return slo_seconds


def make_scheduler(num_blocks=64, block_size=4, max_model_len=100, times=None, caching=True, **settings) -> Scheduler:
    manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
    times = times or Times()
    return Scheduler(manager, max_model_len=max_model_len, eos_token_ids=[EOS], times=times, **settings)


def make_request(request_id: str, prompt: int | Sequence[int], priority=0, **params) -> Request:
    """A request with a prompt of its own, unless its tokens are given."""
    if isinstance(prompt, int):
        first = 10 + 1000 * sum(map(ord, request_id))
        prompt = range(first, first + prompt)
    return Request(request_id, list(prompt), SamplingParams(**params), priority=priority)


def run_step(scheduler: Scheduler, token_id=7) -> tuple[Batch, list[Request]]:
    """Schedule and commit a step in which every sampling request gets `token_id`."""
    batch = scheduler.schedule()
    output = StepOutput({share.request_id: [token_id] for share in batch.scheduled if share.samples})
    finished = scheduler.commit(batch, output)
    scheduler.check_integrity()
    return batch, finished


def run_all(scheduler: Scheduler, token_id=7) -> list[Batch]:
    """Steps until nothing is left to do; fails where a step does nothing."""
    batches = []
    while scheduler.has_work:
        batches.append(run_step(scheduler, token_id)[0])
        assert batches[-1].num_tokens > 0
    return batches


def chunks(batch: Batch) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each prefill chunk."""
    return [(s.request_id, s.num_computed_tokens, s.num_scheduled_tokens) for s in batch.prefills]


def ids(shares) -> list[str]:
    return [share.request_id for share in shares]
