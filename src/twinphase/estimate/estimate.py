"""The arithmetic of both phases from first principles: what a model must compute and move, and how long that takes.

Formulas (n prompt tokens, position p, batch B; the rest as in `shapes.py`):

    linear FLOP     prefill 2 P n + 2 V h (logits of one position); decode, per step, 2 (P + V h) B
    attention FLOP  4 H d per token that a row attends to, in each layer; a prompt has 4 L H d n (n + 1) / 2
    linear bytes    the weights, once per step: layers, the experts that B rows reach, the head
    KV bytes        per token 2 L H_kv d b; a prompt writes n of them, a decode step reads those of B sequences
    time            of the linear layers, and of attention: max(FLOP / (MFU peak), bytes / (MBU bandwidth)); a phase is
                    the sum of both, which run one after the other
    experts         E (1 - (1 - k / E)^rows) of E are reached, k per row, if rows choose evenly and independently

With efficiencies of 1 this is a bound that nothing beats. Activations, norms, sampling, launches and networks are left
out. What is not known stays None. Not for measured work (`phases/work.py`) nor for learned times (`phases/cost.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinphase.estimate.inputs import Hardware, Scenario, weight_bytes
from twinphase.estimate.shapes import DecoderShape, StoredBytes

__all__ = ["Estimate", "PartEstimate", "PhaseEstimate", "assumptions", "attended_tokens", "estimate", "kv_bytes",
           "warnings"]  # fmt: skip

LARGEST_BATCH = 1 << 24  # sequences; a break-even beyond this is reported as "never"


@dataclass(frozen=True)
class PartEstimate:
    """The linear layers or the attention of a phase: work, and the seconds that each known ceiling needs for it."""

    flops: float
    bytes: float
    compute_seconds: float | None
    memory_seconds: float | None

    @property
    def intensity(self) -> float:  # FLOP per byte
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
    """A prompt's prefill, or a decode step: its two parts run one after the other."""

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
    def memory_seconds(self) -> float | None:  # no peak makes it faster
        return _sum(self.linear.memory_seconds, self.attention.memory_seconds)

    @property
    def bound(self) -> str:
        if self.linear.seconds is None or self.attention.seconds is None:
            return "unknown"
        return self.linear.bound if self.linear.seconds >= self.attention.seconds else self.attention.bound


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True)
class Estimate:
    """Everything that follows from a model, a machine and a request; None is unknown.

    Attributes:
        decode: the mean step of the batch over the whole request; `decode_first` and `decode_last` are its ends.
    """

    shape: DecoderShape
    hardware: Hardware
    scenario: Scenario
    weights: StoredBytes
    kv_token_bytes: float  # KV of one token in all layers
    prefill: PhaseEstimate  # of one prompt; its seconds are the TTFT with no queue and nothing else running
    decode: PhaseEstimate
    decode_first: PhaseEstimate
    decode_last: PhaseEstimate
    decode_steps: int  # output tokens - 1
    balance: float | None  # FLOP per byte at which the linear layers' unit and the memory take equally long
    break_even_batch: int | None  # smallest batch at which decode's linear layers are compute-bound
    no_break_even: str  # why there is none, beginning with "unknown" or "never"; "" if there is one
    max_batch: int | None  # sequences of this length that fit beside the weights; 0 where the weights do not fit
    sequence_bytes: float  # KV of one sequence at its end

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


def attended_tokens(shape: DecoderShape, start: int, rows: int) -> int:
    """Tokens that the rows at positions `start` .. `start + rows - 1` of a sequence attend to, summed over layers.

    The row at position p attends to p + 1 tokens, or to its layer's window if that is smaller.
    """
    return sum(_bounded_sum(start + rows, window) - _bounded_sum(start, window) for window in shape.windows)


def _bounded_sum(last: int, window: int | None) -> int:
    """Sum of min(i, window) for i from 1 to `last`."""
    rising = last if window is None else min(last, window)
    return rising * (rising + 1) // 2 + (last - rising) * (window or 0)


def kv_bytes(shape: DecoderShape, context: int, kv_head_bytes: float) -> float:
    """Bytes of keys and values that a sequence of `context` tokens keeps: in a layer with a window at most that."""
    kept = sum(context if window is None else min(context, window) for window in shape.windows)
    return kept * shape.num_kv_heads * kv_head_bytes


@dataclass(frozen=True)
class _Model:
    """The shape with its bytes, and the hardware at its assumed efficiency."""

    shape: DecoderShape
    weights: StoredBytes
    hardware: Hardware
    scenario: Scenario

    def linear_bytes(self, rows: int) -> float:
        shape, reached = self.shape, 0.0
        if shape.num_experts:
            reached = 1 - (1 - shape.experts_per_token / shape.num_experts) ** rows
        return self.weights.layers + self.weights.experts * reached + self.weights.head

    def linear(self, rows: int, logits: int, working_set: float) -> PartEstimate:
        flops = 2 * self.shape.linear_parameters * rows + 2 * self.shape.head_parameters * logits
        return self._part({self.scenario.units.linear: flops}, self.linear_bytes(rows), working_set)

    def attention(self, tokens: float, moved: float, working_set: float) -> PartEstimate:
        half = 2 * self.shape.num_heads * self.shape.head_dim * tokens
        units = self.scenario.units
        work = {units.scores: half}
        work[units.values] = work.get(units.values, 0) + half
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
        each = kv_bytes(self.shape, 1, self.scenario.kv_head_bytes)
        moved = self.linear_bytes(tokens) + tokens * each
        linear = self.linear(tokens, 1, moved)
        return PhaseEstimate(linear, self.attention(attended_tokens(self.shape, 0, tokens), tokens * each, moved))

    def decode(self, position: int, steps: int) -> PhaseEstimate:
        """The mean of `steps` steps of the batch, the first of them at `position`."""
        batch, shape = self.scenario.batch_size, self.shape
        tokens = batch * attended_tokens(shape, position, steps) / steps
        kv = tokens * shape.num_kv_heads * self.scenario.kv_head_bytes
        moved = self.linear_bytes(batch) + kv
        return PhaseEstimate(self.linear(batch, batch, moved), self.attention(tokens, kv, moved))

    def break_even(self) -> tuple[int | None, str]:
        """Smallest batch whose linear layers are compute-bound in decode; or None, and why there is none."""
        unit = self.scenario.units.linear
        missing = [] if self.hardware.peak(unit) else [f"peak in {unit}"]
        missing += [] if self.hardware.read_bandwidth(self.linear_bytes(1)) else ["memory bandwidth"]
        if missing:
            return None, f"unknown: no {' and no '.join(missing)} is known"

        def compute_bound(batch: int) -> bool:
            return self.linear(batch, batch, self.linear_bytes(batch)).bound == "compute"

        low, high = 0, 1
        while not compute_bound(high):
            low, high = high, high * 2
            if high > LARGEST_BATCH:
                slower = "reading the weights takes longer than the arithmetic"
                return None, f"never: even with {low:,} requests at once, {slower}"
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if compute_bound(middle) else (middle, high)
        return high, ""


def estimate(shape: DecoderShape, hardware: Hardware, scenario: Scenario) -> Estimate:
    """Estimate both phases of one request.

    Raises:
        InvalidRequestError: it is not known how the weights are stored.
    """
    model = _Model(shape, weight_bytes(shape, scenario.dtype), hardware, scenario)
    n, steps = scenario.prompt_tokens, scenario.output_tokens - 1
    peak, bandwidth = hardware.peak(scenario.units.linear), hardware.read_bandwidth(model.linear_bytes(1))
    sequence = kv_bytes(shape, n + steps, scenario.kv_head_bytes)
    break_even, why_not = model.break_even()
    free = None if hardware.capacity is None else hardware.capacity - model.weights.total
    return Estimate(
        shape=shape,
        hardware=hardware,
        scenario=scenario,
        weights=model.weights,
        kv_token_bytes=kv_bytes(shape, 1, scenario.kv_head_bytes),
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
    )


def warnings(result: Estimate) -> list[str]:
    """What does not fit, and what is unknown."""
    shape, hardware, scenario = result.shape, result.hardware, result.scenario
    found = []
    if hardware.capacity is not None and result.weights.total > hardware.capacity:
        found.append(
            f"The weights ({result.weights.total / 1e9:,.1f} GB) do not fit {hardware.capacity / 1e9:,.0f} GB: "
            "use more --devices or a smaller --dtype."
        )
    elif result.max_batch is not None and scenario.batch_size > result.max_batch:
        found.append(f"A batch of {scenario.batch_size:,} does not fit; the largest that fits is {result.max_batch:,}.")
    length = scenario.prompt_tokens + scenario.output_tokens
    if shape.context_length is not None and length > shape.context_length:
        found.append(
            f"{length:,} tokens are beyond the context of {shape.context_length:,} that this model was made for."
        )
    missing = [precision for precision in scenario.precisions if not hardware.peak(precision)]
    if missing:
        found.append(f"No {', '.join(missing)} peak is known for {hardware.name}: give --flops, or --compute-dtype.")
    if result.balance is None and hardware.read_bandwidth(1) is None:
        found.append(f"The memory bandwidth of {hardware.name} is unknown: give --bandwidth.")
    return found


def assumptions(result: Estimate) -> list[str]:
    """What the numbers assume."""
    shape, hardware, scenario = result.shape, result.hardware, result.scenario
    found = []
    if scenario.mfu == scenario.mbu == 1:
        found.append("This is a bound: the hardware at its peak (MFU and MBU 1). Real engines stay below it.")
    else:
        found.append(f"Assumed, not measured: MFU {scenario.mfu:g} and MBU {scenario.mbu:g}.")
    if scenario.dtype.lower() == "int4":
        found.append("int4 is taken as half a byte per weight; real formats add scales (Q4_0 has 4.5 bits per weight).")
    if shape.num_experts:
        found.append("Experts are assumed to be chosen evenly and independently; real routers prefer some.")
    if hardware.devices > 1:
        found.append(
            f"{hardware.devices} devices are assumed to share everything evenly, without any cost of communication."
        )
    return [*found, *hardware.notes]
