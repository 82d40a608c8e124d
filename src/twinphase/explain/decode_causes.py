"""The causes of bad tokens a second, as rules over what passed after the first token.

Its own decode is divided between waiting for a processor, choosing tokens, the rest of the step around the model,
processors that nothing used, and the model; and the model by what bound it. No second is claimed twice. A rule gives
seconds only where they are known; not for the order in which causes are listed (`diagnosis.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import ABOUT, WORTH_NAMING, Lever, duration, more_blocks
from twinphase.explain.prefill_causes import Found, Rule, contended, part
from twinphase.phases.timeline import IntervalKind
from twinphase.phases.work import kv_bytes_per_token
from twinphase.request import SamplingParams

__all__ = ["DECODE_RULES"]


class _Parts(NamedTuple):
    """Seconds of its own decode."""

    waited: float
    sampled: float
    scheduled: float
    unused: float  # that further threads would have spared at best
    model: float
    unexplained: float  # by memory or arithmetic, where neither bound it


def _ceiling(evidence: Evidence) -> tuple[str, float]:
    """The ceiling that the decode steps came nearest to, and how near; ("unknown", 0) where neither is known."""
    near = evidence.efficiency("decode")
    known = [(value, name) for value, name in ((near.mfu, "compute"), (near.mbu, "memory")) if value is not None]
    value, name = max(known, default=(0.0, "unknown"))
    return (near.bound if near.bound in ("memory", "compute") else name), value


def _parts(evidence: Evidence) -> _Parts:
    own, totals = evidence.later[IntervalKind.DECODE], evidence.timeline.decode
    waited = part(own, totals, totals.cpu_wait)
    sampled = min(own - waited, part(own, totals, totals.sampling))
    around = max(0.0, totals.seconds - totals.executed) if totals.executed > 0 else 0.0
    scheduled = min(own - waited - sampled, part(own, totals, around))
    model = own - waited - sampled - scheduled
    overhead = evidence.efficiency("decode").bound == "overhead"
    unexplained = max(0.0, model - own * _ceiling(evidence)[1]) if overhead else 0.0
    model -= unexplained
    # Memory gives no more to more threads once a few have filled it; only arithmetic divides among them.
    unused = model * _idle_part(evidence) if evidence.efficiency("decode").bound == "compute" else 0.0
    return _Parts(waited, sampled, scheduled, unused, model - unused, unexplained)


def _idle_part(evidence: Evidence) -> float:
    """Of the machine's processors, those that no thread of the engine uses."""
    machine = evidence.machine
    if machine is None or not machine.cores or not machine.config.threads:
        return 0.0
    return max(0.0, 1 - machine.config.threads / machine.cores)


def _of_kind(kind: IntervalKind) -> Rule:
    """A cause that is a kind of interval."""

    def rule(evidence: Evidence) -> Found | None:
        seconds = evidence.later[kind]
        return (seconds, *ABOUT[kind](evidence, seconds)) if seconds > 0 else None

    return rule


def _matters(evidence: Evidence) -> bool:
    parts = _parts(evidence)
    return parts.unused + parts.model + parts.unexplained >= WORTH_NAMING * sum(evidence.later.values())


def _threads(evidence: Evidence) -> Found | None:
    machine, idle = evidence.machine, _idle_part(evidence)
    if machine is None or not idle or not _matters(evidence):
        return None
    seconds = _parts(evidence).unused or None
    sentence = f"{machine.config.threads} threads compute on a machine with {machine.cores} processors."
    advice = f"--threads {machine.cores} would use them all"
    if seconds is None:
        return None, f"{sentence} What bounds it need not divide among more.", Lever("--threads", f"{advice}.")
    sentence += f" It is bound by compute: more of them would spare {duration(seconds)} at best."
    return seconds, sentence, Lever("--threads", f"{advice}, and save {duration(seconds)} at best.", seconds)


def _isa(evidence: Evidence) -> Found | None:
    machine = evidence.machine
    forced, best = (machine.config.isa, machine.best_isa) if machine else ("", None)
    if not forced or not best or forced == best or not _matters(evidence):
        return None
    sentence = f"--isa {forced} is forced on a processor that has {best}."
    return None, sentence, Lever("--isa", f"Without --isa, {best} is chosen.")


def _weights_and_context(evidence: Evidence) -> tuple[float, float]:
    """The model's decode time between its weights and the context, by what bound it; the latter 0 where not known."""
    seconds, machine, totals = _parts(evidence).model, evidence.machine, evidence.timeline.decode
    if machine is None or not totals.steps or not totals.bytes:
        return seconds, 0.0
    shape, context = machine.shape, evidence.mean_context
    if _ceiling(evidence)[0] == "compute":  # floating-point operations of a token
        weights = 2.0 * (shape.linear_parameters + shape.head_parameters)
        attended = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
    else:  # bytes of a token
        weights, attended = float(shape.linear_bytes + shape.head_bytes), context * kv_bytes_per_token(shape)
    return seconds * weights / (weights + attended), seconds * attended / (weights + attended)


def _by_bound(evidence: Evidence, *bounds: str) -> bool:
    return evidence.efficiency("decode").bound in bounds


def _model_size(evidence: Evidence) -> Found | None:
    seconds, _ = _weights_and_context(evidence)
    if not _by_bound(evidence, "memory", "compute", "overhead") or seconds <= 0:
        return None
    near, machine = evidence.efficiency("decode"), evidence.machine
    size = f" of {(machine.shape.linear_bytes + machine.shape.head_bytes) / 1e6:,.0f} MB" if machine else ""
    if near.bound == "overhead":
        what = "Reading it" if _ceiling(evidence)[0] == "memory" else "Its arithmetic"
        sentence = f"Each token goes through the whole model{size}. {what} at the measured peak takes this part alone."
    else:
        value = f", MBU {near.mbu:.0%}" if near.bound == "memory" and near.mbu is not None else ""
        sentence = f"Each token goes through the whole model{size} and is bound by {near.bound}{value}."
    _, lever = ABOUT[IntervalKind.DECODE](evidence, seconds)
    if lever is None or lever.flag != "model":
        lever = Lever("model", "A smaller model, or one with fewer bits a weight, has less to read in each step.")
    return seconds, sentence, lever


def _context_length(evidence: Evidence) -> Found | None:
    _, seconds = _weights_and_context(evidence)
    if not _by_bound(evidence, "memory", "compute", "overhead") or seconds <= 0:
        return None
    sentence = f"Each token reads the keys and values of about {evidence.num_prompt} tokens and more before it."
    _, lever = ABOUT[IntervalKind.DECODE](evidence, seconds)
    return seconds, sentence, lever if lever and lever.flag == "--kv-cache-dtype" else None


def _step_overhead(evidence: Evidence) -> Found | None:
    parts = _parts(evidence)
    unexplained = parts.unexplained
    if parts.scheduled + unexplained <= 0:
        return None
    sentences = []
    if unexplained:
        name, value = _ceiling(evidence)
        reached = {"memory": f" (MBU {value:.0%})", "compute": f" (MFU {value:.0%})"}.get(name, "")
        sentences.append(
            f"Neither memory nor arithmetic explains {duration(unexplained)} of the "
            f"{duration(evidence.later[IntervalKind.DECODE])} of its own decoding{reached}."
        )
    if parts.scheduled:
        sentences.append(f"Scheduling and bookkeeping took {duration(parts.scheduled)} of it.")
    return parts.scheduled + unexplained, " ".join(sentences), None


def _unknown_bound(evidence: Evidence) -> Found | None:
    seconds = _parts(evidence).model
    if not _by_bound(evidence, "unknown") or seconds <= 0:
        return None
    sentence, _ = ABOUT[IntervalKind.DECODE](evidence, evidence.later[IntervalKind.DECODE])
    return seconds, f"{sentence} What bounds it is unknown.", None


def _sampling(evidence: Evidence) -> Found | None:
    seconds, request = _parts(evidence).sampled, evidence.request
    if seconds <= 0:
        return None
    params = request.sampling_params or SamplingParams(temperature=0.0)  # not known: nothing is said of it
    wanted = {
        "sampled values": not params.greedy,
        "logprobs": params.logprobs is not None,
        "penalties": params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0,
        "a logit bias": bool(params.logit_bias),
        "a grammar": params.structured_outputs is not None or params.thinking_token_budget is not None,
    }
    asked = [name for name, there in wanted.items() if there]
    lever = None
    if asked:  # how much of it plain greedy decoding would still take is not known
        lever = Lever("sampling", f"It asked for {', '.join(asked)}; greedy decoding without chooses fastest.")
    return seconds, f"Choosing its tokens took {duration(seconds)}.", lever


def _cache_pressure(evidence: Evidence) -> Found | None:
    again = evidence.later[IntervalKind.RECOMPUTE]
    seconds = again + evidence.later[IntervalKind.QUEUE]  # after its first token it queues for no other reason
    seconds += evidence.later[IntervalKind.PREFILL_WAIT] + evidence.later[IntervalKind.PREFILL]
    if not evidence.request.num_preemptions or seconds <= 0:
        return None
    sentence, _ = ABOUT[IntervalKind.RECOMPUTE](evidence, again)
    sentence = f"{sentence} It waited {duration(seconds - again)} for that."
    return seconds, sentence, more_blocks(evidence, "hold twice as many tokens.", seconds)


def _slow_reader(evidence: Evidence) -> Found | None:
    seconds = evidence.later[IntervalKind.SEND]
    if seconds <= 0:
        return None
    sentence, _ = ABOUT[IntervalKind.SEND](evidence, seconds)
    return seconds, sentence, Lever("client", "Read the stream as it comes, and do the work elsewhere.", seconds)


DECODE_RULES: dict[str, Rule] = {
    "model_size": _model_size,
    "context_length": _context_length,
    "threads": _threads,
    "isa": _isa,
    "contention": lambda evidence: contended(_parts(evidence).waited),
    "decode_batching": _of_kind(IntervalKind.BATCHING),
    "cache_pressure": _cache_pressure,
    "stalls": _of_kind(IntervalKind.STALL),
    "slow_reader": _slow_reader,
    "detokenize": _of_kind(IntervalKind.DETOKENIZE),
    "sampling": _sampling,
    "step_overhead": _step_overhead,
    "unknown_bound": _unknown_bound,
    "unattributed": _of_kind(IntervalKind.UNATTRIBUTED),
}
