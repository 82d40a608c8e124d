"""The arithmetic of both phases from first principles: what a model must compute and move, and how long that takes.

Formulas (n prompt tokens, position p, batch B; the rest as in `shapes.py`):

    linear FLOP     prefill 2 P n + 2 V h (logits of one position); decode, a step, 2 (P + V h) B
    attention FLOP  4 H d for each token that a row attends to, in each layer: a prompt 4 L H d n (n + 1) / 2
    linear bytes    the weights, once a step: layers, the experts that B rows reach, the head
    KV bytes        of a token 2 L H_kv d b; a prompt writes n of them, a decode step reads those of B sequences
    time            of linear layers, and of attention, max(FLOP / (MFU peak), bytes / (MBU bandwidth)); a phase is the
                    sum of both, which follow each other
    experts         E (1 - (1 - k / E)^rows) of E are reached, by k each, if rows choose them evenly and apart

With efficiencies of 1 this is a bound that nothing beats. Activations, norms, sampling, launches and networks are left
out. What is not known stays None. Not for measured work (`work.py`) nor for learned times (`cost.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinphase.estimate.inputs import Hardware, Scenario, weight_bytes
from twinphase.estimate.shapes import DecoderShape, StoredBytes

__all__ = [
    "Estimate",
    "Part",
    "PhaseEstimate",
    "assumptions",
    "attended_tokens",
    "estimate",
    "kv_bytes",
    "warnings",
]

_LARGEST_BATCH = 1 << 24  # sequences; a break-even beyond it is as good as none


@dataclass(frozen=True)
class Part:
    """The linear layers or the attention of a phase.

    Attributes:
        flops: operations.
        bytes: moved.
        compute_seconds: FLOP / (MFU peak); None if the peak is unknown.
        memory_seconds: bytes / (MBU bandwidth); None if the bandwidth is unknown.
    """

    flops: float
    bytes: float
    compute_seconds: float | None
    memory_seconds: float | None

    @property
    def intensity(self) -> float:
        """FLOP for each byte."""
        return self.flops / self.bytes

    @property
    def seconds(self) -> float | None:
        """The longer of both; None if one is unknown."""
        if self.compute_seconds is None or self.memory_seconds is None:
            return None
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> str:
        """What takes longer: "compute", "memory" or "unknown"."""
        if self.compute_seconds is None or self.memory_seconds is None:
            return "unknown"
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


@dataclass(frozen=True)
class PhaseEstimate:
    """A prompt's prefill, or a decode step."""

    linear: Part
    attention: Part

    @property
    def flops(self) -> float:
        """Operations of both parts."""
        return self.linear.flops + self.attention.flops

    @property
    def bytes(self) -> float:
        """Moved by both parts."""
        return self.linear.bytes + self.attention.bytes

    @property
    def seconds(self) -> float | None:
        """Of both parts, one after the other; None if one is unknown."""
        return _sum(self.linear.seconds, self.attention.seconds)

    @property
    def memory_seconds(self) -> float | None:
        """What memory alone takes: it cannot be faster, whatever the peaks are."""
        return _sum(self.linear.memory_seconds, self.attention.memory_seconds)

    @property
    def bound(self) -> str:
        """Of the part that takes longer."""
        if self.linear.seconds is None or self.attention.seconds is None:
            return "unknown"
        return self.linear.bound if self.linear.seconds >= self.attention.seconds else self.attention.bound


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True)
class Estimate:
    """Everything that follows from a model, a machine and a request; None is unknown.

    Attributes:
        shape: of the model.
        hardware: the machine.
        scenario: the request.
        weights: bytes of the weights.
        kv_token_bytes: KV of one token in all layers.
        prefill: of one prompt.
        decode: a step of the batch, the mean over all steps of the request.
        decode_first: the first of these steps.
        decode_last: the last.
        decode_steps: how many: output tokens - 1.
        balance: FLOP a byte at which the linear layers' unit and the memory take equally long.
        break_even_batch: smallest batch at which decode's linear layers are bound by compute; None if unknown or never.
        no_break_even: why there is none, beginning with "unknown" or "never"; "" if there is one.
        max_batch: sequences of this length that fit beside the weights; 0 where the weights do not fit.
        sequence_bytes: KV of one sequence at its end.
    """

    shape: DecoderShape
    hardware: Hardware
    scenario: Scenario
    weights: StoredBytes
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

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token: the prefill, with no queue and nothing else running."""
        return self.prefill.seconds

    @property
    def decode_seconds(self) -> float | None:
        """Of all decode steps of a request."""
        return None if self.decode.seconds is None else self.decode.seconds * self.decode_steps

    @property
    def prefill_share(self) -> float | None:
        """Of a request's prefill and decode time, at this batch size."""
        total = _sum(self.prefill.seconds, self.decode_seconds)
        return None if self.prefill.seconds is None or total is None else self.prefill.seconds / total

    @property
    def prefill_cost(self) -> float | None:
        """Price of a million prompt tokens: price a second x seconds / tokens."""
        return self._cost(self.prefill.seconds, self.scenario.prompt_tokens)

    @property
    def decode_cost(self) -> float | None:
        """Price of a million output tokens, of which a step yields one a sequence."""
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
    """Keys and values that a sequence of `context` tokens keeps; no more than its window in a layer that has one."""
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
        """Weights that a step of so many rows reads."""
        shape, reached = self.shape, 0.0
        if shape.num_experts:
            reached = 1 - (1 - shape.experts_per_token / shape.num_experts) ** rows
        return self.weights.layers + self.weights.experts * reached + self.weights.head

    def linear(self, rows: int, logits: int, working_set: float) -> Part:
        flops = 2 * self.shape.linear_parameters * rows + 2 * self.shape.head_parameters * logits
        return self._part({self.scenario.units.linear: flops}, self.linear_bytes(rows), working_set)

    def attention(self, tokens: float, moved: float, working_set: float) -> Part:
        half = 2 * self.shape.num_heads * self.shape.head_dim * tokens
        units = self.scenario.units
        work = {units.scores: half}
        work[units.values] = work.get(units.values, 0) + half
        return self._part(work, moved, working_set)

    def _part(self, work: Mapping[str, float], moved: float, working_set: float) -> Part:
        compute: float | None = 0.0
        for precision, flops in work.items():
            peak = self.hardware.peak(precision)
            compute = _sum(compute, flops / (peak * self.scenario.mfu) if peak else None)
        bandwidth = self.hardware.read_bandwidth(working_set)
        memory = moved / (bandwidth * self.scenario.mbu) if bandwidth else None
        return Part(sum(work.values()), moved, compute, memory)

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
        """Smallest batch whose decode has its linear layers bound by compute; or None, and why."""
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
            if high > _LARGEST_BATCH:
                return None, (
                    f"never: with {low:,} requests at once reading the weights still takes longer than the arithmetic"
                )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if compute_bound(middle) else (middle, high)
        return high, ""


def estimate(shape: DecoderShape, hardware: Hardware, scenario: Scenario) -> Estimate:
    """Both phases of one request.

    Raises:
        InvalidRequestError: how the weights are stored is unknown.
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
    """What stands against using the numbers: what does not fit, and what is unknown."""
    shape, hardware, scenario = result.shape, result.hardware, result.scenario
    found = []
    if hardware.capacity is not None and result.weights.total > hardware.capacity:
        found.append(
            f"The weights ({result.weights.total / 1e9:,.1f} GB) do not fit {hardware.capacity / 1e9:,.0f} GB: "
            "take more --devices or a smaller --dtype."
        )
    elif result.max_batch is not None and scenario.batch_size > result.max_batch:
        most = f"{result.max_batch:,} {'does' if result.max_batch == 1 else 'do'}"
        found.append(f"A batch of {scenario.batch_size:,} does not fit: at most {most}.")
    length = scenario.prompt_tokens + scenario.output_tokens
    if shape.context_length is not None and length > shape.context_length:
        found.append(f"{length:,} tokens are beyond the context of {shape.context_length:,} this model was made for.")
    units = scenario.units
    missing = [unit for unit in dict.fromkeys((units.linear, units.scores, units.values)) if not hardware.peak(unit)]
    if missing:
        found.append(f"No peak in {', '.join(missing)} is known of {hardware.name}: give --flops, or --compute-dtype.")
    if result.balance is None and hardware.read_bandwidth(1) is None:
        found.append(f"The memory bandwidth of {hardware.name} is unknown: give --bandwidth.")
    return found


def assumptions(result: Estimate) -> list[str]:
    """What the numbers rest on."""
    shape, hardware, scenario = result.shape, result.hardware, result.scenario
    found = []
    if scenario.mfu == scenario.mbu == 1:
        found.append("A bound: the hardware at its peak (MFU and MBU 1). Real engines stay below it.")
    else:
        found.append(f"Assumed, not measured: MFU {scenario.mfu:g} and MBU {scenario.mbu:g}.")
    if scenario.dtype.lower() == "int4":
        found.append("int4 is half a byte a weight: real formats add scales (Q4_0 has 4.5 bits a weight).")
    if shape.num_experts:
        found.append("Experts are taken to be chosen evenly and apart; real routers prefer some.")
    if hardware.devices > 1:
        found.append(f"{hardware.devices} devices share everything evenly and pay nothing to communicate.")
    return [*found, *hardware.notes]
