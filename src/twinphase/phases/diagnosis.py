"""The causes of a bad time to first token and of bad tokens a second, as rules over what was measured.

One small function a cause, in one table. A rule claims seconds of the ledger, and no second of a phase's own work is
claimed twice, so that the shares of one symptom add up to 1 at most. Rules of a bad TTFT weigh what passed before the
first token, those of bad tokens a second what passed after it. docs/explain.md has the table, with the test that
provokes each cause. Not for what a client alone can see (`client_diagnosis.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinphase.phases.evidence import Evidence
from twinphase.phases.levers import (
    ABOUT,
    WORTH_NAMING,
    Lever,
    duration,
    missed_prefix,
    more_blocks,
    spared,
)
from twinphase.phases.timeline import IntervalKind, PhaseTotals
from twinphase.phases.work import kv_bytes_per_token
from twinphase.request import MissReason

__all__ = ["DECODE_RULES", "PREFILL_RULES", "Diagnosis", "diagnose", "prefix_sentence"]

COLD_STEPS = 4  # a prompt that began in the engine's first steps may have found it cold
COLD_FACTOR = 2.0  # and did, if it took so many times what it would take now


@dataclass(frozen=True)
class Diagnosis:
    """A cause of a bad time to first token, or of bad tokens a second.

    Attributes:
        cause: its name, as in docs/explain.md.
        phase: "prefill" for a bad TTFT, "decode" for bad tokens a second.
        evidence: one sentence with its numbers.
        seconds: that it explains; None where that cannot be told.
        share: of TTFT, or of the time after the first token; None as above.
        lever: what to change, if anything can be.
    """

    cause: str
    phase: str
    evidence: str
    seconds: float | None
    share: float | None
    lever: Lever | None = None


Found = tuple[float | None, str, Lever | None]  # seconds, evidence, lever
Rule = Callable[[Evidence], Found | None]


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """What each symptom comes from: causes of a bad TTFT, then of bad tokens a second, the largest share first.

    Causes that explain less than a tenth are left out; those whose share is not known come last.
    """
    found: list[Diagnosis] = []
    lead = sum(evidence.before.values())
    for phase, rules, whole in (
        ("prefill", PREFILL_RULES, lead + sum(evidence.first.values())),
        ("decode", DECODE_RULES, sum(evidence.later.values())),
    ):
        if whole <= 0:
            continue
        named = []
        for cause, rule in rules.items():
            claim = rule(evidence)
            if claim is None:
                continue
            seconds, sentence, lever = claim
            share = None if seconds is None else seconds / whole
            if share is None or share >= WORTH_NAMING:
                named.append(Diagnosis(cause, phase, sentence, seconds, share, lever))
        found += sorted(named, key=lambda diagnosis: (diagnosis.share is None, -(diagnosis.share or 0.0)))
    return tuple(found)


def prefix_sentence(evidence: Evidence) -> str:
    """How much of the prompt was cached, and why not more."""
    request, miss = evidence.request, evidence.request.prefix_miss
    found = f"{request.num_cached_tokens} of {evidence.num_prompt} prompt tokens were cached"
    if miss is None or miss.reason is MissReason.DISABLED:
        return f"{found}." if miss is None else "The prefix cache is off (--no-enable-prefix-caching)."
    why = {
        MissReason.DIVERGED: f"at token {miss.token_index} the prompt leaves the cached ones",
        MissReason.BLOCK_GRANULARITY: f"from token {miss.token_index} on less than a block is left to share",
        MissReason.SALT: "nothing is cached under its cache_salt (or API key) yet, and nothing is shared across them",
        MissReason.EVICTED: f"from token {miss.token_index} on it was cached and had to make room",
        MissReason.NEVER_SEEN: f"from token {miss.token_index} on no full block of it was seen before",
    }
    return f"{found}; {why[miss.reason]}."


def _of_kind(kind: IntervalKind, early: bool) -> Rule:
    """A cause that is a kind of interval."""

    def rule(evidence: Evidence) -> Found | None:
        seconds = (evidence.first if early else evidence.later)[kind]
        return (seconds, *ABOUT[kind](evidence, seconds)) if seconds > 0 else None

    return rule


# Before the first token. Its own prefill is divided between waiting for a processor, being cold, a prefix that was not
# cached, and reading.
def _prefill_parts(evidence: Evidence) -> tuple[float, float, float, float]:
    own = evidence.first[IntervalKind.PREFILL]
    waited = _part(own, evidence.timeline.prefill, evidence.timeline.prefill.cpu_wait)
    own -= waited
    expected, cold = evidence.prefill_alone(), 0.0
    first_step = min((interval.step for interval in evidence.intervals(IntervalKind.PREFILL)), default=-1)
    if expected and 0 <= first_step < COLD_STEPS and own > COLD_FACTOR * expected:
        cold = own - expected
    own -= cold
    missed = min(own, _missed_seconds(evidence) or 0.0)
    return waited, cold, missed, own - missed


def _part(own: float, totals: PhaseTotals, seconds: float) -> float:
    """The request's part of what its steps spent on something, by its part of them."""
    return min(own, own * seconds / totals.seconds) if totals.seconds > 0 else 0.0


def _missed_seconds(evidence: Evidence) -> float | None:
    """Own prefill that a longer cached prefix would have spared; None if there is no such prefix, or none is known."""
    miss = evidence.request.prefix_miss
    if miss is None or miss.reason in (MissReason.NEVER_SEEN, MissReason.DISABLED):
        return None
    if miss.reason is MissReason.BLOCK_GRANULARITY and not miss.token_index:
        return None  # a prompt shorter than a block is as good as new
    if miss.reason in (MissReason.DIVERGED, MissReason.EVICTED) and missed_prefix(evidence) is None:
        return None
    seconds = spared(evidence)
    if seconds is None and evidence.num_computed > 0:  # by tokens, where nothing is known of the machine
        seconds = evidence.first[IntervalKind.PREFILL] * (evidence.num_computed - 1) / evidence.num_computed
    return seconds


def _prompt_length(evidence: Evidence) -> Found | None:
    *_, missed, seconds = _prefill_parts(evidence)
    if missed or seconds <= 0:
        return None
    sentence, _ = ABOUT[IntervalKind.PREFILL](evidence, evidence.first[IntervalKind.PREFILL])
    near = evidence.efficiency("prefill")
    if near.bound != "unknown":
        sentence += f" Bound by {near.bound}" + (f", MFU {near.mfu:.0%}." if near.mfu is not None else ".")
    whole, half = evidence.prefill_alone(), evidence.prefill_alone(evidence.num_computed // 2)
    saved = seconds * max(0.0, 1 - half / whole) if whole and half is not None else None
    much = f" Half of its new tokens would save about {duration(saved)}." if saved is not None else ""
    return seconds, sentence, Lever("prompt", f"A shorter prompt takes less to read.{much}", saved)


def _queue(evidence: Evidence, grammar: bool) -> Found | None:
    cut = evidence.timeline.arrival + sum(evidence.first.values())
    queued = [queue for queue in evidence.intervals(IntervalKind.QUEUE) if queue.start < cut]
    seconds = sum(min(queue.end, cut) - queue.start for queue in queued if (queue.reason == "grammar") is grammar)
    if seconds <= 0:
        return None
    if grammar:
        advice = "Send the same grammar again (compiled ones are kept), or a simpler one."
        sentence = f"The grammar of its structured output was being compiled for {duration(seconds)}."
        return seconds, sentence, Lever("structured_outputs", advice)
    return (seconds, *ABOUT[IntervalKind.QUEUE](evidence, seconds))


def _cold_start(evidence: Evidence) -> Found | None:
    cold, lead = _prefill_parts(evidence)[1], sum(evidence.before.values())
    if cold + lead <= 0:
        return None
    sentences = []
    if lead:
        sentences.append(", ".join(f"{name} took {duration(spent)}" for name, spent in evidence.before.items()) + ".")
    if cold:
        sentences.append(
            f"It was the engine's first prompt, and took {duration(cold)} more to read than the same would now."
        )
    advice = "A server that runs, or a request sent before, has paid for loading, compiling and touching memory."
    return cold + lead, " ".join(sentences), Lever("twinphase serve", advice, cold + lead)


def _missed(evidence: Evidence) -> Found | None:
    miss, seconds = evidence.request.prefix_miss, _prefill_parts(evidence)[2]
    if miss is None:
        return None
    sentence = prefix_sentence(evidence)
    if miss.reason is MissReason.DISABLED:  # whether anything would have been shared, nobody knows
        found = missed_prefix(evidence)
        return None, sentence, found[1] if found else None
    if seconds <= 0:
        return None
    sentence += f" Computing it took up to {duration(seconds)}, if all of it was sent before."
    if miss.reason is MissReason.SALT:
        advice = f"One cache_salt for all who may share would save up to {duration(seconds)}."
        return seconds, sentence, Lever("cache_salt", advice, seconds)
    if miss.reason is MissReason.BLOCK_GRANULARITY:
        advice = f"A smaller --block-size would share more of it, and save up to {duration(seconds)}."
        return seconds, sentence, Lever("--block-size", advice, seconds)
    found = missed_prefix(evidence)
    return seconds, sentence, found[1] if found else None


def _contention(early: bool) -> Rule:
    def rule(evidence: Evidence) -> Found | None:
        seconds = _prefill_parts(evidence)[0] if early else _decode_parts(evidence)[0]
        if seconds <= 0:
            return None
        sentence = f"Its steps could have run and had no processor for {duration(seconds)}: other programs used them."
        advice = "Stop what else runs, or give the engine processors of its own (taskset, cgroups)."
        return seconds, sentence, Lever("machine", advice, seconds)

    return rule


# After it. Its own decode is divided between waiting for a processor, choosing tokens, the rest of the step around the
# model, and the model; and that by what bound it.
def _decode_parts(evidence: Evidence) -> tuple[float, float, float, float]:
    own, totals = evidence.later[IntervalKind.DECODE], evidence.timeline.decode
    waited = _part(own, totals, totals.cpu_wait)
    sampled = min(own - waited, _part(own, totals, totals.sampling))
    around = max(0.0, totals.seconds - totals.executed) if totals.executed > 0 else 0.0
    scheduled = min(own - waited - sampled, _part(own, totals, around))
    return waited, sampled, scheduled, own - waited - sampled - scheduled


def _handicap(evidence: Evidence) -> str:
    """What of the machine is left unused: "threads", "isa" or ""; nothing behind it is to be judged before."""
    machine = evidence.machine
    if machine is None:
        return ""
    if machine.cores and machine.config.threads and machine.config.threads < machine.cores:
        return "threads"
    forced = machine.config.isa
    return "isa" if forced and machine.best_isa and forced != machine.best_isa else ""


def _hardware(which: str) -> Rule:
    def rule(evidence: Evidence) -> Found | None:
        machine, seconds = evidence.machine, _decode_parts(evidence)[3]
        if machine is None or _handicap(evidence) != which or seconds <= 0:
            return None
        if which == "threads":
            sentence = f"{machine.config.threads} threads compute on a machine with {machine.cores} processors."
            return seconds, sentence, Lever("--threads", f"--threads {machine.cores} would use them all.")
        sentence = f"--isa {machine.config.isa} is forced on a processor that has {machine.best_isa}."
        return seconds, sentence, Lever("--isa", f"Without --isa, {machine.best_isa} is chosen.")

    return rule


def _weights_and_context(evidence: Evidence) -> tuple[float, float]:
    """The model's decode time between reading weights and reading KV, by bytes; the latter 0 where not known."""
    seconds, machine, totals = _decode_parts(evidence)[3], evidence.machine, evidence.timeline.decode
    if machine is None or not totals.steps or not totals.bytes:
        return seconds, 0.0
    context = evidence.num_prompt + len(evidence.request.output_token_ids) / 2
    weights = machine.shape.linear_bytes + machine.shape.head_bytes
    kv_cache = context * kv_bytes_per_token(machine.shape)
    return seconds * weights / (weights + kv_cache), seconds * kv_cache / (weights + kv_cache)


def _by_bound(evidence: Evidence, *bounds: str) -> bool:
    return not _handicap(evidence) and evidence.efficiency("decode").bound in bounds


def _model_size(evidence: Evidence) -> Found | None:
    seconds, _ = _weights_and_context(evidence)
    if not _by_bound(evidence, "memory", "compute") or seconds <= 0:
        return None
    near = evidence.efficiency("decode")
    value = (f", MBU {near.mbu:.0%}" if near.mbu is not None else "") if near.bound == "memory" else ""
    machine = evidence.machine
    size = f" of {(machine.shape.linear_bytes + machine.shape.head_bytes) / 1e6:,.0f} MB" if machine else ""
    sentence = f"Each token goes through the whole model{size} and is bound by {near.bound}{value}."
    _, lever = ABOUT[IntervalKind.DECODE](evidence, seconds)
    if lever is None or lever.flag != "model":
        lever = Lever("model", "A smaller model, or one with fewer bits a weight, has less to read in each step.")
    return seconds, sentence, lever


def _context_length(evidence: Evidence) -> Found | None:
    _, seconds = _weights_and_context(evidence)
    if not _by_bound(evidence, "memory", "compute") or seconds <= 0:
        return None
    sentence = f"Each token reads the keys and values of about {evidence.num_prompt} tokens and more before it."
    _, lever = ABOUT[IntervalKind.DECODE](evidence, seconds)
    return seconds, sentence, lever if lever and lever.flag == "--kv-cache-dtype" else None


def _step_overhead(evidence: Evidence) -> Found | None:
    _, _, seconds, model = _decode_parts(evidence)
    unexplained = model if _by_bound(evidence, "overhead") else 0.0
    if seconds + unexplained <= 0:
        return None
    near, parts = evidence.efficiency("decode"), []
    if unexplained:
        reached = f" (MBU {near.mbu:.0%})" if near.mbu is not None else ""
        parts.append(f"Neither memory nor arithmetic explains {duration(unexplained)} of its own decoding{reached}.")
    if seconds:
        parts.append(f"Scheduling and bookkeeping took {duration(seconds)} of it.")
    sentence = " ".join(parts)
    return seconds + unexplained, sentence, None


def _unknown_bound(evidence: Evidence) -> Found | None:
    seconds = _decode_parts(evidence)[3]
    if not _by_bound(evidence, "unknown") or seconds <= 0:
        return None
    sentence, _ = ABOUT[IntervalKind.DECODE](evidence, evidence.later[IntervalKind.DECODE])
    return seconds, f"{sentence} What bounds it is unknown.", None


def _sampling(evidence: Evidence) -> Found | None:
    seconds = _decode_parts(evidence)[1]
    if seconds <= 0:
        return None
    sentence = f"Choosing its tokens (sampling values, grammar, logprobs) took {duration(seconds)}."
    advice = "Greedy decoding (temperature 0) without logprobs, penalties or a grammar chooses fastest."
    return seconds, sentence, Lever("sampling", advice, seconds)


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


PREFILL_RULES: dict[str, Rule] = {
    "prompt_length": _prompt_length,
    "queue": lambda evidence: _queue(evidence, False),
    "prefill_batching": _of_kind(IntervalKind.PREFILL_WAIT, True),
    "cold_start": _cold_start,
    "missed_prefix": _missed,
    "cache_pressure": _of_kind(IntervalKind.RECOMPUTE, True),
    "contention": _contention(True),
    "grammar": lambda evidence: _queue(evidence, True),
    "tokenize": _of_kind(IntervalKind.TOKENIZE, True),
    "detokenize": _of_kind(IntervalKind.DETOKENIZE, True),
    "slow_reader": _of_kind(IntervalKind.SEND, True),
    "unattributed": _of_kind(IntervalKind.UNATTRIBUTED, True),
}

DECODE_RULES: dict[str, Rule] = {
    "model_size": _model_size,
    "context_length": _context_length,
    "threads": _hardware("threads"),
    "isa": _hardware("isa"),
    "contention": _contention(False),
    "decode_batching": _of_kind(IntervalKind.BATCHING, False),
    "cache_pressure": _cache_pressure,
    "stalls": _of_kind(IntervalKind.STALL, False),
    "slow_reader": _slow_reader,
    "detokenize": _of_kind(IntervalKind.DETOKENIZE, False),
    "sampling": _sampling,
    "step_overhead": _step_overhead,
    "unknown_bound": _unknown_bound,
    "unattributed": _of_kind(IntervalKind.UNATTRIBUTED, False),
}
