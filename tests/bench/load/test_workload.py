"""Prompts of the lengths asked for, without shared prefixes."""

import re
from dataclasses import replace

import pytest

from twinphase.errors import InvalidRequestError
from twinphase.workload.distributions import Lengths
from twinphase_bench.load.workload import WORDS, PromptMaker, Sizing, TextMaker, make_workload


def test_the_words_are_words_of_one_kind():
    assert len(set(WORDS)) == len(WORDS) and all(re.fullmatch("[a-z]+", word) for word in WORDS)


def test_no_two_prompts_share_their_first_words():
    text = TextMaker(seed=1)
    starts = [tuple(text.words(40, number).split()[:8]) for number in range(5000)]
    assert len(set(starts)) == 5000
    assert len({start[0] for start in starts[: len(WORDS)]}) == len(WORDS), (
        "the very first word differs"
    )
    assert text.words(40, 7) == TextMaker(seed=1).words(40, 7) != TextMaker(seed=2).words(40, 7)


def test_prompts_have_the_wanted_number_of_words():
    maker = PromptMaker(Sizing(tokens_per_word=1.5, overhead=10))
    assert len(maker.take(160).text.split()) == 100
    assert len(maker.take(1).text.split()) == 1


def test_prompts_of_ids_are_exact_and_share_nothing():
    maker = PromptMaker(Sizing(vocab_size=1000), seed=3)
    prompts = [maker.take(20) for _ in range(500)]
    assert all(len(prompt.token_ids) == 20 and min(prompt.token_ids) >= 256 for prompt in prompts)
    assert max(max(prompt.token_ids) for prompt in prompts) < 1000
    assert len({prompt.token_ids[0] for prompt in prompts}) == 500
    assert max(PromptMaker(Sizing(vocab_size=300)).take(50).token_ids) < 300


def test_lengths_are_drawn_in_their_bounds_and_warm_up_is_apart():
    workload = make_workload(Lengths((10, 20), (3, 5)), 50, Sizing(), seed=2, num_warm_up=4)
    lengths = {(r.prompt.num_tokens, r.max_tokens) for r in workload.requests}
    assert {p for p, _ in lengths} == set(range(10, 21)) and {o for _, o in lengths} == {3, 4, 5}
    assert len(workload.warm_up) == 4
    texts = [r.prompt.text for r in (*workload.requests, *workload.warm_up)]
    assert len(set(texts)) == 54
    assert make_workload(Lengths((10, 20), (3, 5)), 50, Sizing(), seed=2, num_warm_up=4) == workload


@pytest.mark.parametrize("bounds", [((0, 5), (1, 1)), ((5, 4), (1, 1)), ((1, 1), (0, 0))])
def test_lengths_that_make_no_sense(bounds):
    with pytest.raises(InvalidRequestError):
        Lengths(*bounds)


def test_requests_that_do_not_fit_are_told_with_an_option_that_helps():
    workload = make_workload(Lengths((100, 100), (28, 28)), 3, Sizing())
    workload.require_fit(128)
    workload.require_fit(None)
    with pytest.raises(InvalidRequestError, match=r"3 of 3 .* context of 64 .*--random-input-len"):
        workload.require_fit(64)
    scaled = replace(workload, conditions={"--scale-lengths": "0.5"})  # of a trace
    with pytest.raises(InvalidRequestError, match=r"Give --scale-lengths 0\.245"):
        scaled.require_fit(64)
