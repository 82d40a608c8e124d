"""Which cause each second of a request belongs to: one division per phase, so that no second is claimed twice.

None instead of seconds: the cause is there, but what it takes cannot be told.
"""

from __future__ import annotations

from twinphase.explain.evidence import Evidence
from twinphase.phases.hardware import NEITHER
from twinphase.phases.timeline import IntervalKind, PhaseTotals
from twinphase.phases.work import kv_bytes_per_token, weight_bytes_read

WORTH_NAMING = 0.1  # smallest share of the time in question that is told
COLD_STEPS = 4  # a prompt that began in the engine's first steps may have found it cold,
COLD_FACTOR = 2.0  # and did if it took this many times what it would take now
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
    """Seconds by cause: of the time to first token for "prefill", of the time after it for "decode"."""
    spent = evidence.spent(phase)
    found: Seconds = {cause: spent[kind] for kind, cause in KIND_CAUSES[phase].items()}
    found |= _prefill(evidence, spent) if phase == "prefill" else _decode(evidence, spent)
    return {cause: seconds for cause, seconds in found.items() if seconds is None or seconds > 0}


def _prefill(evidence: Evidence, spent: dict[IntervalKind, float]) -> Seconds:
    """The queue by its reasons; the request's own prefill between contention, coldness, evicted tokens and new ones."""
    grammar = evidence.grammar_seconds
    own = spent[IntervalKind.PREFILL]
    totals = evidence.timeline.prefill
    waited = _own_part(own, totals, totals.cpu_wait)
    for_ranks = min(own - waited, _own_part(own, totals, totals.rank_wait))
    rest = own - waited - for_ranks
    expected = evidence.prefill_alone()
    cold = 0.0
    first_step = min(
        (interval.step for interval in evidence.intervals(IntervalKind.PREFILL)), default=-1
    )
    if expected and 0 <= first_step < COLD_STEPS and rest > COLD_FACTOR * expected:
        cold = rest - expected
    evicted = (rest - cold) * evidence.known_part
    # A shared beginning proves nothing about the rest of a prompt: only evicted tokens were
    # certainly cached once.
    listed = None if own >= WORTH_NAMING * sum(spent.values()) > 0 else 0.0
    return {
        "queue": spent[IntervalKind.QUEUE] - grammar,
        "grammar": grammar,
        "contention": waited,
        "rank_wait": for_ranks,
        "cold_start": cold + sum(evidence.before.values()),
        "missed_prefix": evicted or listed,
        "prompt_length": rest - cold - evicted,
    }


def _decode(evidence: Evidence, spent: dict[IntervalKind, float]) -> Seconds:
    """The request's own decode, divided between what is not the model, and the model by what bound it."""
    own = spent[IntervalKind.DECODE]
    totals = evidence.timeline.decode
    bound = evidence.efficiency("decode").bound
    waited = _own_part(own, totals, totals.cpu_wait)
    for_ranks = min(own - waited, _own_part(own, totals, totals.rank_wait))
    sampled = min(own - waited - for_ranks, _own_part(own, totals, totals.sampling))
    around = max(0.0, totals.seconds - totals.executed) if totals.executed > 0 else 0.0
    scheduled = min(own - waited - for_ranks - sampled, _own_part(own, totals, around))
    model = own - waited - for_ranks - sampled - scheduled
    listed = None if model >= WORTH_NAMING * sum(spent.values()) > 0 else 0.0
    found: Seconds = {"contention": waited, "rank_wait": for_ranks, "sampling": sampled}
    # After its first token a request queues only where it was preempted.
    found["cache_pressure"] = spent[IntervalKind.RECOMPUTE] + spent[IntervalKind.QUEUE]
    machine = evidence.machine
    idle = evidence.idle_part
    unexplained = 0.0
    if machine and machine.config.isa and machine.best_isa not in (None, machine.config.isa):
        found["isa"] = listed  # the other path was not measured
    if bound in NEITHER:  # memory and arithmetic explain no more than the nearest ceiling does
        unexplained = max(0.0, model - own * nearest_ceiling(evidence)[1])
    if (
        idle
    ):  # only arithmetic divides among more threads: memory gives no more once a few have filled it
        found["threads"] = model * idle if bound == "compute" else listed
    model -= unexplained + (found.get("threads") or 0.0)
    found["step_overhead"] = scheduled + unexplained
    if bound == "unknown":
        return found | {"unknown_bound": model}
    weights = model * _weights_part(evidence)
    return found | {"model_size": weights, "context_length": model - weights}


def _own_part(own: float, totals: PhaseTotals, seconds: float) -> float:
    """The request's part of the `seconds` that its steps spent on something, by its `own` part of those steps."""
    return min(own, own * seconds / totals.seconds) if totals.seconds > 0 else 0.0


def nearest_ceiling(evidence: Evidence) -> tuple[str, float]:
    """The ceiling that the decode steps came nearest to, and how near; ("unknown", 0) where neither is known."""
    near = evidence.efficiency("decode")
    known = [
        (value, name)
        for value, name in ((near.mfu, "compute"), (near.mbu, "memory"))
        if value is not None
    ]
    value, name = max(known, default=(0.0, "unknown"))
    return (near.bound if near.bound in ("memory", "compute") else name), value


def _weights_part(evidence: Evidence) -> float:
    """The fraction of the model's decode time that goes to its weights; the rest goes to the context."""
    machine = evidence.machine
    totals = evidence.timeline.decode
    if machine is None or not totals.steps or not totals.bytes:
        return 1.0
    shape = machine.shape
    context = shape.mean_attended(evidence.mean_context)
    if nearest_ceiling(evidence)[0] == "compute":  # floating-point operations per token
        weights = 2.0 * (shape.linear_parameters + shape.head_parameters)
        attended = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
    else:  # bytes per token
        weights = float(weight_bytes_read(shape, 1, 1))
        attended = context * kv_bytes_per_token(shape)
    return weights / (weights + attended)
