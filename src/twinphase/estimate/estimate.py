"""The arithmetic of both phases from first principles: work, bytes and the time they take.

Formulas (n prompt tokens, position p, batch B, h hidden size, V vocabulary; the rest as in
`phases/work.py`, which counts FLOP and bytes; here all of the last layer is in P):

    linear FLOP     prefill 2 P n + 2 V h (logits of one position); decode, per step, 2 (P + V h) B
    attention FLOP  4 H d per token that a row attends to, in each layer; a prompt has 4 L H d n (n
    + 1) / 2 linear bytes    the weights, once per step: layers, the experts that B rows reach, the
    head KV bytes        per token 2 L H_kv d b; a prompt writes n of them, a decode step reads
    those of B sequences; a layer
                    with a window reads those within it, and holds all
    time            of the linear layers, and of attention: max(FLOP / (MFU peak), bytes / (MBU
                    bandwidth)); a phase is the sum of both, which run one after the other
    speculation     k drafts make a step of B (k + 1) rows, which reads each sequence's KV once
    experts         E (1 - (1 - k / E)^rows) of E are reached, k per row, if rows choose evenly and
    independently

With efficiencies of 1 this is a bound that nothing beats. Activations, norms, sampling, launches
and networks are left out. What is not known stays None. Not for learned times (`phases/cost.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from twinphase.batch import StepWork
from twinphase.estimate.inputs import Drafting, Hardware, Scenario, weight_bytes
from twinphase.estimate.shapes import DecoderShape
from twinphase.models.size import Size
from twinphase.phases.work import ModelShape, make_shape, step_cost, weight_bytes_read
from twinphase.request import OWN_SLOTS

# A larger break-even batch is reported as "never".
MAX_BATCH = 1 << 24


@dataclass(frozen=True)
class PartEstimate:
    """Work of the linear layers or of attention in a phase, and its time at each known ceiling."""

    flops: float
    bytes: float
    compute_seconds: float | None
    memory_seconds: float | None

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def seconds(self) -> float | None:
        if self.compute_seconds is None or self.memory_seconds is None:
            return None
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> str:
        if self.compute_seconds is None or self.memory_seconds is None:
            return "unknown"
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


@dataclass(frozen=True)
class PhaseEstimate:
    """A prompt's prefill or a decode step: two parts, which run one after the other."""

    linear: PartEstimate
    attention: PartEstimate

    @property
    def flops(self) -> float:
        return self.linear.flops + self.attention.flops

    @property
    def bytes(self) -> float:
        return self.linear.bytes + self.attention.bytes

    @property
    def seconds(self) -> float | None:
        return _sum(self.linear.seconds, self.attention.seconds)

    @property
    def memory_seconds(self) -> float | None:
        """Time by memory alone, a lower bound at any peak."""
        return _sum(self.linear.memory_seconds, self.attention.memory_seconds)

    @property
    def bound(self) -> str:
        if self.linear.seconds is None or self.attention.seconds is None:
            return "unknown"
        return (
            self.linear.bound
            if self.linear.seconds >= self.attention.seconds
            else self.attention.bound
        )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True)
class SpeculationEstimate:
    """The mean decode step with drafts."""

    drafting: Drafting
    step: PhaseEstimate

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, drafting included."""
        return _sum(self.step.seconds, self.drafting.seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """The token rate of one request."""
        return None if self.seconds is None else self.drafting.tokens_per_step / self.seconds


@dataclass(frozen=True)
class Estimate:
    """The results for a model, a machine and a request; None is unknown.

    Attributes:
        kv_token_bytes: KV bytes of one token in all layers.
        prefill: prefill of one prompt; its time is the TTFT in an idle engine.
        decode: mean decode step of the batch over the whole request; `decode_first` and
            `decode_last` are the first and last steps.
        decode_steps: output tokens - 1.
        balance: FLOP per byte at which arithmetic and memory take the same time in the linear
            layers.
        break_even_batch: smallest batch with compute-bound linear layers in decode.
        no_break_even: reason for no such batch, beginning with "unknown" or "never"; else "".
        max_batch: sequences of this length that fit beside the weights; 0 if the weights do not.
        sequence_bytes: bytes of one sequence at its end: KV, including layers with a window, and
            the slots for its recurrent state.
        state_bytes: bytes of one slot; 0 without recurrent layers.
    """

    shape: DecoderShape
    hardware: Hardware
    scenario: Scenario
    weights: Size
    kv_token_bytes: float
    prefill: PhaseEstimate
    decode: PhaseEstimate
    decode_first: PhaseEstimate
    decode_last: PhaseEstimate
    decode_steps: int
    balance: float | None
    break_even_batch: int | None
    no_break_even: str
    max_batch: int | None
    sequence_bytes: float
    state_bytes: int
    speculation: SpeculationEstimate | None = None

    @property
    def decode_seconds(self) -> float | None:
        return None if self.decode.seconds is None else self.decode.seconds * self.decode_steps

    @property
    def prefill_share(self) -> float | None:
        total = _sum(self.prefill.seconds, self.decode_seconds)
        return None if total is None else (self.prefill.seconds or 0.0) / total

    @property
    def prefill_cost(self) -> float | None:
        """Price per million prompt tokens."""
        return self._cost(self.prefill.seconds, self.scenario.prompt_tokens)

    @property
    def decode_cost(self) -> float | None:
        """Price per million output tokens; each step yields one per sequence."""
        return self._cost(self.decode.seconds, self.scenario.batch_size)

    def _cost(self, seconds: float | None, tokens: int) -> float | None:
        price = self.scenario.price_per_hour
        return None if seconds is None or price is None else price / 3600 * seconds / tokens * 1e6


@dataclass(frozen=True)
class _Model:
    """The sizes for the formulas, and the hardware at its assumed efficiency."""

    costs: ModelShape
    hardware: Hardware
    scenario: Scenario

    def linear_bytes(self, rows: int) -> int:
        return weight_bytes_read(self.costs, rows, 1)

    def linear(self, rows: int, logits: int, working_set: float) -> PartEstimate:
        flops = step_cost(self.costs, StepWork(rows=rows, logits=logits)).linear_flops
        return self._part({self.scenario.units.linear: flops}, self.linear_bytes(rows), working_set)

    def attention(self, flops: float, moved: float, working_set: float) -> PartEstimate:
        units = self.scenario.units
        work = {units.scores: flops / 2}
        work[units.values] = work.get(units.values, 0) + flops / 2
        return self._part(work, moved, working_set)

    def _part(self, work: Mapping[str, float], moved: float, working_set: float) -> PartEstimate:
        compute: float | None = 0.0
        for precision, flops in work.items():
            peak = self.hardware.peak(precision)
            compute = _sum(compute, flops / (peak * self.scenario.mfu) if peak else None)
        bandwidth = self.hardware.read_bandwidth(working_set)
        memory = moved / (bandwidth * self.scenario.mbu) if bandwidth else None
        return PartEstimate(sum(work.values()), moved, compute, memory)

    def prefill(self, tokens: int) -> PhaseEstimate:
        cost = step_cost(self.costs, StepWork.of_chunk(0, tokens, True, self.costs.window))
        moved = self.linear_bytes(tokens) + cost.bytes
        linear = self.linear(tokens, 1, moved)
        return PhaseEstimate(linear, self.attention(cost.attention_flops, cost.bytes, moved))

    def decode(self, position: int, steps: int, drafts: int = 0) -> PhaseEstimate:
        """The mean of `steps` steps of the batch from `position` on, with `drafts` per request."""
        # Unlike in a chunk, each row reads its own KV.
        rows = StepWork.of_chunk(position, steps, True, self.costs.window)
        near = rows.windowed_prefill_contexts
        cost = step_cost(
            self.costs, rows._replace(kv_tokens=rows.prefill_contexts, windowed_kv_tokens=near)
        )
        batch = self.scenario.batch_size
        count = batch * (1 + drafts)
        flops = count * cost.attention_flops / steps
        kv = batch * cost.bytes / steps
        moved = self.linear_bytes(count) + kv
        return PhaseEstimate(self.linear(count, count, moved), self.attention(flops, kv, moved))

    def break_even(self) -> tuple[int | None, str]:
        """Smallest batch with compute-bound linear layers in decode; or None and the reason."""
        unit = self.scenario.units.linear
        missing = [] if self.hardware.peak(unit) else [f"peak in {unit}"]
        missing += (
            [] if self.hardware.read_bandwidth(self.linear_bytes(1)) else ["memory bandwidth"]
        )
        if missing:
            return None, f"unknown: no {' and no '.join(missing)} is known"

        def compute_bound(batch: int) -> bool:
            return self.linear(batch, batch, self.linear_bytes(batch)).bound == "compute"

        low = 0
        high = 1
        while not compute_bound(high):
            low = high
            high = high * 2
            if high > MAX_BATCH:
                slower = "reading the weights takes longer than the arithmetic"
                return None, f"never: even with {low:,} requests at once, {slower}"
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if compute_bound(middle) else (middle, high)
        return high, ""


def cost_shape(shape: DecoderShape, dtype: str, kv_head_bytes: float) -> ModelShape:
    """The sizes for the cost formulas, with weights of `dtype` and the KV bytes of a scenario.

    Raises:
        InvalidRequestError: the storage type of the weights is unknown.
    """
    b = shape.blueprint
    parameters = shape.parameters
    nbytes = weight_bytes(shape, dtype)
    if not b.shared_kv_layers:  # The formulas do not cover half of one layer.
        parameters, nbytes = (replace(s, tail=0, tail_experts=0) for s in (parameters, nbytes))
    return make_shape(b, parameters, nbytes, round(b.kv_bytes(lambda dim: kv_head_bytes)))


def estimate(
    shape: DecoderShape, hardware: Hardware, scenario: Scenario, drafting: Drafting | None = None
) -> Estimate:
    """Estimate both phases of one request, and decode with drafts if `drafting` is given.

    Raises:
        InvalidRequestError: the storage type of the weights is unknown.
    """
    weights = weight_bytes(shape, scenario.dtype)
    b = shape.blueprint
    costs = cost_shape(shape, scenario.dtype, scenario.kv_head_bytes)
    kv_token = costs.kv_token_bytes
    model = _Model(costs, hardware, scenario)
    n = scenario.prompt_tokens
    steps = scenario.output_tokens - 1
    peak = hardware.peak(scenario.units.linear)
    bandwidth = hardware.read_bandwidth(model.linear_bytes(1))
    state = b.state_bytes()
    sequence = (n + steps) * kv_token + OWN_SLOTS * state
    break_even, why_not = model.break_even()
    free = None if hardware.capacity is None else hardware.capacity - weights.total
    return Estimate(
        shape=shape,
        hardware=hardware,
        scenario=scenario,
        weights=weights,
        kv_token_bytes=kv_token,
        prefill=model.prefill(n),
        decode=model.decode(n, max(steps, 1)),
        decode_first=model.decode(n, 1),
        decode_last=model.decode(n + max(steps, 1) - 1, 1),
        decode_steps=steps,
        balance=peak / bandwidth if peak and bandwidth else None,
        break_even_batch=break_even,
        no_break_even=why_not,
        max_batch=None if free is None else max(0, int(free // sequence)),
        sequence_bytes=sequence,
        state_bytes=state,
        speculation=SpeculationEstimate(
            drafting, model.decode(n, max(steps, 1), drafting.num_tokens)
        )
        if drafting
        else None,
    )


def warnings(result: Estimate) -> Iterator[str]:
    """Warnings about what does not fit, and about unknown figures."""
    shape = result.shape
    hardware = result.hardware
    scenario = result.scenario
    if hardware.capacity is not None and result.weights.total > hardware.capacity:
        yield (
            f"The weights ({result.weights.total / 1e9:,.1f} GB) do not fit "
            f"{hardware.capacity / 1e9:,.0f} GB: "
            "use more --devices or a smaller --dtype."
        )
    elif result.max_batch is not None and scenario.batch_size > result.max_batch:
        yield (
            f"A batch of {scenario.batch_size:,} does not fit; the largest that fits is "
            f"{result.max_batch:,}."
        )
    length = scenario.prompt_tokens + scenario.output_tokens
    context = shape.blueprint.context_length
    if length > context:
        yield (
            f"{length:,} tokens are beyond the context of {context:,} that this model was made for."
        )
    missing = [precision for precision in scenario.precisions if not hardware.peak(precision)]
    if missing:
        yield (
            f"No {', '.join(missing)} peak is known for {hardware.name}: give --flops, or "
            "--compute-dtype."
        )
    if result.balance is None and hardware.read_bandwidth(1) is None:
        yield f"The memory bandwidth of {hardware.name} is unknown: give --bandwidth."


def assumptions(result: Estimate) -> Iterator[str]:
    """The assumptions behind the numbers."""
    shape = result.shape
    hardware = result.hardware
    scenario = result.scenario
    if scenario.mfu == scenario.mbu == 1:
        yield (
            "This is a bound: the hardware at its peak (MFU and MBU 1). Real engines stay below it."
        )
    else:
        yield f"Assumed, not measured: MFU {scenario.mfu:g} and MBU {scenario.mbu:g}."
    if scenario.dtype.lower() == "int4":
        yield (
            "int4 is taken as half a byte per weight; real formats add scales (Q4_0 has 4.5 bits "
            "per weight)."
        )
    if shape.blueprint.experts:
        yield (
            "Experts are assumed to be chosen evenly and independently; real routers prefer some."
        )
    if any(shape.blueprint.windows):
        yield (
            "Layers with a window read the KV within it, and hold that of every token, as this "
            "engine does."
        )
    if hardware.devices > 1:
        yield (
            f"{hardware.devices} devices are assumed to share everything evenly, without any "
            "cost of communication."
        )
    if result.speculation is not None:
        yield (
            "Speculation: every draft is accepted with the same chance if those before it are; "
            "each step drafts the same number of tokens; looking up text takes no time."
        )
    yield from hardware.notes
