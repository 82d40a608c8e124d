"""Made-up requests of a step with any parameters, and what the host samples for them.

For tests that compare how a backend samples with the host's `sampling/sampler.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput
from twinphase.request import SamplingParams
from twinphase.sampling.sampler import ConstraintError
from twinphase.speculation.verify import sample

EOS = (2, 5)


class ThirdAllowed:
    """A `Constraint` that allows a changing third of the vocabulary, and may fail after a while."""

    def __init__(self, fails: int = 99, spent: bool = False) -> None:
        self.fails = fails
        self.spent = spent

    def restrict(self, logits: Any, output: Any) -> Any:
        if len(output) >= self.fails:
            raise ConstraintError("no more")
        if self.spent:
            # A spent thinking budget forces one token, even one that other edits forbid.
            return np.where(np.arange(len(logits)) == EOS[0], np.float32(0), np.float32(-np.inf))
        allowed = np.random.default_rng(sum(output)).random(len(logits)) < 1 / 3
        return np.where(allowed, logits, np.float32(-np.inf))


def shares_of(rng: np.random.Generator, logits: Any) -> list[ScheduledRequest]:
    """Requests with any parameters and mostly right drafts; their rows are those of `logits`."""
    shares: list[ScheduledRequest] = []
    vocab = logits.shape[1]
    row = 0
    while row < len(logits):
        output = rng.integers(0, vocab, rng.integers(1, 9)).tolist()
        prompt = rng.integers(0, vocab, 7).tolist()
        scored = rng.random() < 0.15 and len(logits) - row >= 7
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 1e-6, 0.3, 1.0, 2.5])),
            seed=int(rng.integers(1 << 40)),
            top_k=int(rng.choice([0, -1, 1, 7, 5000])),
            top_p=float(rng.choice([1.0, 0.9, 0.3, 1e-4])),
            min_p=float(rng.choice([0.0, 0.0, 0.05, 1.0])),
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
            presence_penalty=float(rng.choice([0, 1.5])),
            frequency_penalty=float(rng.choice([0, -0.7])),
            logit_bias={int(i): float(rng.normal()) for i in rng.integers(0, vocab, 4)}
            if rng.random() < 0.3
            else None,
            min_tokens=int(rng.choice([0, 6])),
            stop_token_ids=[9] if rng.random() < 0.3 else None,
            max_tokens=50,
            logprobs=int(rng.integers(0, 6)) if rng.random() < 0.5 else None,
            prompt_logprobs=int(rng.integers(0, 4)) if scored else None,
            thinking_token_budget=3,
        )
        constraint = rng.choice(
            [None, ThirdAllowed(), ThirdAllowed(fails=8), ThirdAllowed(spent=True)],
            p=[0.6, 0.2, 0.1, 0.1],
        )
        name = str(row)
        if scored:
            one = ScheduledRequest(
                name, Phase.PREFILL, prompt, 0, [0], True, params, prompt, [], constraint=constraint
            )
        else:
            at = len(prompt) + len(output) - 1
            one = ScheduledRequest(
                name,
                Phase.DECODE,
                output[-1:],
                at,
                [0],
                True,
                params,
                prompt,
                output,
                constraint=constraint,
            )
            for _ in range(min(int(rng.integers(0, 4)), len(logits) - row - 1)):
                tokens = host([one], logits[row : row + one.num_logits]).token_ids.get(name)
                if tokens is None or len(tokens) <= one.num_drafts or rng.random() < 0.2:
                    tokens = [*one.token_ids[1:], int(rng.integers(0, vocab + 5))]
                one = replace(one, token_ids=[output[-1], *tokens], num_drafts=len(tokens))
        shares.append(one)
        row += one.num_logits
    return shares


def host(shares: list[ScheduledRequest], logits: Any) -> StepOutput:
    return sample(logits, Batch(shares, []), EOS)


def same_output(found: StepOutput, expected: StepOutput) -> None:
    """Tokens are equal, and log probabilities up to rounding."""
    assert found.token_ids == expected.token_ids and found.errors == expected.errors
    same_logprobs(found.logprobs, expected.logprobs)
    assert found.prompt_logprobs.keys() == expected.prompt_logprobs.keys()
    for name, (start, entries) in expected.prompt_logprobs.items():
        assert found.prompt_logprobs[name][0] == start
        same_logprobs({name: found.prompt_logprobs[name][1]}, {name: entries})


def same_logprobs(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, entries in expected.items():
        for one, other in zip(found[name], entries, strict=True):
            assert one.token_id == other.token_id
            values = [(entry.logprob, *(value for _, value in entry.top)) for entry in (one, other)]
            np.testing.assert_allclose(*values, rtol=1e-6, atol=1e-6)
            if np.isfinite(other.logprob):
                assert (one.rank, [i for i, _ in one.top]) == (
                    other.rank,
                    [i for i, _ in other.top],
                )
