"""Computes the share of a load that one worker can serve, from its step times alone.

A search for a plan begins with this estimate, which ignores queues; the simulation adds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinphase.batch import StepWork
from twinphase.simulate.estimated import EstimatedCost
from twinphase.simulate.spec import WorkerSpec

ARITHMETIC = "prefill's arithmetic"
BANDWIDTH = "decode's bandwidth"


@dataclass(frozen=True)
class LoadShape:
    """Mean values of a load.

    Attributes:
        rate: requests per second.
        prompt, output: tokens per request; `cached` of the prompt's tokens are expected in the
            cache.
        long_prompt: 99th percentile of the prompt lengths, in tokens.
    """

    rate: float
    prompt: float
    output: float
    cached: float = 0.0
    long_prompt: float = 0.0


@dataclass(frozen=True)
class Capacity:
    """Times and limits of one worker under one load.

    Attributes:
        prefill_seconds: prefill time of the mean request.
        decode_seconds: decode time of the mean request, in the largest allowed batch.
        batch: size of that batch; its step takes `step_seconds`, and `limited_by` names the limit.
        long_prompt_seconds: prefill time of a long prompt on an idle worker.
        kv_tokens: number of tokens that the KV cache holds.
        prefill_limits, decode_limits: seconds of a mean chunk and of a step by bottleneck; empty
            for measured step times.
    """

    prefill_seconds: float
    decode_seconds: float
    batch: int
    step_seconds: float
    limited_by: str
    long_prompt_seconds: float
    kv_tokens: int
    prefill_limits: Mapping[str, float] = field(default_factory=dict)
    decode_limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


def capacity_of(
    worker: WorkerSpec,
    load: LoadShape,
    itl: float | None = None,
    *,
    drafts: int = 0,
    acceptance: float = 0.0,
) -> Capacity:
    """Capacity of a worker for a load.

    Args:
        worker: the worker, with its step times.
        load: mean values of the load.
        itl: maximum gap between tokens, seconds.
        drafts: maximum drafted tokens per decode.
        acceptance: probability that a draft is accepted if those before it are.
    """
    times = worker.times
    config = worker.config
    context = round(load.prompt + load.output / 2)
    tokens = (config.num_kv_blocks or 1) * config.block_size
    seats = min(config.max_num_seqs, config.max_num_batched_tokens)
    by_memory = max(1, int(tokens / (load.prompt + load.output)))
    most = min(seats, by_memory)
    limited_by = "seats" if seats <= by_memory else "KV memory"

    def gap(batch: int) -> float:
        work = StepWork.of_decodes(batch, context, times.window)
        fixed = worker.between_steps + worker.between_steps_per_request * batch
        return times.seconds(work) + fixed

    batch = most
    if itl is not None and gap(most) > itl:
        limited_by = "the ITL"
        low = 1
        high = most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if gap(middle) <= itl else (low, middle)
        batch = low

    def chunk(prompt: float, cached: float) -> StepWork:
        return StepWork.of_chunk(round(cached), max(1, round(prompt - cached)), True, times.window)

    def prefill(prompt: float, cached: float) -> float:
        steps = -(-(prompt - cached) // config.max_num_batched_tokens)
        fixed = times.seconds(StepWork()) + worker.between_steps
        return times.seconds(chunk(prompt, cached)) + max(0.0, steps - 1) * fixed

    def per_token(count: int) -> float:
        """Seconds of a step with `count` drafts per request, divided by its new tokens."""
        rows = batch * (1 + count)
        plain = StepWork.of_decodes(batch, context, times.window)
        work = plain._replace(
            rows=rows,
            logits=rows,
            decode_contexts=plain.decode_contexts * (1 + count),
            draft_contexts=plain.decode_contexts * count,
        )
        tokens = batch * sum(acceptance**place for place in range(count + 1))
        fixed = worker.between_steps + worker.between_steps_per_request * batch
        return (times.seconds(work) + fixed) / tokens

    limits = times.limits if isinstance(times, EstimatedCost) else lambda work: {}
    return Capacity(
        prefill_seconds=prefill(load.prompt, load.cached),
        decode_seconds=load.output * min(map(per_token, range(drafts + 1))),
        batch=batch,
        step_seconds=gap(batch),
        limited_by=limited_by,
        long_prompt_seconds=prefill(max(load.long_prompt, load.prompt), 0.0),
        kv_tokens=tokens,
        prefill_limits=limits(chunk(load.prompt, load.cached)),
        decode_limits=limits(StepWork.of_decodes(batch, context, times.window)),
    )
