import random

import pytest

from twinphase.batch import Batch, Phase, StepWork
from twinphase.batch import ScheduledRequest as Share
from twinphase.phases.cost import FEATURES, CostError, CostModel, features, starting_prices
from twinphase.phases.hardware import Ceilings
from twinphase.phases.work import ModelShape
from twinphase.request import SamplingParams
from twinphase.speculation.draft_lengths import drafted_row

SHAPE = ModelShape(10**8, 3 * 10**7, 6 * 10**7, 3 * 10**7, 30, 9, 3, 64)
# A machine that is not what the model starts from: seconds for one of each feature.
TRUE = (2.5e-3, 1e-4, 3e-4, 1.3e-4, 2e-7, 1e-6, 3e-5, 3e-7, 2e-4)


def true_seconds(work):
    return sum(price * count for price, count in zip(TRUE, features(work), strict=True))


def decodes(count, context):
    return StepWork(count, 0, count * context, count, count)


def chunk(start, count, samples=False):
    return StepWork.of_chunk(start, count, samples)


def random_step(choose):
    work = StepWork()
    if choose.random() < 0.8:
        work = work.plus(decodes(choose.randint(1, 32), choose.randint(10, 2000)))
    if choose.random() < 0.5 or not work.rows:
        work = work.plus(
            chunk(choose.randint(0, 3000), choose.randint(16, 512), choose.random() < 0.3)
        )
    return work


def observe(model, steps, seed=0, noise=0.05):
    choose = random.Random(seed)
    for _ in range(steps):
        work = random_step(choose)
        model.observe(work, true_seconds(work) * choose.uniform(1 - noise, 1 + noise))
    return model


def fresh(ceilings=None):
    return CostModel(starting_prices(SHAPE, ceilings))


def off(model, work):
    return abs(model.seconds(work) / true_seconds(work) - 1)


MIXES = [
    decodes(1, 100),
    decodes(16, 500),
    decodes(64, 300),
    chunk(0, 512),
    chunk(3500, 512, True),
    decodes(8, 1000).plus(chunk(2000, 256)),
]


def test_features_are_the_counts_that_prices_multiply():
    assert dict(zip(FEATURES, features(decodes(3, 10).plus(chunk(4, 20, True))), strict=True)) == {
        "step": 1.0,
        "few_rows": 8,
        "many_rows": 15,
        "logits": 4,
        "prefill_contexts": 4 * 20 + 210,
        "decode_contexts": 30,
        "sequences": 4,
        "draft_contexts": 0,
        "several_rows": 1,
    }


def test_drafted_rows_do_not_read_the_cache_again():
    share = Share("a", Phase.DECODE, [5, 6, 7], 10, [0], True, SamplingParams(), num_drafts=2)
    work = Batch([share], []).work
    found = dict(zip(FEATURES, features(work), strict=True))
    assert (found["decode_contexts"], found["draft_contexts"]) == (11, 12 + 13)
    assert (found["few_rows"], found["logits"], found["sequences"]) == (3, 3, 1)
    plain = StepWork.of_decodes(1, 11)
    drafted = plain.plus(drafted_row(12, None)).plus(drafted_row(13, None))
    assert features(drafted) == features(work)
    assert 0 < fresh().seconds(work) - fresh().seconds(plain) < 2 * fresh().seconds(plain)


@pytest.mark.parametrize("work", MIXES)
def test_what_steps_take_is_learned_through_noise(work):
    model = observe(fresh(), 400)
    assert off(model, work) < min(0.06, off(fresh(), work))


def test_few_steps_do_already():
    model = fresh()
    for context in range(100, 140):
        model.observe(decodes(4, context), true_seconds(decodes(4, context)))
    assert off(model, decodes(4, 150)) < 0.05


def test_a_change_of_the_machine_is_followed():
    model = observe(fresh(), 300)
    choose = random.Random(3)
    for _ in range(600):
        work = random_step(choose)
        model.observe(work, 1.4 * true_seconds(work))
    for work in MIXES[1:]:  # a lone decode hardly came by: its class remembers the old machine
        assert 1.2 * true_seconds(work) < model.seconds(work) < 1.5 * true_seconds(work)


def test_thousands_of_decodes_do_not_make_it_forget_prefill():
    model = observe(fresh(), 300)
    choose = random.Random(1)
    for step in range(4000):
        work = decodes(8, 200 + step % 1000)
        model.observe(work, true_seconds(work) * choose.uniform(0.95, 1.05))
    assert all(off(model, work) < 0.1 for work in MIXES)


def test_a_stall_of_the_machine_counts_little():
    model = observe(fresh(), 300)
    before = model.seconds(decodes(8, 500))
    model.observe(decodes(8, 500), 100 * before)
    for _ in range(8):
        model.observe(decodes(8, 500), before)
    assert model.seconds(decodes(8, 500)) < 2 * before


def test_prices_never_become_negative_and_more_work_never_takes_less():
    model = fresh()
    choose = random.Random(2)
    for _ in range(300):
        model.observe(random_step(choose), choose.uniform(1e-5, 1.0))  # nothing to learn here
        assert min(model.prices) >= 0.0
    for work in MIXES:
        assert (
            model.seconds(work)
            <= model.seconds(work.plus(chunk(0, 1)))
            <= model.seconds(work.plus(chunk(0, 9)))
        )


def test_the_same_steps_give_the_same_prices_to_the_last_bit():
    assert (
        observe(fresh(), 200).prices
        == observe(fresh(), 200).prices
        != observe(fresh(), 200, seed=1).prices
    )


def test_nothing_is_learned_from_nothing():
    model = fresh()
    model.observe(StepWork(), 1.0)
    model.observe(decodes(1, 1), 0.0)
    assert (model.prices, model.error()) == (fresh().prices, CostError(0, None, None))


class TestError:
    def test_it_is_of_predictions_made_before_their_step(self):
        model = CostModel(TRUE)
        for ratio in (1.0, 1.25, 2.0):
            work = decodes(4, 100)
            model.observe(work, model.seconds(work) * ratio)
        error = model.error()
        assert (error.steps, error.median, error.p95) == (3, pytest.approx(0.2), pytest.approx(0.5))

    def test_it_falls_to_the_noise(self):
        error = observe(fresh(), 1000, noise=0.05).error()
        assert error.steps == 256
        assert error.median < 0.04 and error.p95 < 0.08

    def test_the_slo_keeps_a_margin_for_it(self):
        exact = observe(fresh(), 600, noise=0.0)
        noisy = observe(fresh(), 600, noise=0.3)
        assert exact.step_limit(0.1) == pytest.approx(0.1, rel=0.03)
        assert 0.07 < noisy.step_limit(0.1) < 0.085
        for _ in range(100):
            exact.observe(decodes(4, 100), true_seconds(decodes(4, 100)), gap=0.02)
        assert exact.step_limit(0.1) == pytest.approx(0.08, rel=0.03)
        assert exact.step_limit(0.01) == 0.0


CEILINGS = Ceilings("p", 2, "avx512", ((1 << 20, 1e11), (1 << 30, 3e10)), 9e11, 1.5e11, 4e11)


@pytest.mark.parametrize(("ceilings", "factor"), [(CEILINGS, 3), (None, 10)])
def test_it_starts_within_a_few_times_of_a_real_machine(ceilings, factor):
    for work in MIXES:
        assert 1 / factor < fresh(ceilings).seconds(work) / true_seconds(work) < factor


@pytest.mark.parametrize("factor", [1e-4, 0.03, 0.1, 10, 100])
def test_a_start_that_is_far_off_is_left_behind(factor):
    model = observe(CostModel([factor * price for price in TRUE]), 200)
    assert all(off(model, work) < 0.06 for work in MIXES)


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_a_machine_that_changes_pace_is_followed_whatever_was_seen_before(pace):
    """Many classes of steps were seen at the old pace; after the change only one of them comes."""
    model = observe(fresh(), 2000, seed=2)
    for context in range(100, 1600, 10):
        work = decodes(64, context)
        model.observe(work, pace * true_seconds(work))
    for work in (decodes(64, 1000), decodes(64, 500).plus(chunk(1000, 400))):
        assert model.seconds(work) == pytest.approx(pace * true_seconds(work), rel=0.1)


def test_steps_that_were_over_at_once_outweigh_nothing():
    model = observe(fresh(), 300)
    work = decodes(8, 500).plus(chunk(0, 256))
    before = model.seconds(work)
    for _ in range(10):
        model.observe(chunk(0, 256), 20e-6)
    assert model.seconds(work) > before / 2
