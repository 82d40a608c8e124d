"""Prices of tokens: divides the price of the workers' time among the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinphase.batch import StepWork
from twinphase.scheduler.chunk import StepCost
from twinphase.simulate.run import Simulated
from twinphase.simulate.spec import FleetSpec

MILLION = 1e6


@dataclass(frozen=True)
class TokenPrices:
    """Prices of a load, in the unit of the given prices.

    A worker's price, idle time included, is divided between the phases in proportion to its busy
    time. Within prefill, a cached token is charged for the attention of later tokens to it; within
    decode, a token is charged for its predicted share of the steps at its position.

    Attributes:
        total: price of the whole load.
        prefill, decode: the parts of `total`.
        input, cached, thinking, answer: prices per million tokens; None for kinds without tokens.
        request: price of the mean request.
    """

    total: float
    prefill: float
    decode: float
    input: float | None
    cached: float | None
    thinking: float | None
    answer: float | None
    request: float

    @property
    def rows(self) -> dict[str, float | None]:
        return {
            "input": self.input,
            "cached": self.cached,
            "thinking": self.thinking,
            "answer": self.answer,
        }


def token_prices(done: Simulated, spec: FleetSpec, per_hour: Mapping[str, float]) -> TokenPrices:
    """Prices of the tokens of a load.

    Args:
        done: the simulated load.
        spec: the fleet that ran it.
        per_hour: price of one worker of each role, per hour.
    """
    prefill = 0.0
    decode = 0.0
    for pool in done.pools:
        price = per_hour[pool.role] * pool.workers * done.seconds / 3600
        busy = pool.prefill + pool.decode
        share = pool.prefill / busy if busy else 0.5
        prefill += price * share
        decode += price * (1 - share)
    times = spec.workers[0].times
    new_weight = 0.0
    cached_weight = 0.0
    thinking_weight = 0.0
    answer_weight = 0.0
    for one in done.outcomes:
        new = one.num_prompt - one.num_cached
        alone = times.seconds(StepWork.of_chunk(0, new, True, times.window))
        whole = times.seconds(StepWork.of_chunk(one.num_cached, new, True, times.window))
        new_weight += alone
        cached_weight += max(0.0, whole - alone)
        thinking = min(one.num_reasoning, one.num_outputs)
        answer = one.num_outputs - thinking
        thinking_weight += thinking * _token_seconds(times, one.num_prompt + thinking / 2)
        answer_weight += answer * _token_seconds(times, one.num_prompt + thinking + answer / 2)
    counts = _counts(done)
    by_kind = {
        "input": prefill * new_weight / max(1e-12, new_weight + cached_weight),
        "cached": prefill * cached_weight / max(1e-12, new_weight + cached_weight),
        "thinking": decode * thinking_weight / max(1e-12, thinking_weight + answer_weight),
        "answer": decode * answer_weight / max(1e-12, thinking_weight + answer_weight),
    }
    per_million = {
        kind: by_kind[kind] / counts[kind] * MILLION if counts[kind] else None for kind in by_kind
    }
    total = prefill + decode
    return TokenPrices(
        total, prefill, decode, **per_million, request=total / max(1, len(done.outcomes))
    )


def _token_seconds(times: StepCost, context: float) -> float:
    return times.seconds(StepWork.of_decodes(1, context, times.window))


def _counts(done: Simulated) -> dict[str, int]:
    outcomes = done.outcomes
    thinking = sum(min(one.num_reasoning, one.num_outputs) for one in outcomes)
    cached = sum(one.num_cached for one in outcomes)
    return {
        "input": sum(one.num_prompt for one in outcomes) - cached,
        "cached": cached,
        "thinking": thinking,
        "answer": sum(one.num_outputs for one in outcomes) - thinking,
    }
