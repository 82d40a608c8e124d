"""Fits on made-up timings whose truth is known: what is claimed of an error must come true about as often."""

import numpy as np
import pytest

from twinphase.bench.sweep.fit import DECODE_LAWS, PREFILL_LAW, Point, best_fit, fit

LENGTHS = (10, 22, 48, 105, 230, 500, 1100, 2400, 5200, 8000)
NEW_LENGTHS = (33, 160, 750, 3600)
TRUTH = (0.004, 4e-4, 3e-8)
GRID = [(position, batch) for position in (16, 500, 2000, 4000) for batch in (1, 2, 4, 8)]


def prefill_seconds(n):
    return TRUTH[0] + TRUTH[1] * n + TRUTH[2] * n * n


def repeated(rng, seconds, noise, repetitions=5):
    return tuple(seconds * np.exp(noise * rng.standard_normal(repetitions)))


def prefill_points(rng, noise, lengths=LENGTHS, law=prefill_seconds):
    return [Point((n, 1), repeated(rng, law(n), noise)) for n in lengths]


def coverage(seeds, noise, law, lengths=LENGTHS, new=NEW_LENGTHS):
    """Share of new points, measured anew, inside the interval that the fit claims."""
    inside = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        found = fit(PREFILL_LAW, prefill_points(rng, noise, lengths, law))
        inside += [found.predict((n, 1)).holds(np.median(repeated(rng, law(n), noise))) for n in new]
    return np.mean(inside)


@pytest.mark.parametrize("noise", [0.005, 0.03, 0.1])
def test_claimed_error_comes_true_as_often_as_it_says(noise):
    assert 0.925 <= coverage(300, noise, prefill_seconds) <= 0.98


def test_claimed_error_of_a_term_that_is_not_there():
    assert 0.925 <= coverage(300, 0.03, lambda n: 0.004 + 4e-4 * n) <= 0.985


def test_coefficients_intervals_hold_the_truth():
    held = np.zeros(3)
    for seed in range(300):
        found = fit(PREFILL_LAW, prefill_points(np.random.default_rng(seed), 0.03))
        held += [one.low <= true <= one.high for one, true in zip(found.coefficients, TRUTH, strict=True)]
    assert ((held >= 0.92 * 300) & (held <= 0.985 * 300)).all(), held / 300


def test_exact_timings_give_exact_coefficients():
    found = fit(PREFILL_LAW, [Point((n, 1), (prefill_seconds(n),)) for n in LENGTHS])
    assert found.values == pytest.approx(TRUTH, rel=1e-6)
    assert found.r_squared == pytest.approx(1)
    assert found.line((3000, 1)) == pytest.approx(prefill_seconds(3000))
    assert found.misfit is None  # nothing was repeated
    assert max(map(abs, found.residuals)) < 1e-9


def test_what_no_law_would_claim():
    """Of values that do not depend on anything the law claims no less than their mean does."""
    for seed in range(12):
        flat = fit(PREFILL_LAW, prefill_points(np.random.default_rng(seed), 0.1, law=lambda n: 0.01))
        assert 0.6 < flat.typical_error / flat.lawless_error < 1.3
    steep = fit(PREFILL_LAW, prefill_points(np.random.default_rng(0), 0.1))
    assert steep.lawless_error > 5 * steep.typical_error


def test_a_curve_that_the_formula_cannot_follow_is_told_and_widens_the_claim():
    """Time that is flat for short prompts, as where weights must be read whatever their length: a kink."""
    rng = np.random.default_rng(1)

    def kinked(n):
        return max(0.02, 4e-4 * n)

    found = fit(PREFILL_LAW, prefill_points(rng, 0.005, law=kinked))
    assert found.bends_otherwise
    assert found.scale > 5 * found.repetition_noise
    assert found.typical_error > 0.05  # repetitions alone would have claimed 1 %
    assert coverage(100, 0.005, kinked) >= 0.85


def test_a_fitting_formula_is_not_accused():
    accused = [
        fit(PREFILL_LAW, prefill_points(np.random.default_rng(seed), 0.03)).bends_otherwise for seed in range(200)
    ]
    assert np.mean(accused) < 0.08  # one in a hundred, and the noise of a median is known only about


def test_negative_terms_are_at_their_bound_and_say_what_they_would_be():
    """Prompts that get cheaper a token as they get longer: a negative square, which no machine has for ever."""
    rng = np.random.default_rng(0)
    found = fit(PREFILL_LAW, prefill_points(rng, 0.002, law=lambda n: 0.004 + 4e-4 * n - 1.5e-8 * n * n))
    square = found.coefficients[2]
    assert square.value == 0
    assert square.free == pytest.approx(-1.5e-8, rel=0.2)
    assert found.line((20000, 1)) > 0


def decode_points(rng, law, noise=0.02, grid=GRID):
    return [Point(at, repeated(rng, law(*at), noise)) for at in grid]


@pytest.mark.parametrize(
    ("law", "terms"),
    [
        (lambda p, b: 5e-3 + 1e-6 * p + 0 * b, {"a", "b"}),
        (lambda p, b: 5e-3 + 1e-3 * b + 0 * p, {"a", "c"}),
        (lambda p, b: 5e-3 + 1e-3 * b + 1e-6 * p, {"a", "b", "c"}),
        (lambda p, b: 5e-3 + 1e-3 * b + 1e-6 * p * b, {"a", "c", "d"}),
    ],
)
def test_decode_law_is_chosen_by_the_data(law, terms):
    rng = np.random.default_rng(3)
    found = best_fit(DECODE_LAWS, decode_points(rng, law))
    assert terms <= {one.name for one in found.coefficients if one.value > 0}
    predicted = [found.predict(at) for at in ((1000, 3), (3000, 6), (100, 5))]
    assert all(p.holds(law(*at)) for p, at in zip(predicted, ((1000, 3), (3000, 6), (100, 5)), strict=True))
    assert found.typical_error < 0.08


def test_decode_claims_come_true():
    inside = []
    for seed in range(60):
        rng = np.random.default_rng(seed)

        def law(p, b):
            return 5e-3 + 1e-3 * b + 4e-7 * p * b

        found = best_fit(DECODE_LAWS, decode_points(rng, law, 0.03))
        new = ((1000, 3), (3000, 6), (250, 1))
        inside += [found.predict(at).holds(np.median(repeated(rng, law(*at), 0.03))) for at in new]
    assert 0.89 <= np.mean(inside) <= 0.99


def test_one_batch_size_cannot_tell_of_batches():
    points = decode_points(np.random.default_rng(0), lambda p, b: 5e-3 + 1e-6 * p, grid=[(p, 1) for p in LENGTHS])
    assert best_fit(DECODE_LAWS, points).law.names == ("a", "b")


@pytest.mark.parametrize("count", [0, 3, 4])
def test_too_few_points_give_no_fit(count):
    assert fit(PREFILL_LAW, prefill_points(np.random.default_rng(0), 0.03, LENGTHS[:count])) is None


def test_what_lies_outside_the_fitted_points_is_extrapolated():
    grid = [(p, b) for p, b in GRID if b == 1 or p <= 500]
    found = best_fit(DECODE_LAWS, decode_points(np.random.default_rng(0), lambda p, b: 5e-3 + 1e-3 * b, grid=grid))
    outside = {
        at: found.predict(at).extrapolated for at in ((3000, 1), (300, 6), (2000, 2), (5000, 1), (100, 16), (1, 1))
    }
    assert [at for at, is_outside in outside.items() if is_outside] == [(2000, 2), (5000, 1), (100, 16), (1, 1)]
    assert found.range_text.startswith("from 16 to 4,000 tokens at batch 1, 16 to 500 tokens at batch 2")
