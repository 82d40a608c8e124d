"""Tokens sampled by the kernel beside those that the host's sampler draws from the same logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from kernel_calls import per_isa

from sampled_shares import EOS, ThirdAllowed, host, same_output, shares_of
from steps import ISAS_OF_LINEAR, USER_CACHE
from twinphase.backends.base import SampledRows, SamplingPlan
from twinphase.backends.cpu.compiler import compile_kernels, load_kernels
from twinphase.backends.cpu.isa import ISAS, choose_isa
from twinphase.backends.cpu.program import Buffer, Program
from twinphase.backends.cpu.sampling import CpuRowSampler, scratch_bytes
from twinphase.backends.cpu.threads import ThreadPool
from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput, TokenLogprobs
from twinphase.request import SamplingParams
from twinphase.sampling.device_rows import DeviceRows
from twinphase.sampling.sampler import token_logprobs
from twinphase.speculation.verify import sample

ROWS = 40
# Not a whole number of groups nor of bytes of a mask, and more than a block or two.
VOCAB = 1003
LARGE = 40_003


@cache
def _kernels(isa: str) -> dict[str, int]:
    """Without the linear layers that `kernel_calls` compiles with them."""
    specs = ["run_program", "sample_rows"]
    compile_kernels(USER_CACHE / "kernels", choose_isa(isa), specs)
    return load_kernels(USER_CACHE / "kernels", choose_isa(isa), specs)


class Sampler:
    """A program whose only command samples the rows of given logits."""

    def __init__(self, isa: str, vocab: int, threads: int) -> None:
        kernels = _kernels(isa)
        width = -(-vocab // 32) * 32
        program = Program(kernels, {"tokens": ROWS, "logits": ROWS})
        self.logits = Buffer(program, "logits", width, outputs=vocab)
        self.pool = ThreadPool(kernels["run_program"], threads, scratch_bytes(width))
        self.rows = CpuRowSampler(program, self.logits, self.pool)
        self.pool.load(program.commands)

    def sample(self, plan: SamplingPlan) -> SampledRows:
        return self.rows.sample(plan)

    def __call__(self, shares: list[ScheduledRequest], logits: Any) -> StepOutput:
        count, vocab = logits.shape
        self.logits.array[:count, :vocab] = logits
        batch = Batch(shares, [])
        output = sample(DeviceRows(self, batch, vocab, EOS), batch, EOS)
        assert np.array_equal(self.logits.array[:count, :vocab], logits, equal_nan=True)
        return output


@pytest.fixture
def make_sampler() -> Iterator[Callable[..., Sampler]]:
    made: list[Sampler] = []

    def make(isa: str, vocab: int = VOCAB, threads: int = 2) -> Sampler:
        made.append(Sampler(isa, vocab, threads))
        return made[-1]

    yield make
    for sampler in made:
        sampler.pool.close()


@per_isa
@pytest.mark.parametrize("vocab", [VOCAB, LARGE])
def test_tokens_are_those_of_the_host(make_sampler, isa, vocab):
    sampler = make_sampler(isa, vocab)
    for seed in range(40 if vocab == VOCAB else 6):
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((ROWS, vocab)).astype(np.float32)
        logits *= np.float32(rng.choice([0.0, 0.5, 3, 9, 60]))
        if seed % 2:
            logits = logits.round()  # ties at every border
        logits[:, rng.integers(9, vocab, 50)] = -np.inf
        shares = shares_of(rng, logits)
        bad = np.array([np.nan, np.inf, -np.inf] * 2, np.float32)
        logits[rng.choice(ROWS, 6, replace=False), rng.integers(0, vocab, 6)] = bad
        same_output(sampler(shares, logits), host(shares, logits))


def one(number: int, **params: Any) -> ScheduledRequest:
    """A request whose next token is at the position `number` + 1."""
    given = SamplingParams(seed=7, **params)
    return ScheduledRequest(str(number), Phase.DECODE, [1], number, [0], True, given, [5, 6], [1])


@per_isa
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.7},
        {"top_p": 0.95},
        {"temperature": 0.6, "top_p": 0.5},
        {"top_k": 40},
        {"top_k": 1},
        {"top_k": 3000, "top_p": 0.9},
        {"top_k": LARGE},
        {"min_p": 0.02},
        {"min_p": 0.01, "top_k": 25, "top_p": 0.9},
    ],
)
def test_draws_from_a_large_vocabulary_are_those_of_the_host(make_sampler, isa, params):
    sampler = make_sampler(isa, LARGE)
    shares = [one(number, **params) for number in range(ROWS)]
    for spread in (0.0, 2.0, 12.0):
        logits = np.random.default_rng(1).standard_normal((ROWS, LARGE)).astype(np.float32)
        logits *= np.float32(spread)
        same_output(sampler(shares, logits), host(shares, logits))


@per_isa
def test_a_row_is_sampled_alike_alone_and_beside_others(make_sampler, isa):
    rng = np.random.default_rng(2)
    logits = (2 * rng.standard_normal((ROWS, LARGE))).astype(np.float32)
    kinds = [{}, {"top_p": 0.9}, {"top_k": 30}, {"temperature": 0.0}]
    shares = [one(number, **kinds[number % 4], logprobs=2) for number in range(ROWS)]
    together = make_sampler(isa, LARGE, 3)(shares, logits)
    alone = make_sampler(isa, LARGE, 1)
    for number, share in enumerate(shares):
        output = alone([share], logits[number : number + 1])
        assert output.token_ids[str(number)] == together.token_ids[str(number)]
        assert output.logprobs[str(number)] == together.logprobs[str(number)]


def top_of(sampler: Sampler, logits: Any, num_top: int) -> TokenLogprobs:
    output = sampler([one(0, temperature=0.0, logprobs=num_top)], logits[None])
    return output.logprobs["0"][0]


@per_isa
def test_the_top_of_more_tokens_than_are_finite(make_sampler, isa):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[5, 900]] = 3
    sampler = make_sampler(isa)
    for num_top in (1, 2, 4, 20):
        assert top_of(sampler, logits, num_top) == token_logprobs(logits, 5, num_top)


@pytest.mark.skipif(
    ISAS_OF_LINEAR[0] == "generic" or ISAS[ISAS_OF_LINEAR[0]].dot == "sdot",
    reason="NumPy calls the C library for exponentials",
)
def test_exponentials_are_those_of_numpy(make_sampler):
    sampler = make_sampler(ISAS_OF_LINEAR[0])
    logits = np.full(VOCAB, -np.inf, np.float32)
    for depth in np.random.default_rng(3).uniform(0, 15, 500).astype(np.float32):
        logits[[3, 700]] = 0, -depth
        # The normalizer is ln(1 + e^-depth), whose float64 holds a float32 this large.
        weight = np.expm1(-top_of(sampler, logits, 0).logprob)
        assert np.float32(weight) == np.exp(-np.full(16, depth))[0]


@per_isa
def test_a_mask_without_other_edits(make_sampler, isa):
    logits = np.random.default_rng(4).standard_normal((1, VOCAB)).astype(np.float32)
    shares = [replace(one(0, temperature=0.0), constraint=ThirdAllowed())]
    same_output(make_sampler(isa)(shares, logits), host(shares, logits))
