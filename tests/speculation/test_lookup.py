"""Drafts from text: the longest match, found as a plain search finds it; never another tenant's."""

import random

import pytest

from twinphase.request import Request, SamplingParams
from twinphase.speculation.lookup import NgramProposer, PredictionProposer, SuffixProposer
from twinphase.speculation.token_index import LONGEST_MATCH, MAX_PLACES, TokenIndex


def make_request(name, prompt, output=(), prediction=(), **options):
    request = Request(
        name,
        list(prompt),
        SamplingParams(max_tokens=99),
        0.0,
        output_token_ids=list(output),
        **options,
    )
    request.prediction_token_ids = list(prediction)
    return request


def search(text, context):
    """The last of the longest matches, by looking everywhere."""
    best = (0, 0)
    for at in range(1, len(text)):
        length = 0
        while (
            length < min(at, len(context), LONGEST_MATCH)
            and text[at - 1 - length] == context[-1 - length]
        ):
            length += 1
        if length >= 2 and length >= best[1]:
            best = (at, length)
    return best


@pytest.mark.parametrize("letters", [2, 3, 30])
def test_the_longest_match_is_found(letters):
    choose = random.Random(letters)
    found = better = 0
    for _ in range(200):
        text = [choose.randrange(letters) for _ in range(choose.randint(1, 60))]
        context = (
            text[-choose.randint(1, 10) :]
            if choose.random() < 0.5
            else [choose.randrange(letters)] * 3
        )
        index = TokenIndex()
        while text[len(index) :]:
            index.extend(text[len(index) : len(index) + choose.randint(1, 9)])
        at, match = index.find(context)
        expected = search(text, context)
        # Only the last places of a run are looked at; of short matches, only the last one.
        common = (
            expected[1] >= 4
            and sum(text[i - 4 : i] == context[-4:] for i in range(4, len(text))) > MAX_PLACES
        )
        if match:
            assert text[at - match : at] == context[-match:]
            assert at < len(text)
        if expected[1] >= 4 and not common or expected[1] < 2:
            assert (at, match) == expected
            found += 1
        better += expected[1] > match
    assert found > 50
    assert better < 40


def test_ngram_needs_as_many_tokens_as_it_is_told():
    request = make_request("a", [1, 2, 3, 4, 5, 6, 2, 3])
    assert NgramProposer(2).propose(request, 3)[0].token_ids == [4, 5, 6]
    assert NgramProposer(3).propose(request, 3) == []
    long = make_request("b", [1, 2, 3, 4, 5, 6, 2, 3, 4])
    assert NgramProposer(3, 3).propose(long, 9)[0].match == 3
    assert NgramProposer(3, 3).propose(long, 0) == []


def test_ngram_keeps_up_with_the_output():
    request = make_request("a", [1, 2, 3, 4])
    proposer = NgramProposer(2)
    assert proposer.propose(request, 4) == []
    request.output_token_ids += [9, 8, 1, 2]
    assert proposer.propose(request, 9)[0].token_ids == [3, 4, 9, 8, 1, 2]
    request.output_token_ids += [3, 4, 9]
    assert proposer.propose(request, 2)[0].token_ids == [8, 1]


def test_a_long_prompt_is_indexed_over_several_steps():
    prompt = [*range(100, 5000), *range(100, 140)]
    request = make_request("a", prompt)
    proposer = NgramProposer(2)
    drafts = [proposer.propose(request, 2) for _ in range(4)]
    assert [draft[0].token_ids for draft in drafts if draft][-1] == [140, 141]
    assert not drafts[0] or drafts[0][0].match <= LONGEST_MATCH


@pytest.mark.parametrize(
    ("other", "shared"),
    [({}, True), ({"cache_salt": "x"}, False), ({"tenant": "x"}, False)],
)
def test_answers_are_drafts_for_the_same_tenant_and_salt_only(other, shared):
    proposer = SuffixProposer()
    first = make_request("a", [1, 2, 3], range(20, 40))
    proposer.propose(first, 4)
    proposer.forget(first)
    second = make_request("b", [7, 1, 2, 3], [20, 21, 22], **other)
    drafts = proposer.propose(second, 3)
    assert [draft.token_ids for draft in drafts] == ([[23, 24, 25]] if shared else [])


def test_shelves_are_bounded(monkeypatch):
    monkeypatch.setattr("twinphase.speculation.lookup.MAX_SHELF_TOKENS", 100)
    monkeypatch.setattr("twinphase.speculation.lookup.MAX_SHELVES", 3)
    proposer = SuffixProposer()
    for number in range(40):
        proposer.forget(
            make_request("a", [1, 2], range(number, number + 30), cache_salt=f"{number % 5}")
        )
    assert len(proposer._shelves) == 3
    assert all(len(shelf) <= 100 + 40 for shelf in proposer._shelves.values())


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_as_many_answers_are_kept_as_vllm_would_be_told(most):
    proposer = SuffixProposer(most_answers=most)
    for number in range(20):
        proposer.forget(make_request("a", [9001, 9002], range(100 * number, 100 * number + 20)))
    found = [
        bool(proposer.propose(make_request("b", [7], [100 * n, 100 * n + 1, 100 * n + 2]), 3))
        for n in range(20)
    ]
    assert found[19] == (most > 0)
    assert max(1, most // 2) * (most > 0) <= sum(found) <= most


def test_a_draft_is_as_long_as_its_match_allows():
    request = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    assert SuffixProposer().propose(request, 6)[0].token_ids == [4, 5, 6, 7, 8, 9]
    assert SuffixProposer(most_per_match=1.5).propose(request, 6)[0].token_ids == [4, 5, 6, 7]


def test_a_prediction_is_followed_from_its_beginning_and_found_again_after_a_difference():
    proposer = PredictionProposer()
    text = list(range(10, 40))
    request = make_request("a", [1], [], text)
    assert proposer.propose(request, 3)[0].token_ids == [10, 11, 12]
    request.output_token_ids += [10, 11, 99]
    assert proposer.propose(request, 3) == []
    request.output_token_ids += [13, 14]
    assert proposer.propose(request, 3)[0].token_ids == [15, 16, 17]
    request.output_token_ids += text[5:]
    assert proposer.propose(request, 3) == []
    assert PredictionProposer().propose(make_request("b", [1]), 3) == []
