import random

import numpy as np
import pytest

from twinphase.batch import Batch, StepOutput
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.engine.engine import Engine
from twinphase.errors import CacheFullError, ContextLengthError, InvalidRequestError
from twinphase.phases.work import ModelShape, rows_cost
from twinphase.phases.timeline import IntervalKind
from twinphase.request import FinishReason, Request, SamplingParams
from twinphase.scheduler.scheduler import Scheduler

SHAPE = ModelShape(1000, 500, 2000, 700, 2, 4, 2, 8)


class FakeExecutor:
    """Token 7 for everyone; fails when told to. Each step takes a second."""

    def __init__(self):
        self.now = 100.0
        self.error = None
        self.unsampled = set()

    def execute(self, batch: Batch) -> StepOutput:
        self.now += 1.0
        if self.error is not None:
            raise self.error
        names = [s.request_id for s in batch.scheduled if s.samples and s.request_id not in self.unsampled]
        return StepOutput({name: [7] for name in names})


@pytest.fixture
def executor():
    return FakeExecutor()


@pytest.fixture
def engine(executor):
    scheduler = Scheduler(KVCacheManager(16, 4), max_model_len=50, eos_token_ids=[2], max_num_batched_tokens=8)
    return Engine(scheduler, executor, shape=SHAPE, vocab_size=100, clock=lambda: executor.now)


def make_request(request_id="a", prompt=(1, 2, 3), **params):
    return Request(request_id, list(prompt), SamplingParams(**{"temperature": 0.0, **params}), arrival_time=100.0)


def test_a_request_lives_and_its_time_adds_up(engine):
    request = make_request(prompt=range(10), max_tokens=3)
    timeline = engine.add_request(request)
    results = []
    while engine.has_work:
        results.append(engine.step())
    assert request.output_token_ids == [7, 7, 7]
    assert [(r.record.prefill_tokens, r.record.decode_tokens) for r in results] == [(8, 0), (2, 0), (0, 1), (0, 1)]
    assert results[-1].finished == [request]
    assert timeline.totals() == {**timeline.totals(), "prefill": 2.0, "decode": 2.0, "unattributed": 0.0}
    assert timeline.end - timeline.arrival == 4.0
    assert (timeline.prefill.tokens, timeline.decode.tokens) == (10, 2)
    assert timeline.prefill.flops == rows_cost(SHAPE, 0, 10, 1).flops
    assert timeline.decode.flops == sum(rows_cost(SHAPE, start, 1, 1).flops for start in (10, 11))
    assert timeline.decode.bytes == sum(2700 + rows_cost(SHAPE, start, 1, 1).bytes for start in (10, 11))
    assert engine.timelines == {}


def test_bytes_of_a_shared_step_add_up(engine):
    timelines = [engine.add_request(make_request(name, max_tokens=4)) for name in "ab"]
    engine.step()
    record = engine.step().record
    assert record.decode.bytes == sum(timeline.decode.bytes for timeline in timelines)
    assert record.decode.bytes == 2700 + 2 * rows_cost(SHAPE, 3, 1, 1).bytes


def test_time_of_others_steps_is_queue(engine):
    engine.scheduler.max_num_seqs = 1
    engine.add_request(make_request("a", max_tokens=2))
    waiting = engine.add_request(make_request("b", max_tokens=1))
    engine.step()
    engine.step()
    engine.step()
    assert waiting.seconds(IntervalKind.QUEUE) == 2.0
    assert waiting.seconds(IntervalKind.PREFILL) == 1.0


def test_a_failed_step_changes_nothing(engine, executor):
    request = make_request(max_tokens=2)
    engine.add_request(request)
    executor.error = RuntimeError("device lost")
    with pytest.raises(RuntimeError):
        engine.step()
    assert (request.num_computed_tokens, request.output_token_ids) == (0, [])
    executor.error = None
    engine.step()
    engine.step()
    assert request.finish_reason is FinishReason.LENGTH
    engine.scheduler.check_integrity()


def test_a_request_that_cannot_be_sampled_fails_alone(engine, executor):
    bad, good = make_request("bad"), make_request("good", max_tokens=1)
    engine.add_request(bad)
    engine.add_request(good)
    executor.unsampled = {"bad"}
    engine.step()
    assert (bad.finish_reason, good.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("request_", "error", "match"),
    [
        (make_request(prompt=[]), InvalidRequestError, "empty"),
        (make_request(prompt=[1, 100]), InvalidRequestError, "Token id 100 in prompt .* Use integers from 0 to 99"),
        (make_request(prompt=[-1]), InvalidRequestError, "Token id -1"),
        (make_request(prompt=["a"]), InvalidRequestError, "Token id 'a'"),
        (make_request(stop_token_ids=[100]), InvalidRequestError, "stop_token_ids"),
        (make_request(logit_bias={200: 1.0}), InvalidRequestError, "logit_bias"),
        (make_request(n=2), InvalidRequestError, "n is 2"),
        (make_request(prompt=[1] * 50), ContextLengthError, "has 50 tokens; the context holds 50.* by 1 tokens"),
        (make_request(prompt=[1] * 40, max_tokens=11), ContextLengthError, "together 51.* Lower max_tokens to 10"),
    ],
)
def test_what_is_refused(engine, request_, error, match):
    with pytest.raises(error, match=match):
        engine.add_request(request_)
    assert not engine.has_work
    assert not engine.timelines


def test_a_cache_too_small_is_refused(executor):
    scheduler = Scheduler(KVCacheManager(2, 4), max_model_len=50, eos_token_ids=[])
    engine = Engine(scheduler, executor, shape=SHAPE, vocab_size=100)
    with pytest.raises(CacheFullError):
        engine.add_request(make_request(max_tokens=20))
    assert not engine.timelines


def test_seeds_are_given_to_those_who_need_one(engine):
    names = {"greedy": {}, "own": {"temperature": 1.0, "seed": 5}, "x": {"temperature": 1.0}, "y": {"temperature": 1.0}}
    requests = {name: make_request(name, **params) for name, params in names.items()}
    for request in requests.values():
        engine.add_request(request)
    seeds = {name: request.sampling_params.seed for name, request in requests.items()}
    assert (seeds["greedy"], seeds["own"]) == (None, 5)
    assert seeds["x"] != seeds["y"]
    assert None not in (seeds["x"], seeds["y"])


@pytest.mark.parametrize("seed", range(20))
def test_nothing_leaks_under_random_submission_and_abort(engine, seed):
    choose = random.Random(seed)
    for number in range(60):
        if choose.random() < 0.4:
            length, max_tokens = choose.randint(1, 20), choose.choice([None, 3])
            engine.add_request(make_request(str(number), [1] * length, max_tokens=max_tokens), keep_kv=number % 2 == 0)
        if choose.random() < 0.2:
            engine.abort(str(choose.randrange(60)))
        if engine.has_work:
            engine.step()
        engine.scheduler.check_integrity()
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.timelines == {}


class NanBackend:
    """Logits of one request are NaN."""

    def execute(self, forward, inputs):
        logits = np.zeros((len(inputs.logit_rows), 100), np.float32)
        logits[inputs.token_ids[inputs.logit_rows] == 13] = np.nan
        return logits


def test_nan_logits_fail_their_request(engine):
    from types import SimpleNamespace

    from twinphase.engine.runner import Runner

    engine.executor = Runner(SimpleNamespace(forward=None), NanBackend(), block_size=4, eos_token_ids=())
    bad, good = make_request("bad", [13]), make_request("good", max_tokens=3)
    engine.add_request(bad)
    engine.add_request(good)
    while engine.has_work:
        engine.step()
    assert (bad.finish_reason, good.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
