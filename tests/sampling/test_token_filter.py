"""bad_words and allowed_token_ids: vLLM's rule, on top of a form, and what drafts of them pass."""

import numpy as np
import pytest

from twinphase.errors import InvalidRequestError
from twinphase.request import SamplingParams
from twinphase.sampling.sampler import ConstraintError
from twinphase.sampling.token_filter import TokenFilter, filtered

IDS = {
    "cat": [1, 2],
    " cat": [3, 2],
    "a": [4],
    " a": [4],
    "dog": [5],
    " dog": [6, 7],
}  # as a vocabulary might have it
LOGITS = np.arange(10, dtype=np.float32)


class Even:
    """A form that allows even tokens, of which it forces 8 behind 6."""

    def restrict(self, logits, output):
        return np.where(np.arange(len(logits)) % 2, np.float32(-np.inf), logits)

    def forced(self, output, limit):
        return [8, 2, 4][:limit]

    def admits(self, output, draft):
        return next((n for n, token_id in enumerate(draft) if token_id % 2), len(draft))


def allowed(constraint, output):
    before = LOGITS.copy()
    found = constraint.restrict(LOGITS, output)
    assert np.array_equal(LOGITS, before)
    left = np.flatnonzero(found > -np.inf)
    assert np.array_equal(found[left], LOGITS[left])
    return set(left.tolist())


def test_the_last_token_of_a_bad_word_is_forbidden_behind_the_others():
    words = filtered(None, SamplingParams(bad_words=["cat", " a", "dog"]), IDS.__getitem__)
    everything = set(range(10))
    assert allowed(words, []) == allowed(words, [2, 1, 0]) == everything - {4, 5}
    assert (
        allowed(words, [9, 1]) == allowed(words, [3]) == everything - {2, 4, 5}
    )  # at a beginning, and behind a space
    assert allowed(words, [6]) == everything - {
        4,
        5,
    }  # vLLM takes a spaced spelling only where it is as long
    assert (
        words.restrict(LOGITS, []) is not LOGITS
        and TokenFilter(None, None, [[8, 9]]).restrict(LOGITS, []) is LOGITS
    )


def test_only_what_the_form_and_the_list_both_allow_is_left():
    both = filtered(
        Even(), SamplingParams(allowed_token_ids=[2, 3, 8, 9], bad_words=["cat"]), IDS.__getitem__
    )
    assert allowed(both, []) == {2, 8} and allowed(both, [1]) == {8}
    assert both.forced([], 9) == [8, 2] and both.forced([1], 1) == [8]
    assert (
        both.admits([], [2, 8, 4]) == 2
        and both.admits([1], [2]) == 0
        and both.admits([], [8, 1, 2]) == 1
    )
    alone = TokenFilter(None, [1, 2], [[1, 2]])
    assert alone.forced([], 9) == [] and alone.admits([], [1, 1, 2]) == 2
    assert filtered(Even(), SamplingParams(), IDS.__getitem__).__class__ is Even


def test_a_request_to_which_nothing_is_left_fails_by_name():
    with pytest.raises(
        ConstraintError, match="after 1 tokens: bad_words and allowed_token_ids leave none"
    ):
        TokenFilter(Even(), [3, 2], [[1, 2]]).restrict(LOGITS, [1])


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [""]},
        {"bad_words": [" \n"]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
    ],
)
def test_what_no_request_can_mean_is_refused(fields):
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        SamplingParams(**fields)
