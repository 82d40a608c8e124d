"""Fits to made-up timings whose truth is known."""

import numpy as np
import pytest

from twinphase.bench.sweep.fit import SweepPoint, fit_decode, fit_prefill

LENGTHS = (10, 22, 48, 105, 230, 500, 1100, 2400, 5200, 8000)
GRID = [(position, batch) for position in (16, 500, 2000, 4000) for batch in (1, 2, 4, 8)]


def prefill_seconds(n):
    return 0.004 + 4e-4 * n + 3e-8 * n * n


def decode_seconds(position, batch):
    return 5e-3 + 1e-3 * batch + 4e-7 * position * batch


def measured(seconds, noise=0.0, seed=0, repetitions=5):
    rng = np.random.default_rng(seed)
    return tuple(seconds * np.exp(noise * rng.standard_normal(repetitions)))


def prefill_points(law=prefill_seconds, noise=0.0, lengths=LENGTHS):
    return [SweepPoint((n, 1), measured(law(n), noise, seed)) for seed, n in enumerate(lengths)]


def decode_points(law=decode_seconds, noise=0.0, grid=GRID):
    return [SweepPoint(at, measured(law(*at), noise, seed)) for seed, at in enumerate(grid)]


def test_exact_timings_give_exact_coefficients():
    prefill, decode = fit_prefill(prefill_points()), fit_decode(decode_points())
    assert prefill.coefficients == pytest.approx((0.004, 4e-4, 3e-8), rel=1e-6)
    assert decode.coefficients == pytest.approx((5e-3, 1e-3, 4e-7), rel=1e-6)
    assert prefill.seconds((3000, 1)) == pytest.approx(prefill_seconds(3000))
    assert decode.seconds((1000, 3)) == pytest.approx(decode_seconds(1000, 3))
    assert max(map(abs, prefill.residuals + decode.residuals)) < 1e-9


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_new_points_are_predicted_within_the_noise(noise):
    prefill, decode = fit_prefill(prefill_points(noise=noise)), fit_decode(decode_points(noise=noise))
    for n in (33, 160, 750, 3600):
        assert prefill.seconds((n, 1)) == pytest.approx(prefill_seconds(n), rel=2 * noise)
    for at in ((1000, 3), (3000, 6), (100, 5)):
        assert decode.seconds(at) == pytest.approx(decode_seconds(*at), rel=2 * noise)
    assert 0.2 * noise < prefill.spread < 1.5 * noise


def test_a_short_prompt_weighs_as_much_as_a_long_one():
    """The error is relative: a long prompt that is off by a third does not bend the law at short ones."""
    points = prefill_points()
    points[-1] = SweepPoint(points[-1].x, (points[-1].median * 4 / 3,))
    assert fit_prefill(points).seconds((48, 1)) == pytest.approx(prefill_seconds(48), rel=0.05)


def test_coefficients_are_not_negative():
    """Prompts whose tokens get cheaper the longer they are: a negative square, which no machine has for ever."""
    found = fit_prefill(prefill_points(lambda n: 0.004 + 4e-4 * n - 1.5e-8 * n * n))
    assert found.coefficients[2] == 0 and found.seconds((20000, 1)) > 0


def test_a_curve_that_the_formula_cannot_follow_leaves_residuals():
    """Time that is flat for short prompts, as where weights must be read whatever their length: a kink."""
    assert fit_prefill(prefill_points(lambda n: max(0.02, 4e-4 * n), 0.005)).spread > 0.05


def test_one_batch_size_cannot_tell_of_batches():
    found = fit_decode(decode_points(lambda p, b: 5e-3 + 1e-6 * p, grid=[(p, 1) for p in LENGTHS]))
    assert found.law.formula == "t = a + b position" and found.coefficients == pytest.approx((5e-3, 1e-6))


@pytest.mark.parametrize("count", [0, 3, 4])
def test_too_few_points_give_no_fit(count):
    assert fit_prefill(prefill_points(lengths=LENGTHS[:count])) is None


def test_points_that_cannot_tell_terms_apart_give_no_fit():
    assert fit_prefill(prefill_points(lengths=(100,) * 6)) is None


def test_a_law_is_printed_with_its_numbers_and_its_range():
    assert str(fit_prefill(prefill_points())) == "4 + 0.4 n + 3e-05 n^2 ms"
    found = fit_decode(decode_points(grid=[(p, b) for p, b in GRID if b == 1 or p <= 500]))
    assert found.range_text.startswith("from 16 to 4,000 tokens at batch 1, 16 to 500 tokens at batch 2")
