"""What to change about each kind of time, and what that would save, by the cost model.

One function a kind: a sentence with its numbers, and a lever if there is one. Where nothing is known of the engine (a
saved ledger) the lever is named without a prediction. Not for dividing time (`ledger.py`), nor for choosing what
matters (`diagnosis.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twinphase.batch import StepWork
from twinphase.explain.evidence import Evidence
from twinphase.phases.cost import FEATURES
from twinphase.phases.hardware import memory_seconds
from twinphase.phases.timeline import Interval, IntervalKind
from twinphase.request import MissReason

__all__ = ["ABOUT", "NEW_CONTENT", "WORTH_NAMING", "About", "Lever", "duration", "length", "missed_prefix",
           "more_blocks", "rank"]  # fmt: skip

DECODE_CONTEXTS = FEATURES.index("decode_contexts")
WORTH_NAMING = 0.1  # of the time in question
SMALL_CHUNK = 64  # tokens
NEW_CONTENT = {"question", "tool_result"}  # prompt parts that nobody expects to find cached


@dataclass(frozen=True)
class Lever:
    """Something to change.

    Attributes:
        flag: of the command line, or "prompt", "model", ...
        advice: one sentence.
        saved_seconds: of this request's wall time, by the cost model; None where it cannot tell.
        addressed_seconds: of it that the lever works on: at most these can be saved. None is unknown.
    """

    flag: str
    advice: str
    saved_seconds: float | None = None
    addressed_seconds: float | None = None


About = tuple[str, Lever | None]


def rank(levers: Iterable[Lever]) -> tuple[Lever, ...]:
    """The most predicted gain first, then those without a prediction, by the time that they address.

    Of several with a flag the first of these.
    """
    ordered = sorted(
        levers,
        key=lambda one: (one.saved_seconds is None, -(one.saved_seconds or 0.0), -(one.addressed_seconds or 0.0)),
    )
    by_flag: dict[str, Lever] = {}
    for lever in ordered:
        by_flag.setdefault(lever.flag, lever)
    return tuple(by_flag.values())


def duration(seconds: float) -> str:
    """For a reader."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def length(interval: Interval) -> float:
    """Seconds."""
    return interval.end - interval.start


def more_blocks(evidence: Evidence, effect: str, saved: float | None = None) -> Lever:
    """A larger KV cache; `effect` is what it would do."""
    blocks = evidence.machine.config.num_kv_blocks if evidence.machine else None
    advice = f"--num-kv-blocks {2 * blocks} would {effect}" if blocks else f"More --num-kv-blocks would {effect}"
    return Lever("--num-kv-blocks", advice, saved)


def _queue(evidence: Evidence, spent: float) -> About:
    reasons: Counter[str] = Counter()
    for interval in evidence.intervals(IntervalKind.QUEUE):
        reasons[interval.reason] += round(1e9 * length(interval))
    config = evidence.machine.config if evidence.machine else None
    reason, sentence = reasons.most_common(1)[0][0], f"It waited {duration(spent)} to be let in"
    if reason == "seats":
        if config is None:
            return f"{sentence}: all seats were taken.", Lever("--max-num-seqs", "More --max-num-seqs would seat more.")
        seats = config.max_num_seqs
        now, then = (evidence.decode_step(count) or 0.0 for count in (seats, 2 * seats))
        advice = (
            f"--max-num-seqs {2 * seats} would seat twice as many; a decode step of a full engine would then take "
            f"{duration(then)} in place of {duration(now)}."
        )
        return f"{sentence}: all {seats} seats were taken.", Lever("--max-num-seqs", advice)
    if reason == "blocks":
        smaller = config is None or config.kv_cache_dtype != "int8"
        more = ", or --kv-cache-dtype int8, which holds more in as much memory" if smaller else ""
        return f"{sentence}: the KV cache had no room.", more_blocks(evidence, f"hold twice as many tokens{more}.")
    if reason == "budget":
        slo = " or a longer --itl-slo-ms" if config and config.itl_slo_ms else ""
        advice = f"A larger --max-num-batched-tokens{slo} would let prompts in sooner, at the price of longer steps."
        return f"{sentence}: others' tokens filled each step.", Lever("--max-num-batched-tokens", advice)
    if reason == "grammar":
        return f"{sentence}: the grammar of its structured output was being compiled.", None
    if reason == "prefix":
        return f"{sentence}: the beginning of its prompt was being computed for another.", None
    if not evidence.detailed:
        return f"{sentence}; the file does not say for what.", None
    return f"{sentence}, while the step in progress was finished.", None


def missed_prefix(evidence: Evidence) -> Lever | None:
    """How to have a longer cached prefix; None where what was computed was new, or nobody may share it.

    What it would save is said only of tokens that were cached once, by their hash.
    """
    miss, config = evidence.request.prefix_miss, evidence.machine.config if evidence.machine else None
    if miss is None or miss.reason in (MissReason.NEVER_SEEN, MissReason.SALT):
        return None
    own = evidence.timeline.seconds(IntervalKind.PREFILL)
    if miss.reason is MissReason.EVICTED:
        if not evidence.num_known:
            return more_blocks(evidence, "keep twice as much.")
        saved = own * evidence.known_part
        return more_blocks(evidence, f"keep twice as much. It would save up to {duration(saved)}.", saved)
    if miss.reason is MissReason.BLOCK_GRANULARITY:
        if not miss.token_index:
            return None  # a prompt shorter than a block is as good as new
        advice = (
            f"A smaller --block-size would share more of what follows token {miss.token_index}, if it was sent before."
        )
        return Lever("--block-size", advice, None, own)
    if miss.reason is MissReason.DISABLED:
        advice = "--enable-prefix-caching would share the beginnings that prompts have in common."
        return Lever("--enable-prefix-caching", advice, None, own)
    if miss.part in NEW_CONTENT or miss.token_index < (config.block_size if config else 16):
        return None  # every chat begins with the template's first tokens
    where = f" of the {miss.part} part" if miss.part else ""
    advice = (
        f"If what follows token {miss.token_index}{where} was sent before: put what changes there behind what stays "
        "the same."
    )
    return Lever("prompt", advice, None, own)


def _prefill(evidence: Evidence, spent: float) -> About:
    sentence = f"Reading {evidence.num_computed} prompt tokens took {duration(spent)} of its own."
    return sentence, missed_prefix(evidence)  # what is new costs its arithmetic


def _prefill_wait(evidence: Evidence, spent: float) -> About:
    config = evidence.machine.config if evidence.machine else None
    sentence = f"While its prompt was read, {duration(spent)} went to other requests in the same steps."
    if evidence.timeline.prefill.steps == 1:
        return sentence, None  # nothing was cut
    if config and config.itl_slo_ms:
        advice = f"A longer --itl-slo-ms than {config.itl_slo_ms:g} allows larger chunks, and longer gaps for others."
        return sentence, Lever("--itl-slo-ms", advice)
    if config and config.scheduling_policy == "priority":
        return sentence, Lever("priority", "A lower priority number would put this request before others.")
    advice = "--scheduling-policy priority and a lower priority number would put this request first."
    return sentence, Lever("--scheduling-policy", advice)


def _stall(evidence: Evidence, spent: float) -> About:
    stalls = evidence.intervals(IntervalKind.STALL)
    if not evidence.detailed or evidence.machine is None:
        sentence = f"Prompt chunks of others held its decode up for {duration(spent)}."
        advice = "--itl-slo-ms would cut others' prompts into smaller chunks: it shortens the worst gap; the sum stays."
        return sentence, Lever("--itl-slo-ms", advice)
    tokens, worst = sum(stall.prefill_tokens for stall in stalls), max(stalls, key=length)
    sentence = (
        f"{tokens} prompt tokens of {_others(evidence, stalls)} held its decode up for {duration(spent)} in "
        f"{len(stalls)} steps, for {duration(length(worst))} in step {worst.step}."
    )
    model, step = evidence.machine.cost_model, evidence.decode_step(evidence.together) or 0.0
    extra = model.seconds(StepWork.of_chunk(worst.prefill_tokens, SMALL_CHUNK, False)) - model.seconds(StepWork())
    slo, now = 1e3 * model.slo_seconds(step + extra), evidence.machine.config.itl_slo_ms
    if now is not None and now <= slo:
        advice = f"--itl-slo-ms {now:g} cuts chunks small already; fewer seats leave more of it to prefill."
        return sentence, Lever("--max-num-seqs", advice)
    advice = (
        f"--itl-slo-ms {max(1, round(slo))} would cut others' prompts into chunks of about {SMALL_CHUNK} tokens: each "
        f"would add {duration(extra)} to a gap in place of {duration(length(worst))}. It shortens the worst gap; the "
        "sum stays, and their first tokens come later."
    )
    return sentence, Lever("--itl-slo-ms", advice)


def _batching(evidence: Evidence, spent: float) -> About:
    together = evidence.together
    if not evidence.timeline.decode.decodes:  # the ledger has sums only
        advice = "Fewer --max-num-seqs would shorten decode steps, but others would wait longer to be let in."
        return f"Decoding together with others cost it {duration(spent)}.", Lever("--max-num-seqs", advice)
    others = f"about {together - 1} others" if together > 1 else "another at times"
    sentence = f"Decoding together with {others} cost it {duration(spent)}."
    fewer = together // 2
    if not fewer:
        return sentence, None
    now, then = (evidence.decode_step(count) for count in (together, fewer))
    shorter = "" if now is None or then is None else f" from {duration(now)} to {duration(then)}"
    advice = f"--max-num-seqs {fewer} would shorten decode steps{shorter}, but others would wait longer to be let in."
    return sentence, Lever("--max-num-seqs", advice)  # which of them would wait, and for how long, is not predicted


def _decode(evidence: Evidence, spent: float) -> About:
    steps, machine = evidence.decode_steps, evidence.machine
    each = f", {duration(spent / steps)} a token" if steps else ""
    sentence = f"Its own decoding took {duration(spent)}{each}."
    if machine is not None and steps:
        kv_cache = min(spent, machine.cost_model.prices[DECODE_CONTEXTS] * evidence.mean_context * steps)
        if machine.config.kv_cache_dtype != "int8" and kv_cache > WORTH_NAMING * spent:
            shape = machine.shape
            full = shape.kv_token_bytes or 1
            small = 2 * shape.num_layers * shape.num_kv_heads * (shape.head_dim + 4)
            saved = max(0.0, 1 - small / full) * kv_cache
            advice = (
                f"--kv-cache-dtype int8 would read {small / full:.0%} of the KV bytes, which saves about "
                f"{duration(saved)}."
            )
            return sentence, Lever("--kv-cache-dtype", advice, saved)
    if evidence.efficiency("decode").bound != "memory":
        return sentence, None
    advice = "A file of the model with fewer bits a weight, or a smaller model, is read faster in each step."
    if machine is None or not steps:
        return sentence, Lever("model", advice)
    weights = machine.shape.linear_bytes + machine.shape.head_bytes
    halved = memory_seconds(weights // 2, evidence.timeline.decode.bytes / steps, machine.ceilings)
    if halved is None:
        return sentence, Lever("model", advice)
    saved = min(spent, halved * steps)
    return sentence, Lever("model", f"{advice} Half the bytes would save about {duration(saved)}.", saved)


def _recompute(evidence: Evidence, spent: float) -> About:
    request = evidence.request
    sentence = (
        f"It lost its KV {request.num_preemptions} times to others and computed {request.num_recomputed_tokens} tokens "
        f"again, in {duration(spent)}."
    )
    return sentence, more_blocks(evidence, "hold twice as many tokens.", spent)


def _text(kind: str) -> Callable[[Evidence, float], About]:
    def about(evidence: Evidence, spent: float) -> About:
        return f"{kind} took {duration(spent)}.", None

    return about


def _others(evidence: Evidence, stalls: list[Interval]) -> str:
    """Who held it up: their ids where those are the asker's own, else only how many they were."""
    names = list(dict.fromkeys(name for stall in stalls for name in stall.caused_by))
    if not names:
        return "others"
    others = f"{len(names)} other request" + ("s" if len(names) > 1 else "")
    if not evidence.names:
        return others
    return f"{others} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


ABOUT: dict[IntervalKind, Callable[[Evidence, float], About]] = {
    IntervalKind.TOKENIZE: _text("Tokenizing"),
    IntervalKind.QUEUE: _queue,
    IntervalKind.PREFILL: _prefill,
    IntervalKind.PREFILL_WAIT: _prefill_wait,
    IntervalKind.RECOMPUTE: _recompute,
    IntervalKind.DECODE: _decode,
    IntervalKind.BATCHING: _batching,
    IntervalKind.STALL: _stall,
    IntervalKind.DETOKENIZE: _text("Turning tokens into text"),
    IntervalKind.SEND: _text("Handing text to its reader, or waiting for that,"),
    IntervalKind.UNATTRIBUTED: _text("What the engine did not name"),
}
