import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from twinphase.request import SamplingParams
from twinphase.sampling.logit_edits import edited, logit_edits
from twinphase.sampling.logit_filters import candidates, log_normalizer, threshold

INF = np.inf


def row(*values):
    return np.array(values, np.float32)


def edit(logits, params, prompt, output, eos=()):
    return edited(logits, logit_edits(params, prompt, output, eos))


def test_without_edits_logits_are_not_copied():
    logits = row(1, 2, 3)
    assert edit(logits, SamplingParams(), [0], [1], [2]) is logits


@pytest.mark.parametrize(
    ("params", "logits", "prompt", "output", "expected"),
    [
        # Repetition divides positive logits, multiplies negative ones, over prompt and output.
        ({"repetition_penalty": 2.0}, (2, -2, 3, 4, 0), [0, 0, 1], [3], (1, -4, 3, 2, 0)),
        # Presence and frequency count the output only.
        (
            {"presence_penalty": 0.5, "frequency_penalty": 0.25},
            (2, 2, 2),
            [2, 2],
            [0, 0, 0, 1],
            (0.75, 1.25, 2),
        ),
        # Repetition comes first.
        (
            {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            (8, 8),
            [],
            [0, 0],
            (2, 8),
        ),
    ],
)
def test_penalties(params, logits, prompt, output, expected):
    out = edit(row(*logits), SamplingParams(**params), prompt, output)
    assert_array_equal(out, row(*expected))


def test_bias_is_added_and_min_tokens_exclude_every_end():
    params = SamplingParams(logit_bias={1: 5.0, 0: -1.0}, min_tokens=2, stop_token_ids=[3])
    logits = row(1, 1, 1, 1)
    assert_array_equal(edit(logits, params, [0], [0], [2]), row(0, 6, -INF, -INF))
    assert_array_equal(edit(logits, params, [0], [0, 0], [2]), row(0, 6, 1, 1))
    assert_array_equal(logits, row(1, 1, 1, 1))


def kept(logits, **params):
    ids, weights = candidates(np.asarray(logits, np.float32), SamplingParams(**params))
    assert ids is None or len(ids) == len(weights)
    return list(range(len(weights))) if ids is None else ids.tolist()


PROBABILITIES = np.log([0.05, 0.4, 0.1, 0.3, 0.15])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.1}, [1]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.72}, [1, 3, 4]),
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        # top-p works on what top-k left, renormalized: 0.4 of 0.7 is 0.57
        ({"top_k": 2, "top_p": 0.55}, [1]),
        ({"top_k": 4, "min_p": 0.3, "top_p": 0.9}, [1, 3, 4]),
        ({"temperature": 0.5, "top_p": 0.6}, [1, 3]),  # 0.16 of 0.285 is 0.56
        ({"temperature": 0.5, "top_p": 0.55}, [1]),
    ],
)
def test_which_tokens_are_left(params, expected):
    assert kept(PROBABILITIES, **params) == expected


def test_ties_at_the_border_stay():
    assert kept([1, 3, 2, 2, 2], top_k=2) == [1, 2, 3, 4]
    assert kept([2] * 1000, top_p=0.1) == list(range(1000))


def test_masked_tokens_are_never_left():
    assert kept([1, -INF, 2, -INF], top_k=2) == [0, 2]
    assert kept([1, -INF, 2, -INF], top_p=0.999) == [0, 2]


def sorted_threshold(nats, weights, mass):
    order = np.argsort(-nats, kind="stable")
    total = np.cumsum(weights[order], dtype=np.float64)
    return nats[order[min(np.searchsorted(total, mass), len(order) - 1)]]


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 5, 500, 5000]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 4.0, 50.0]),
    fraction=st.floats(0.01, 0.99),
)
def test_the_threshold_is_that_of_a_full_sort(seed, size, spread, fraction):
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(
        spread
    )
    nats = values - values.max()
    count = max(1, int(fraction * size))
    assert threshold(nats, None, count) == np.sort(nats)[size - count]
    weights = np.exp(nats)
    mass = fraction * float(weights.sum(dtype=np.float64))
    found = np.float32(threshold(nats, weights, mass))
    # Equal to the sort's up to the rounding of the sums: the mass above is short of, and with it
    # reaches, the target.
    assert weights[nats > found].sum(dtype=np.float64) <= mass * (1 + 1e-5)
    assert weights[nats >= found].sum(dtype=np.float64) >= mass * (1 - 1e-5)


def test_log_normalizer():
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 5
    assert_allclose(
        log_normalizer(logits), np.log(np.exp(logits.astype(np.float64)).sum()), rtol=1e-6
    )
    assert_allclose(log_normalizer(row(1000, 1000)), 1000 + np.log(2))
    assert_allclose(log_normalizer(row(0, -INF)), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.7},
    ],
)
def test_transformers_agrees(params):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = np.random.default_rng(1).standard_normal(200).astype(np.float32) * 3
    prompt = [3, 5, 5, 100]
    name, value = next(iter(params.items()))
    makers = {
        "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
        "temperature": transformers.TemperatureLogitsWarper,
    }
    scores = makers[name](value)(torch.tensor([prompt]), torch.tensor(logits)[None])
    expected = torch.softmax(scores, -1)[0].numpy()
    given_params = SamplingParams(**params)
    ids, weights = candidates(edit(logits, given_params, prompt, []), given_params)
    actual = np.zeros(200)
    actual[slice(None) if ids is None else ids] = weights / weights.sum()
    assert_allclose(actual, expected, atol=1e-6)
