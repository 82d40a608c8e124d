"""Percentiles, medians and their intervals."""

import math
import statistics

import pytest

from twinphase.phases.statistics import has_percentile, median_interval, percentile
from twinphase_bench.sweep.plan import Place
from twinphase_bench.sweep.run import Visit
from twinphase_bench.targets.target import PhaseSample


@pytest.mark.parametrize("values", [[3.0], [1.0, 3.0], [5.0, 1.0, 3.0], [4.0, 1.0, 2.0, 9.0]])
def test_the_median_is_the_same_everywhere(values):
    assert percentile(values, 50) == statistics.median(values)


def test_tails_are_values_that_occurred():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, q) for q in (90, 95, 99)] == [90.0, 95.0, 99.0]
    assert percentile([1.0, 3.0], 90) == 3.0
    assert math.isnan(percentile([], 50)) and math.isnan(percentile([], 99))


def test_two_prefills_in_a_row_count_as_their_mean():
    """The lower median would favour prompts that are measured an even number of times."""
    samples = (PhaseSample(100, (0.03,)), PhaseSample(100, (0.05,)))
    one = Visit(Place("prefill", 100), 0, 0.0, samples, None, disturbed=False, kept=True)
    assert one.seconds == pytest.approx(0.04)


def test_interval_of_five_goes_from_the_lowest_to_the_highest():
    found = median_interval([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.high, found.confidence) == (1.0, 5.0, 0.9375)


def test_percentiles_that_a_sample_can_have():
    assert [n for n in (1, 3, 10, 11, 99, 100, 101) if has_percentile(n, 90)] == [
        10,
        11,
        99,
        100,
        101,
    ]
    assert [n for n in (3, 99, 100, 101) if has_percentile(n, 99)] == [100, 101]
