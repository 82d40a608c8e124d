"""Facts about one request, from the engine that served it or from a saved file.

Explanations and diagnoses use only these facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from twinphase.backends.base import Units
from twinphase.batch import StepWork
from twinphase.config import EngineConfig
from twinphase.explain.waterfall import until_first_token
from twinphase.phases.cost import CostError, CostModel
from twinphase.phases.hardware import Ceilings, Efficiency, efficiency
from twinphase.phases.timeline import (
    Interval,
    IntervalKind,
    PhaseTotals,
    RequestTimeline,
    StepTotals,
)
from twinphase.phases.work import ModelShape
from twinphase.request import RequestCounts

# Threshold for a fraction of a phase's steps, or of the rows of its steps.
FEW = 0.1


@dataclass(frozen=True)
class Machine:
    """The engine and machine that served the request; None is unknown.

    Attributes:
        kv_token_bytes: bytes per token of the KV cache, for each `kv_cache_dtype` that the backend
            accepts.
        slo_seconds: longest allowed gap between tokens of a running request; None without an SLO.
    """

    config: EngineConfig
    shape: ModelShape
    cost_model: CostModel  # The engine's present cost model.
    ceilings: Ceilings | None = None
    units: Units | None = None
    cores: int | None = None  # Number of processors that the backend may use.
    best_isa: str | None = None  # The path that would be chosen if none were forced.
    # A path that computes this model's long prompts faster, and lone answers more slowly.
    prompt_isa: str | None = None
    block_multiple: int = 1  # The backend's block sizes are multiples of this.
    kv_token_bytes: Mapping[str, int] = field(default_factory=dict)
    slo_seconds: float | None = None


@dataclass(frozen=True)
class Evidence:
    """A request, its timeline and its machine.

    Attributes:
        machine: None for a saved ledger, for which nothing is predicted.
        before: seconds before its arrival by name, such as loading the model.
        known: efficiency by phase, if the ledger has it; otherwise it is computed.
        detailed: whether the timeline has intervals in order, not only sums.
        names: whether ids of other requests may be shown, because they are the caller's.
    """

    request: RequestCounts
    timeline: RequestTimeline
    machine: Machine | None = None
    before: Mapping[str, float] = field(default_factory=dict)
    known: Mapping[str, Efficiency] = field(default_factory=dict)
    detailed: bool = True
    names: bool = False

    @cached_property
    def first(self) -> dict[IntervalKind, float]:
        """Seconds by kind up to the first output token."""
        return until_first_token(self.timeline)

    @cached_property
    def later(self) -> dict[IntervalKind, float]:
        """Seconds by kind after the first output token."""
        totals = self.timeline.totals()
        return {kind: max(0.0, totals[kind.value] - self.first[kind]) for kind in IntervalKind}

    def spent(self, phase: str) -> dict[IntervalKind, float]:
        """Seconds by kind: up to the first output token for "prefill", after it for "decode"."""
        return self.first if phase == "prefill" else self.later

    @property
    def num_prompt(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_computed(self) -> int:
        return self.num_prompt - self.request.num_cached_tokens

    @property
    def num_known(self) -> int:
        """Computed prompt tokens that had been cached, by hash; the last is always computed."""
        miss = self.request.prefix_miss
        return min(miss.num_known, max(0, self.num_computed - 1)) if miss is not None else 0

    @property
    def known_part(self) -> float:
        return self.num_known / self.num_computed if self.num_known else 0.0

    @property
    def mean_context(self) -> float:
        """Mean number of tokens before a decode step."""
        return self.num_prompt + self.request.num_output_tokens / 2

    @property
    def together(self) -> int:
        """Mean number of requests decoding in a step, including this one."""
        decode = self.timeline.decode
        return max(1, round(decode.decodes / max(1, decode.steps)))

    def intervals(self, kind: IntervalKind) -> list[Interval]:
        return [interval for interval in self.timeline.intervals if interval.kind is kind]

    @property
    def grammar_seconds(self) -> float:
        """Seconds of grammar compilation before the first output token."""
        cut = self.timeline.arrival + sum(self.first.values())
        queues = (
            queue for queue in self.intervals(IntervalKind.QUEUE) if queue.reason == "grammar"
        )
        return sum(max(0.0, min(queue.end, cut) - queue.start) for queue in queues)

    @property
    def config(self) -> EngineConfig | None:
        return self.machine.config if self.machine else None

    @property
    def model_error(self) -> CostError | None:
        return self.machine.cost_model.error() if self.machine else None

    @property
    def cores(self) -> int:
        """The machine's processors per rank of the engine; 0 if unknown."""
        machine = self.machine
        return (
            machine.cores // machine.config.tensor_parallel_size if machine and machine.cores else 0
        )

    @property
    def idle_part(self) -> float:
        """Fraction of the processors that have no thread of the engine."""
        threads = self.config.threads if self.config else None
        return max(0.0, 1 - threads / self.cores) if threads and self.cores else 0.0

    def smaller_kv_cache(self) -> tuple[str, float] | None:
        """The backend's smallest KV cache type, and its bytes relative to the current type.

        None if no type is smaller, or if the machine is unknown.
        """
        sizes = self.machine.kv_token_bytes if self.machine else {}
        now = sizes.get(self.machine.config.kv_cache_dtype) if self.machine else None
        smallest = min(sizes, key=lambda name: sizes[name], default="")
        return (smallest, sizes[smallest] / now) if now and sizes[smallest] < now else None

    def prefill_alone(self, num_tokens: int | None = None) -> float | None:
        """Predicted time to prefill `num_tokens` after the cached ones, in the engine's chunks.

        The default is all computed tokens. None without a cost model or without tokens.
        """
        count = self.num_computed if num_tokens is None else num_tokens
        if self.machine is None or count <= 0:
            return None
        total = 0.0
        chunk = self.machine.config.max_num_batched_tokens
        cached = self.request.num_cached_tokens
        for start in range(0, count, chunk):
            size = min(chunk, count - start)
            work = StepWork.of_chunk(
                cached + start, size, start + size == count, self.machine.shape.window
            )
            total += self.machine.cost_model.seconds(work)
        return total

    def decode_step(self, count: int, context: float | None = None) -> float | None:
        """Predicted time of a step that decodes `count` requests; by default at its own context."""
        if self.machine is None:
            return None
        each = self.request.num_tokens if context is None else context
        return self.machine.cost_model.seconds(
            StepWork.of_decodes(count, each, self.machine.shape.window)
        )

    def efficiency(self, phase: str) -> Efficiency:
        """Efficiency of "prefill" or "decode", over steps with requests in that phase only.

        Prefill steps may include a few decodes. With too few such steps the efficiency is unknown,
        because a step's work cannot be divided among its requests.
        """
        if phase in self.known:
            return self.known[phase]
        whole: PhaseTotals = getattr(self.timeline, phase)
        totals: StepTotals = whole.unmixed
        machine = self.machine
        if phase == "prefill" and whole.decodes <= FEW * whole.tokens:
            totals = whole
        if (
            not totals.steps
            or totals.steps < FEW * whole.steps
            or machine is None
            or machine.units is None
        ):
            return Efficiency("unknown")
        part = totals.seconds / whole.seconds if whole.seconds else 0.0
        return efficiency(
            machine.units.flops(totals.linear_flops, totals.attention_flops),
            totals.bytes,
            totals.bytes / totals.steps,
            totals.seconds,
            machine.ceilings,
            cpu_wait=whole.cpu_wait * part,
            rank_wait=whole.rank_wait * part,
            outside=whole.outside * part,
        )
