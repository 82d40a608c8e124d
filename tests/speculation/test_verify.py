"""Drafts are accepted while they equal the sampled tokens, and not beyond the output's end."""

import numpy as np
import pytest

from twinphase.batch import Batch, Phase, ScheduledRequest
from twinphase.request import SamplingParams
from twinphase.sampling.sampler import ConstraintError, sample_row, token_logprobs
from twinphase.speculation.verify import sample

VOCAB = 40
EOS = [2]


def make_share(drafts=(), output=(5,), constraint=None, **params):
    prompt = [6, 7, 8]
    return ScheduledRequest(
        "r",
        Phase.DECODE,
        [output[-1], *drafts],
        len(prompt) + len(output) - 1,
        [0],
        True,
        SamplingParams(**{"seed": 3, "max_tokens": 30, **params}),
        prompt,
        list(output),
        constraint=constraint,
        num_drafts=len(drafts),
    )


def one_by_one(logits, **options):
    """The tokens and log probabilities when each row is a step of its own."""
    output = [5]
    entries = []
    for row in logits:
        share = make_share((), output, **options)
        token_id = sample_row(row, share, EOS)
        entries.append(token_logprobs(row, token_id, 2))
        output.append(token_id)
        if share.sampling_params.ends_at(token_id, len(output), EOS):
            break
    return output[1:], entries


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"presence_penalty": 1.5, "top_p": 0.7, "min_tokens": 3}]
)
def test_right_drafts_are_accepted_and_the_first_wrong_one_is_replaced(seed, params):
    random = np.random.default_rng(seed)
    logits = (3 * random.standard_normal((6, VOCAB))).astype(np.float32)
    params = {**params, "logprobs": 2}
    tokens, entries = one_by_one(logits, **params)
    for right in range(len(tokens)):
        drafts = tokens[:5]
        if right < len(drafts):
            drafts[right] = (drafts[right] + 1) % VOCAB
        output = sample(logits[: len(drafts) + 1], Batch([make_share(drafts, **params)], []), EOS)
        assert output.token_ids == {"r": tokens[: right + 1]}
        assert output.logprobs == {"r": entries[: right + 1]}
        assert not output.errors


def picks(*tokens):
    logits = np.zeros((len(tokens), VOCAB), np.float32)
    logits[np.arange(len(tokens)), tokens] = 9.0
    return logits


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [10, 2]),
        ({"ignore_eos": True}, [10, 2, 12, 13]),
        ({"ignore_eos": True, "stop_token_ids": [12]}, [10, 2, 12]),
        ({"min_tokens": 1, "stop_token_ids": [10]}, [10]),
        (
            {"min_tokens": 9, "ignore_eos": True, "stop_token_ids": [13]},
            [10],
        ),  # 2 is held back, the draft was wrong
    ],
)
def test_the_window_ends_where_the_output_does(params, expected):
    share = make_share([10, 2, 12], temperature=0.0, **params)
    tokens = sample(picks(10, 2, 12, 13), Batch([share], []), EOS).token_ids["r"]
    assert tokens[: len(expected)] == expected
    assert len(tokens) == len(expected) + (params.get("min_tokens") == 9)


class FailsAfter:
    """A constraint that fails after a number of tokens."""

    def __init__(self, count):
        self.count = count

    def restrict(self, logits, output_token_ids):
        if len(output_token_ids) >= self.count:
            raise ConstraintError("no further")
        return logits


@pytest.mark.parametrize(("count", "tokens"), [(3, [10, 11]), (2, [10]), (1, None)])
def test_what_fails_behind_accepted_tokens_fails_in_the_next_step(count, tokens):
    share = make_share([10, 11], constraint=FailsAfter(count), temperature=0.0, logprobs=0)
    output = sample(picks(10, 11, 12), Batch([share], []), EOS)
    if tokens is None:
        assert output.errors == {"r": "no further"} and not output.token_ids
    else:
        assert output.token_ids == {"r": tokens} and not output.errors
        assert len(output.logprobs["r"]) == len(tokens)


def test_rows_must_be_those_of_the_batch():
    with pytest.raises(ValueError, match="4 rows"):
        sample(picks(1, 2, 3, 4), Batch([make_share([1])], []), EOS)
