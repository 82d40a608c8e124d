"""Why a request took as long as it did, in sentences, and which flag would change that by how much.

Reads a timeline; the cost model says what another setting would do. Estimates carry the model's own error. Not for
dividing time (`ledger.py`) nor for drawing (the terminal does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from twinphase.batch import StepWork
from twinphase.config import EngineConfig
from twinphase.phases.cost import FEATURES, CostModel
from twinphase.phases.hardware import Ceilings, bound, compute_seconds, memory_seconds
from twinphase.phases.report import Units, flops_by_unit
from twinphase.phases.timeline import Interval, IntervalKind, PhaseTotals, RequestTimeline
from twinphase.phases.work import ModelShape
from twinphase.request import MissReason, Request

__all__ = ["Explanation", "Lever", "Machine", "explain"]

DECODE_CONTEXTS = FEATURES.index("decode_contexts")
WORTH_NAMING = 0.1  # of the wall time
SMALL_CHUNK = 64  # tokens


@dataclass(frozen=True)
class Lever:
    """Something to change.

    Attributes:
        flag: of the command line, or "prompt", "model".
        advice: one sentence.
        saved_seconds: of this request's wall time, by the cost model; None where it cannot tell.
    """

    flag: str
    advice: str
    saved_seconds: float | None = None


@dataclass(frozen=True)
class Explanation:
    """Where the time went.

    Attributes:
        dominant: the kind of interval with the most time.
        bounds: what held prefill and decode back: "compute", "memory", "overhead" or "unknown".
        sentences: for a reader, most important first.
        levers: what to change, for the kinds of interval that took most first.
    """

    dominant: IntervalKind
    bounds: dict[str, str]
    sentences: tuple[str, ...]
    levers: tuple[Lever, ...]

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *(f"To change it: {lever.advice}" for lever in self.levers)])


@dataclass(frozen=True)
class Machine:
    """What the request ran on; ceilings and units are None where they are not known."""

    config: EngineConfig
    shape: ModelShape
    cost_model: CostModel
    ceilings: Ceilings | None = None
    units: Units | None = None


_About = Callable[[Request, RequestTimeline, float, Machine], tuple[str, Lever | None]]


def explain(request: Request, timeline: RequestTimeline, machine: Machine) -> Explanation:
    """Explain a request that has finished, or has come as far as its timeline tells.

    Args:
        request: with its prefix miss and preemptions.
        timeline: of the request.
        machine: settings, cost model and ceilings.
    """
    totals = {IntervalKind(kind): seconds for kind, seconds in timeline.totals().items()}
    wall = timeline.end - timeline.arrival
    ranked = sorted((kind for kind in totals if totals[kind] > 0), key=lambda kind: -totals[kind])
    if not ranked or wall <= 0:
        return Explanation(IntervalKind.QUEUE, {}, ("Nothing has happened yet.",), ())
    bounds = {
        "prefill": _bound(timeline.prefill, machine),
        "decode": _bound(timeline.decode, machine),
    }
    sentences = [_headline(ranked, totals, wall)]
    levers: list[Lever] = []
    for kind in ranked:
        if totals[kind] >= WORTH_NAMING * wall or kind is ranked[0]:
            sentence, lever = _ABOUT[kind](request, timeline, totals[kind], machine)
            sentences.append(sentence)
            levers += [lever] if lever else []
    sentences += _phases(timeline, bounds) + _prefix(request)
    error = machine.cost_model.error()
    if error.median is not None and error.p95 is not None:
        sentences.append(
            f"Shares and estimates are the cost model's, whose last {error.steps} predictions were off by "
            f"{error.median:.0%} in the middle and {error.p95:.0%} at the 95th percentile."
        )
    return Explanation(ranked[0], bounds, tuple(sentences), tuple(levers))


def _headline(ranked: list[IntervalKind], totals: dict[IntervalKind, float], wall: float) -> str:
    named = ", ".join(f"{totals[kind] / wall:.0%} {kind.value}" for kind in ranked[:4])
    return f"{_time(wall)} in all: {named}."


def _bound(totals: PhaseTotals, machine: Machine) -> str:
    if not totals.steps or machine.units is None:
        return "unknown"
    compute = compute_seconds(flops_by_unit(totals, machine.units), machine.ceilings)
    memory = memory_seconds(totals.bytes, totals.bytes / totals.steps, machine.ceilings)
    return bound(compute, memory, totals.seconds)


def _phases(timeline: RequestTimeline, bounds: dict[str, str]) -> list[str]:
    lines = []
    for name, totals in (("Prefill", timeline.prefill), ("Decode", timeline.decode)):
        if totals.steps:
            limit = bounds[name.lower()]
            what = "" if limit == "unknown" else f", bound by {limit}"
            steps = "1 step" if totals.steps == 1 else f"{totals.steps} steps"
            lines.append(
                f"{name}: {totals.tokens} of its tokens in {steps}; {_time(totals.seconds)} with all others in them"
                f"{what}."
            )
    return lines


def _prefix(request: Request) -> list[str]:
    num_prompt, cached, miss = len(request.prompt_token_ids), request.num_cached_tokens, request.prefix_miss
    found = f"{cached} of {num_prompt} prompt tokens were cached"
    if miss is None or miss.reason is MissReason.DISABLED:
        return [f"{found}."] if miss is None else ["The prefix cache is off (--no-enable-prefix-caching)."]
    why = {
        MissReason.DIVERGED: f"at token {miss.token_index} the prompt leaves the cached ones",
        MissReason.BLOCK_GRANULARITY: f"from token {miss.token_index} on less than a block is left to share",
        MissReason.SALT: "nothing is cached under its cache_salt (or API key) yet, and nothing is shared across them",
        MissReason.EVICTED: f"from token {miss.token_index} on it was cached and had to make room",
        MissReason.NEVER_SEEN: f"from token {miss.token_index} on no full block of it was seen before",
    }
    return [f"{found}; {why[miss.reason]}."]


def _queue(request: Request, timeline: RequestTimeline, spent: float, machine: Machine) -> tuple[str, Lever | None]:
    reasons: Counter[str] = Counter()
    for interval in timeline.intervals:
        if interval.kind is IntervalKind.QUEUE:
            reasons[interval.reason] += round(1e9 * (interval.end - interval.start))
    config, reason = machine.config, reasons.most_common(1)[0][0]
    sentence = f"It waited {_time(spent)} to be let in"
    if reason == "seats":
        seats = config.max_num_seqs
        now, then = (_decode_step(request, machine, count) for count in (seats, 2 * seats))
        advice = (
            f"--max-num-seqs {2 * seats} would seat twice as many; a decode step of a full engine would then take "
            f"{_time(then)} in place of {_time(now)}."
        )
        return f"{sentence}: all {seats} seats were taken.", Lever("--max-num-seqs", advice)
    if reason == "blocks":
        more = (
            "" if config.kv_cache_dtype == "int8" else ", or --kv-cache-dtype int8, which holds more in as much memory"
        )
        advice = f"--num-kv-blocks {2 * (config.num_kv_blocks or 0)} would hold twice as many tokens{more}."
        return f"{sentence}: the KV cache had no room.", Lever("--num-kv-blocks", advice)
    if reason == "budget":
        slo = " or a longer --itl-slo-ms" if config.itl_slo_ms else ""
        advice = f"A larger --max-num-batched-tokens{slo} would let prompts in sooner, at the price of longer steps."
        return f"{sentence}: others' tokens filled each step.", Lever("--max-num-batched-tokens", advice)
    if reason == "grammar":
        return f"{sentence}: the grammar of its structured output was being compiled.", None
    if reason == "prefix":
        return f"{sentence}: the beginning of its prompt was being computed for another.", None
    return f"{sentence}, while the step in progress was finished.", None


def _prefill(request: Request, timeline: RequestTimeline, spent: float, machine: Machine) -> tuple[str, Lever | None]:
    computed, miss = len(request.prompt_token_ids) - request.num_cached_tokens, request.prefix_miss
    sentence = f"Reading {computed} prompt tokens took {_time(spent)} of its own."
    if miss is None or miss.reason in (MissReason.BLOCK_GRANULARITY, MissReason.NEVER_SEEN, MissReason.SALT):
        return sentence, None  # what is new costs its arithmetic
    if miss.reason is MissReason.DIVERGED and miss.token_index < machine.config.block_size:
        return sentence, None  # every chat begins with the template's first tokens
    last = machine.cost_model.seconds(StepWork.of_chunk(len(request.prompt_token_ids) - 1, 1, True))
    saved = max(0.0, spent - last)
    advice = {
        MissReason.DIVERGED: f"Put what changes (from token {miss.token_index} on) behind what stays the same.",
        MissReason.EVICTED: f"--num-kv-blocks {2 * (machine.config.num_kv_blocks or 0)} would keep twice as much.",
        MissReason.DISABLED: "--enable-prefix-caching would share the beginnings that prompts have in common.",
    }[miss.reason]
    flag = {MissReason.EVICTED: "--num-kv-blocks", MissReason.DISABLED: "--enable-prefix-caching"}
    return sentence, Lever(flag.get(miss.reason, "prompt"), f"{advice} It would save up to {_time(saved)}.", saved)


def _prefill_wait(
    request: Request, timeline: RequestTimeline, spent: float, machine: Machine
) -> tuple[str, Lever | None]:
    config = machine.config
    sentence = f"While its prompt was read, {_time(spent)} went to other requests in the same steps."
    if timeline.prefill.steps == 1:
        return sentence, None  # nothing was cut
    if config.itl_slo_ms:
        advice = f"A longer --itl-slo-ms than {config.itl_slo_ms:g} allows larger chunks, and longer gaps for others."
        return sentence, Lever("--itl-slo-ms", advice)
    if config.scheduling_policy == "priority":
        return sentence, Lever("priority", "A lower priority number would put this request before others.")
    advice = "--scheduling-policy priority and a lower priority number would put this request first."
    return sentence, Lever("--scheduling-policy", advice)


def _stall(request: Request, timeline: RequestTimeline, spent: float, machine: Machine) -> tuple[str, Lever | None]:
    stalls = [interval for interval in timeline.intervals if interval.kind is IntervalKind.STALL]
    tokens = sum(stall.prefill_tokens for stall in stalls)
    worst = max(stalls, key=_length)
    sentence = (
        f"{tokens} prompt tokens of others ({_names(stalls)}) held its decode up for {_time(spent)} in {len(stalls)} "
        f"steps, for {_time(_length(worst))} in step {worst.step}."
    )
    model, together = machine.cost_model, _together(timeline)
    extra = model.seconds(StepWork.of_chunk(worst.prefill_tokens, SMALL_CHUNK, False)) - model.seconds(StepWork())
    slo = 1e3 * model.slo_seconds(_decode_step(request, machine, together) + extra)
    now = machine.config.itl_slo_ms
    if now is not None and now <= slo:
        return sentence, Lever(
            "--max-num-seqs",
            f"--itl-slo-ms {now:g} cuts chunks small already; fewer seats leave more of it to prefill.",
        )
    advice = (
        f"--itl-slo-ms {max(1, round(slo))} would cut others' prompts into chunks of about {SMALL_CHUNK} tokens: each "
        f"would add {_time(extra)} to a gap in place of {_time(_length(worst))}; their first tokens would come later."
    )
    return sentence, Lever("--itl-slo-ms", advice)


def _batching(request: Request, timeline: RequestTimeline, spent: float, machine: Machine) -> tuple[str, Lever | None]:
    together = _together(timeline)
    sentence = f"Decoding together with about {max(0, together - 1)} others cost it {_time(spent)}."
    fewer = together // 2
    if not fewer:
        return sentence, None
    now, then = (_decode_step(request, machine, count) for count in (together, fewer))
    saved = max(0.0, (now - then) * timeline.decode.steps)
    advice = (
        f"--max-num-seqs {fewer} would shorten a decode step from {_time(now)} to {_time(then)}, but others would wait "
        "longer to be let in."
    )
    return sentence, Lever("--max-num-seqs", advice, saved)


def _decode(request: Request, timeline: RequestTimeline, spent: float, machine: Machine) -> tuple[str, Lever | None]:
    steps = max(1, timeline.decode.steps)
    sentence = f"Its own decoding took {_time(spent)}, {_time(spent / steps)} a token."
    kv_cache = machine.cost_model.prices[DECODE_CONTEXTS] * request.num_tokens
    if machine.config.kv_cache_dtype != "int8" and kv_cache > WORTH_NAMING * spent / steps:
        shape = machine.shape
        full = shape.kv_token_bytes or 1
        small = 2 * shape.num_layers * shape.num_kv_heads * (shape.head_dim + 4)
        saved = max(0.0, 1 - small / full) * kv_cache * steps
        advice = (
            f"--kv-cache-dtype int8 would read {small / full:.0%} of the KV bytes, which saves about {_time(saved)}."
        )
        return sentence, Lever("--kv-cache-dtype", advice, saved)
    if _bound(timeline.decode, machine) != "memory":
        return sentence, None
    return sentence, Lever("model", "A file of the model with fewer bits a weight is read faster in each step.")


def _recompute(request: Request, timeline: RequestTimeline, spent: float, machine: Machine) -> tuple[str, Lever | None]:
    sentence = (
        f"It lost its KV {request.num_preemptions} times to others and computed {request.num_recomputed_tokens} tokens "
        f"again, in {_time(spent)}."
    )
    advice = f"--num-kv-blocks {2 * (machine.config.num_kv_blocks or 0)} would hold twice as many tokens."
    return sentence, Lever("--num-kv-blocks", advice)


def _text(kind: str) -> _About:
    def about(request: Request, timeline: RequestTimeline, spent: float, machine: Machine) -> tuple[str, Lever | None]:
        return f"{kind} took {_time(spent)}.", None

    return about


def _together(timeline: RequestTimeline) -> int:
    """Requests that decoded in a step, this one included, in the mean."""
    return max(1, round(timeline.decode.decodes / max(1, timeline.decode.steps)))


def _decode_step(request: Request, machine: Machine, count: int) -> float:
    """Predicted time of a step that decodes `count` requests of about this one's length."""
    return machine.cost_model.seconds(StepWork(count, 0, count * request.num_tokens, count, count))


def _names(stalls: list[Interval]) -> str:
    names = list(dict.fromkeys(name for stall in stalls for name in stall.caused_by))
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ("request " if len(names) == 1 else "requests ") + ", ".join(names[:3]) + rest


def _length(interval: Interval) -> float:
    return interval.end - interval.start


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


_ABOUT: dict[IntervalKind, _About] = {
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
