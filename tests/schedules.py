"""A scheduler or engine without a model: the test chooses tokens and step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from twinphase.batch import Batch, ScheduledRequest, StepOutput, StepWork
from twinphase.config import EngineConfig
from twinphase.engine.engine import Engine
from twinphase.engine.recorder import StepRecorder
from twinphase.phases.cost import FEATURES, CostModel
from twinphase.phases.work import ModelShape
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.pace import Pace
from twinphase.scheduler.scheduler import Scheduler

EOS = 2
SHAPE = ModelShape(1000, 500, 2000, 700, 2, 4, 2, 8)
# Seconds of a step, and of a row; nothing else costs anything.
PRICES = [
    1.0 if name == "step" else 0.1 if name in ("few_rows", "many_rows") else 0.0
    for name in FEATURES
]


@dataclass
class Times:
    """Given step times: a time per row, and a time per step."""

    row: float = 1.0
    step: float = 0.0
    window: int | None = None

    def seconds(self, work: StepWork) -> float:
        return self.step + self.row * work.rows

    def step_limit(self, slo_seconds: float) -> float:
        return slo_seconds


def make_scheduler(
    num_blocks=64, times=None, pace=Pace(), policy="fcfs", usual_output=0.0, **config
) -> Scheduler:
    """A scheduler that expects short answers; otherwise blocks would hardly ever run out."""
    config = {"block_size": 4, "max_model_len": 100, "itl_slo_ms": None, **config}
    settings = EngineConfig(num_kv_blocks=num_blocks, scheduling_policy=policy, **config)
    scheduler = Scheduler(settings, times or Times(), eos_token_ids=[EOS])
    scheduler.pace = pace
    scheduler.usual_output = usual_output
    return scheduler


def make_request(request_id: str, prompt: int | Sequence[int], priority=0, **params) -> Request:
    """A request with a prompt of its own, unless its tokens are given."""
    if isinstance(prompt, int):
        first = 10 + 1000 * sum(map(ord, request_id))
        prompt = range(first, first + prompt)
    return Request(request_id, list(prompt), SamplingParams(**params), priority=priority)


def run_step(scheduler: Scheduler, token_id=7) -> tuple[Batch, list[Request]]:
    """Schedule and commit a step in which every sampling request gets `token_id`."""
    batch = scheduler.schedule()
    output = StepOutput(
        {share.request_id: [token_id] for share in batch.scheduled if share.samples}
    )
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


class Machine:
    """An executor whose clock only it advances: token 7 for each request, or an error."""

    def __init__(self, seconds: Callable[[StepWork], float] | None = None) -> None:
        self.now = 100.0
        self.struck = set()
        self.seconds = seconds or CostModel(PRICES).seconds

    def execute(self, batch: Batch) -> StepOutput:
        if self.struck & set(ids(batch.scheduled)):
            raise RuntimeError("struck\nby the test")
        self.now += self.seconds(batch.work)
        return StepOutput(
            {share.request_id: sevens(share) for share in batch.scheduled if share.samples}
        )


def sevens(share: ScheduledRequest) -> list[int]:
    """Token 7 once, and for each leading draft that is 7."""
    drafts = share.token_ids[len(share.token_ids) - share.num_drafts :]
    return [7] * (1 + len(list(takewhile((7).__eq__, drafts))))


def machine_engine(machine: Machine, prices=PRICES, **settings) -> Engine:
    """An engine on a simulated machine; without noise the cost model is exact at once."""
    model = CostModel(prices)
    scheduler = make_scheduler(times=model, **settings)
    recorder = StepRecorder(SHAPE, model, clock=lambda: machine.now)
    recorder.cpu_wait = lambda: 0.0
    return Engine(scheduler, machine, recorder, shape=SHAPE, vocab_size=100)


def engine_request(request_id: str, prompt: int | Sequence[int], **options) -> Request:
    """A request of a machine's vocabulary, with a prompt of its own unless its tokens are given."""
    if isinstance(prompt, int):
        number = sum(ord(c) << 8 * i for i, c in enumerate(request_id))
        prompt = [10 + (number >> i % 16 * 2 & 63) for i in range(prompt)]
    request = make_request(request_id, prompt, **{"temperature": 0.0, **options})
    request.arrival_time = 100.0
    return request
