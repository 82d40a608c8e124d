"""The causes of a bad time to first token, as rules over what passed before it.

Its own prefill is divided between waiting for a processor, being cold, a prefix that was cached once and had to make
room, and reading: no second is claimed twice. A rule gives seconds only where they are known; not for the order in
which causes are listed (`diagnosis.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import ABOUT, WORTH_NAMING, Lever, duration, missed_prefix
from twinphase.phases.timeline import IntervalKind, PhaseTotals
from twinphase.request import MissReason

__all__ = ["PREFILL_RULES", "Found", "Rule", "part", "prefix_sentence"]

COLD_STEPS = 4  # a prompt that began in the engine's first steps may have found it cold
COLD_FACTOR = 2.0  # and did, if it took so many times what it would take now

Found = tuple[float | None, str, Lever | None]  # seconds, None where they are not known; evidence; lever
Rule = Callable[[Evidence], Found | None]


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


def part(own: float, totals: PhaseTotals, seconds: float) -> float:
    """The request's part of what its steps spent on something, by its part of them."""
    return min(own, own * seconds / totals.seconds) if totals.seconds > 0 else 0.0


def _of_kind(kind: IntervalKind) -> Rule:
    """A cause that is a kind of interval."""

    def rule(evidence: Evidence) -> Found | None:
        seconds = evidence.first[kind]
        return (seconds, *ABOUT[kind](evidence, seconds)) if seconds > 0 else None

    return rule


def _parts(evidence: Evidence) -> tuple[float, float, float, float]:
    own = evidence.first[IntervalKind.PREFILL]
    waited = part(own, evidence.timeline.prefill, evidence.timeline.prefill.cpu_wait)
    own -= waited
    expected, cold = evidence.prefill_alone(), 0.0
    first_step = min((interval.step for interval in evidence.intervals(IntervalKind.PREFILL)), default=-1)
    if expected and 0 <= first_step < COLD_STEPS and own > COLD_FACTOR * expected:
        cold = own - expected
    own -= cold
    evicted = own * evidence.known_part
    return waited, cold, evicted, own - evicted


def _prompt_length(evidence: Evidence) -> Found | None:
    *_, seconds = _parts(evidence)
    if seconds <= 0:
        return None
    sentence, _ = ABOUT[IntervalKind.PREFILL](evidence, evidence.first[IntervalKind.PREFILL])
    near = evidence.efficiency("prefill")
    if near.bound != "unknown":
        sentence += f" Bound by {near.bound}" + (f", MFU {near.mfu:.0%}." if near.mfu is not None else ".")
    miss = evidence.request.prefix_miss
    if miss is not None and miss.reason is MissReason.SALT:
        sentence += " It is the first of its cache_salt (or API key): others' tokens are not shared with it."
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
    cold, lead = _parts(evidence)[1], sum(evidence.before.values())
    if cold + lead <= 0:
        return None
    sentences = []
    if lead:
        sentences.append(", ".join(f"{name} took {duration(spent)}" for name, spent in evidence.before.items()) + ".")
    if cold:
        sentences.append(
            f"It was one of the engine's first prompts, and took {duration(cold)} more to read than the same would now."
        )
    advice = "A server that runs, or a request sent before, has paid for loading, compiling and touching memory."
    # Loading is no time of the request: a lever is ranked by what was cold of that alone.
    return cold + lead, " ".join(sentences), Lever("twinphase serve", advice, cold or None, cold)


def _missed(evidence: Evidence) -> Found | None:
    """Seconds only of what was cached for certain: that a prompt shares its beginning proves nothing of the rest."""
    own, lever = evidence.first[IntervalKind.PREFILL], missed_prefix(evidence)
    if evidence.request.prefix_miss is None or lever is None:
        return None
    sentence, seconds = prefix_sentence(evidence), _parts(evidence)[2]
    if seconds > 0:
        sentence += f" Computing {evidence.num_known} of these tokens again took about {duration(seconds)}."
        return seconds, sentence, Lever(lever.flag, lever.advice, min(seconds, lever.saved_seconds or seconds))
    if own < WORTH_NAMING * sum(evidence.first.values()):
        return None
    return None, f"{sentence} Whether the rest was sent before is not known.", lever


def _contention(evidence: Evidence) -> Found | None:
    return contended(_parts(evidence)[0])


def contended(seconds: float) -> Found | None:
    """Of either phase."""
    if seconds <= 0:
        return None
    sentence = f"Its steps could have run and had no processor for {duration(seconds)}: other programs used them."
    advice = "Stop what else runs, or give the engine processors of its own (taskset, cgroups)."
    return seconds, sentence, Lever("machine", advice, seconds)


PREFILL_RULES: dict[str, Rule] = {
    "prompt_length": _prompt_length,
    "queue": lambda evidence: _queue(evidence, False),
    "prefill_batching": _of_kind(IntervalKind.PREFILL_WAIT),
    "cold_start": _cold_start,
    "missed_prefix": _missed,
    "cache_pressure": _of_kind(IntervalKind.RECOMPUTE),
    "contention": _contention,
    "grammar": lambda evidence: _queue(evidence, True),
    "tokenize": _of_kind(IntervalKind.TOKENIZE),
    "detokenize": _of_kind(IntervalKind.DETOKENIZE),
    "slow_reader": _of_kind(IntervalKind.SEND),
    "unattributed": _of_kind(IntervalKind.UNATTRIBUTED),
}
