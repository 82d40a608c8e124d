"""Divides each phase of a request among causes, so that every second has exactly one cause.

A value of None means that the cause is present, but its time is unknown.
"""

from __future__ import annotations

from twinphase.explain.evidence import Evidence
from twinphase.phases.hardware import NEITHER
from twinphase.phases.timeline import IntervalKind, PhaseTotals
from twinphase.phases.work import kv_bytes_per_token, weight_bytes_read

# Causes with a smaller share of a phase are not reported.
MIN_REPORTED_SHARE = 0.1
# A prompt had a cold start if it was prefilled in the engine's first steps and took this many times
# its predicted time.
COLD_START_STEPS = 4
COLD_START_RATIO = 2.0
EITHER_PHASE = {
    IntervalKind.ROUTE: "route",
    IntervalKind.TRANSFER: "transfer",
    IntervalKind.RECOMPUTE: "cache_pressure",
    IntervalKind.DETOKENIZE: "detokenize",
    IntervalKind.SEND: "slow_reader",
    IntervalKind.UNATTRIBUTED: "unattributed",
}
KIND_CAUSES = {
    "prefill": {
        IntervalKind.TOKENIZE: "tokenize",
        IntervalKind.PREFILL_WAIT: "prefill_batching",
        **EITHER_PHASE,
    },
    "decode": {
        IntervalKind.BATCHING: "decode_batching",
        IntervalKind.STALL: "stalls",
        IntervalKind.DRAFTING: "drafting",
        IntervalKind.REJECTED: "rejected_drafts",
        **EITHER_PHASE,
    },
}
Seconds = dict[str, float | None]


def attribute(evidence: Evidence, phase: str) -> Seconds:
    """Seconds by cause, before ("prefill") or after ("decode") the first token."""
    spent = evidence.spent(phase)
    found: Seconds = {cause: spent[kind] for kind, cause in KIND_CAUSES[phase].items()}
    found |= _prefill(evidence, spent) if phase == "prefill" else _decode(evidence, spent)
    return {cause: seconds for cause, seconds in found.items() if seconds is None or seconds > 0}


def _prefill(evidence: Evidence, spent: dict[IntervalKind, float]) -> Seconds:
    """Queue time by reason; prefill by contention, cold start, evicted tokens and new tokens."""
    grammar = evidence.grammar_seconds
    own = spent[IntervalKind.PREFILL]
    waits = _waits(own, evidence.timeline.prefill)
    rest = own - sum(waits.values())
    expected = evidence.prefill_alone()
    cold = 0.0
    first_step = min(
        (interval.step for interval in evidence.intervals(IntervalKind.PREFILL)), default=-1
    )
    if expected and 0 <= first_step < COLD_START_STEPS and rest > COLD_START_RATIO * expected:
        cold = rest - expected
    evicted = (rest - cold) * evidence.known_part
    # Only evicted tokens are known to have been cached; a shared prefix does not prove that.
    listed = None if own >= MIN_REPORTED_SHARE * sum(spent.values()) > 0 else 0.0
    return {
        "queue": spent[IntervalKind.QUEUE] - grammar,
        "grammar": grammar,
        **waits,
        "cold_start": cold + sum(evidence.before.values()),
        "missed_prefix": evicted or listed,
        "prompt_length": rest - cold - evicted,
    }


def _decode(evidence: Evidence, spent: dict[IntervalKind, float]) -> Seconds:
    """The request's own decode: parts outside the model, and the model's time by its bound."""
    own = spent[IntervalKind.DECODE]
    totals = evidence.timeline.decode
    bound = evidence.efficiency("decode").bound
    waits = _waits(own, totals)
    rest = own - sum(waits.values())
    sampled = min(rest, _own_part(own, totals, totals.sampling))
    around = max(0.0, totals.seconds - totals.executed) if totals.executed > 0 else 0.0
    scheduled = min(rest - sampled, _own_part(own, totals, around))
    model = rest - sampled - scheduled
    listed = None if model >= MIN_REPORTED_SHARE * sum(spent.values()) > 0 else 0.0
    found: Seconds = {**waits, "sampling": sampled}
    # After its first token a request queues only after a preemption.
    found["cache_pressure"] = spent[IntervalKind.RECOMPUTE] + spent[IntervalKind.QUEUE]
    machine = evidence.machine
    idle = evidence.idle_part
    unexplained = 0.0
    if machine and machine.config.isa and machine.best_isa not in (None, machine.config.isa):
        found["isa"] = listed  # The other path was not measured.
    if bound in NEITHER:  # The nearest ceiling explains as much as a ceiling can.
        unexplained = max(0.0, model - own * nearest_ceiling(evidence)[1])
    if idle:  # Only compute-bound work scales with threads: a few threads saturate memory.
        found["threads"] = model * idle if bound == "compute" else listed
    model -= unexplained + (found.get("threads") or 0.0)
    found["step_overhead"] = scheduled
    found["kernels_below_peak"] = unexplained
    if bound == "unknown":
        return found | {"unknown_bound": model}
    weights = model * _weights_part(evidence)
    return found | {"model_size": weights, "context_length": model - weights}


def _waits(own: float, totals: PhaseTotals) -> dict[str, float]:
    """The request's part of its steps' waiting: for a processor, and for other ranks."""
    waited = _own_part(own, totals, totals.cpu_wait)
    for_ranks = min(own - waited, _own_part(own, totals, totals.rank_wait))
    return {"contention": waited, "rank_wait": for_ranks}


def _own_part(own: float, totals: PhaseTotals, seconds: float) -> float:
    """The request's share of `seconds` of its steps, in proportion `own` / total."""
    return min(own, own * seconds / totals.seconds) if totals.seconds > 0 else 0.0


def nearest_ceiling(evidence: Evidence) -> tuple[str, float]:
    """The ceiling nearest to the decode steps, and the fraction reached; else ("unknown", 0)."""
    near = evidence.efficiency("decode")
    known = [
        (value, name)
        for value, name in ((near.mfu, "compute"), (near.mbu, "memory"))
        if value is not None
    ]
    value, name = max(known, default=(0.0, "unknown"))
    return (near.bound if near.bound in ("memory", "compute") else name), value


def _weights_part(evidence: Evidence) -> float:
    """The fraction of the model's decode time for reading weights; the rest is for the context."""
    machine = evidence.machine
    totals = evidence.timeline.decode
    if machine is None or not totals.steps or not totals.bytes:
        return 1.0
    shape = machine.shape
    context = shape.mean_attended(evidence.mean_context)
    # The unit is floating-point operations per token.
    if nearest_ceiling(evidence)[0] == "compute":
        weights = 2.0 * (shape.linear_parameters + shape.head_parameters)
        attended = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
    else:  # The unit is bytes per token.
        weights = float(weight_bytes_read(shape, 1, 1))
        attended = context * kv_bytes_per_token(shape)
    return weights / (weights + attended)
