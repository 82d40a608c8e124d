from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from twinphase.batch import Batch, Phase, ScheduledRequest
from twinphase.request import SamplingParams
from twinphase.sampling.sampler import NonFiniteLogitsError, draw, sample_row, token_logprobs
from twinphase.speculation.verify import sample

INF = np.inf
NAN = np.nan


def make_share(request_id="r", position=4, samples=True, output=(), **params):
    return ScheduledRequest(
        request_id,
        Phase.DECODE,
        [1],
        position,
        [0],
        samples,
        SamplingParams(**params),
        [5, 6],
        list(output),
    )


def row(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_greedy_takes_the_largest_and_of_ties_the_lowest_id(temperature):
    assert sample_row(row(1, 3, 3, 2), make_share(temperature=temperature), ()) == 1


def test_greedy_sees_bias_and_penalties():
    assert sample_row(row(1, 3, 2), make_share(temperature=0.0, logit_bias={0: 9.0}), ()) == 0
    assert (
        sample_row(row(1, 3, 2), make_share(temperature=0.0, output=[1], presence_penalty=2.0), ())
        == 2
    )
    assert sample_row(row(1, 3, 2), make_share(temperature=0.0, min_tokens=1), [1]) == 2


class OnlyAfter:
    """Allows only token `len(output)`, and records its inputs."""

    def restrict(self, logits, output_token_ids):
        self.given = logits
        restricted = np.full_like(logits, -INF)
        restricted[len(output_token_ids)] = logits[len(output_token_ids)]
        return restricted


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}])
def test_a_constraint_has_the_last_word(params):
    share = replace(
        make_share(output=[4], logit_bias={0: 50.0}, logprobs=0, **params), constraint=OnlyAfter()
    )
    output = sample(row(1, 2, 3)[None], Batch([share], []), ())
    assert output.token_ids == {"r": [1]}
    assert share.constraint.given.tolist() == [51, 2, 3]
    assert output.logprobs["r"] == [token_logprobs(row(1, 2, 3), 1, 0)]


@pytest.mark.parametrize("bad", [(NAN, 1, 2), (1, NAN, 2), (1, INF, 2), (-INF, -INF, -INF)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(bad, temperature):
    with pytest.raises(NonFiniteLogitsError, match="not finite"):
        sample_row(row(*bad), make_share(temperature=temperature, seed=0), ())


def test_they_fail_their_own_request_only():
    shares = [
        make_share("a", temperature=0.0),
        make_share("b", samples=False),
        make_share("c", temperature=0.0),
    ]
    output = sample(np.stack([row(NAN, 1), row(1, 2)]), Batch(shares, []), ())
    assert output.token_ids == {"c": [1]}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.9},
    ],
)
def test_draws_follow_the_distribution(params):
    num = 4_000
    logits = np.random.default_rng(3).standard_normal(40).astype(np.float32) * 2
    params = SamplingParams(seed=11, **params)
    expected = np.exp(logits.astype(np.float64) / params.temperature)
    best_first = np.argsort(-expected)
    if params.min_p:
        expected[expected < params.min_p * expected.max()] = 0
    if params.top_k:
        expected[best_first[params.top_k :]] = 0
    expected /= expected.sum()
    if params.top_p < 1:
        before = np.cumsum(expected[best_first]) - expected[best_first]
        expected[best_first[before >= params.top_p]] = 0
        expected /= expected.sum()
    counts = np.bincount([draw(logits, params, position) for position in range(num)], minlength=40)
    assert counts[expected == 0].sum() == 0
    likely = expected * num > 10
    chi_squared = np.sum((counts - num * expected)[likely] ** 2 / (num * expected)[likely])
    degrees = likely.sum() - 1
    assert chi_squared < degrees + 4 * np.sqrt(2 * degrees) + 10


def test_draws_reach_every_block_of_a_large_vocabulary():
    weights = np.full(1000, -INF, np.float32)
    weights[[0, 255, 256, 999]] = 0
    drawn = [draw(weights, SamplingParams(seed=1), position) for position in range(2000)]
    ids, counts = np.unique(drawn, return_counts=True)
    assert ids.tolist() == [0, 255, 256, 999]
    assert_allclose(counts, 500, atol=100)


def test_a_token_depends_on_seed_and_position_not_on_the_batch():
    logits = np.random.default_rng(0).standard_normal((3, 500)).astype(np.float32)
    shares = [make_share(str(i), position=i, seed=i) for i in range(3)]
    together = sample(logits, Batch(shares[:1], shares[1:]), ()).token_ids
    for i in (2, 0, 1):
        assert sample(logits[i : i + 1], Batch([], [shares[i]]), ()).token_ids == {
            str(i): together[str(i)]
        }


def test_a_draw_needs_a_seed():
    with pytest.raises(ValueError, match="seed"):
        sample_row(row(1, 2), make_share(), ())


def test_logprobs_are_those_of_the_raw_logits():
    logits = row(1, 3, 3, 2)
    share = make_share(temperature=0.0, logprobs=2, logit_bias={3: 50.0})
    output = sample(logits[None], Batch([share], []), ())
    (entry,) = output.logprobs["r"]
    expected = logits - np.log(np.exp(logits).sum())
    assert (entry.token_id, entry.rank) == (3, 3)
    assert_allclose(entry.logprob, expected[3], rtol=1e-6)
    assert [token_id for token_id, _ in entry.top] == [1, 2]
    assert_allclose([logprob for _, logprob in entry.top], expected[[1, 2]], rtol=1e-6)


def test_more_logprobs_than_finite_logits():
    entry = token_logprobs(row(1, -INF, 2), 2, 3)
    assert entry.top[2] == (1, -INF)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_the_most_likely_are_those_of_a_sort(num_top):
    logits = np.random.default_rng(5).standard_normal(20_000).astype(np.float32)
    entry = token_logprobs(logits, 7, num_top)
    assert [token_id for token_id, _ in entry.top] == np.argsort(-logits, kind="stable")[
        :num_top
    ].tolist()
    assert entry.rank == np.count_nonzero(logits >= logits[7])
