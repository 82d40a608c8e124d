"""Tokens drawn on the device beside those that the host's sampler draws from the same logits."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sampled_shares import EOS, host, same_output, shares_of
from twinphase.backends.torch.sampling import sample as sample_on_device
from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput
from twinphase.request import SamplingParams
from twinphase.sampling.device_rows import DeviceRows
from twinphase.speculation.verify import sample

# not a whole number of bytes of a mask
VOCAB = 1003


class DeviceSampler:
    """The torch backend's, for given logits."""

    def __init__(self, logits: Any) -> None:
        self.logits = torch.from_numpy(logits)

    def sample(self, plan: Any) -> Any:
        return sample_on_device(self.logits, plan)


def device(shares: list[ScheduledRequest], logits: Any) -> StepOutput:
    batch = Batch(shares, [])
    return sample(DeviceRows(DeviceSampler(logits), batch, logits.shape[1], EOS), batch, EOS)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_those_of_the_host(seed):
    rng = np.random.default_rng(seed)
    logits = (rng.choice([0.5, 3, 9]) * rng.standard_normal((40, VOCAB))).astype(np.float32)
    if seed % 2:
        logits = logits.round()  # ties at every border
    shares = shares_of(rng, logits)
    for row, bad in zip(
        rng.choice(len(logits), 6, replace=False), 2 * (np.nan, np.inf, -np.inf), strict=True
    ):
        logits[row, rng.integers(VOCAB)] = bad
    before = logits.copy()
    found = device(shares, logits)
    expected = host(shares, logits)
    assert np.array_equal(before, logits, equal_nan=True)
    same_output(found, expected)


def test_a_step_of_greedy_requests_sends_no_edits_up():
    logits = np.random.default_rng(0).standard_normal((1, VOCAB)).astype(np.float32)
    share = ScheduledRequest(
        "r", Phase.DECODE, [7], 4, [0], True, SamplingParams(temperature=0.0), [5], [7]
    )
    sampler = Mock(wraps=DeviceSampler(logits))
    batch = Batch([share], [])
    assert (
        sample(DeviceRows(sampler, batch, VOCAB, EOS), batch, EOS).token_ids
        == host([share], logits).token_ids
    )
    plan = sampler.sample.call_args.args[0]
    assert (
        not any(array.size for pair in (*plan.edits, plan.masks) for array in pair)
        and plan.num_top == 0
    )
