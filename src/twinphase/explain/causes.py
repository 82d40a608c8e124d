"""What to say of each cause: a sentence or two with its numbers, and what would change it.

Where nothing is known of the engine (a saved ledger), a lever is named without a prediction. Not
for the seconds of a cause (`attribution.py`), nor for which causes matter (`diagnosis.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from twinphase.batch import StepWork
from twinphase.explain.attribution import nearest_ceiling
from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import Lever, duration, percent
from twinphase.outcome import MissReason
from twinphase.phases.hardware import NEITHER
from twinphase.phases.timeline import Interval, IntervalKind
from twinphase.phases.work import weight_bytes_read
from twinphase.request import SamplingParams

SMALL_CHUNK = 64  # tokens
NEW_CONTENT = {"question", "tool_result"}  # prompt parts that nobody expects to find cached
MISS_SENTENCES = {
    MissReason.DIVERGED: "at token {} the prompt departs from the cached ones",
    MissReason.BLOCK_GRANULARITY: "from token {} on, less than a block is left to share",
    MissReason.SALT: "nothing is cached under its cache_salt (or API key) yet, and nothing is "
    "shared across them",
    MissReason.EVICTED: "what follows token {} was cached once and has been evicted",
    MissReason.NEVER_SEEN: "what follows token {} is new",
    MissReason.PROMPT_LOGPROBS: "log probabilities of the prompt need all of it computed",
}
OWN_WEIGHT = (
    "A larger --tenant-weight for its key would give it more of the engine while others ask too."
)
About = tuple[str, Lever | None]


# The time to first token


def _prompt_length(evidence: Evidence, seconds: float) -> About:
    near = evidence.efficiency("prefill")
    miss = evidence.request.prefix_miss
    sentence = f"Computing its {evidence.num_computed} new prompt tokens took {duration(seconds)}."
    if near.bound != "unknown":
        sentence += f" Bound by {near.bound}" + (
            f", MFU {percent(near.mfu)}." if near.mfu is not None else "."
        )
    if miss is not None and miss.reason is MissReason.SALT:
        sentence += (
            " It is the first of its cache_salt (or API key): others' tokens are not "
            "shared with it."
        )
    whole = evidence.prefill_alone()
    half = evidence.prefill_alone(evidence.num_computed // 2)
    saved = seconds * max(0.0, 1 - half / whole) if whole and half is not None else None
    much = (
        f" Half as many new tokens would save about {duration(saved)}." if saved is not None else ""
    )
    return sentence, Lever("prompt", f"A shorter prompt takes less time to compute.{much}", saved)


def _queue(evidence: Evidence, seconds: float) -> About:
    by_reason: dict[str, float] = {}
    for interval in evidence.intervals(IntervalKind.QUEUE):
        by_reason[interval.reason] = by_reason.get(interval.reason, 0.0) + _length(interval)
    by_reason.pop("grammar", None)
    reason = max(by_reason, key=lambda name: by_reason[name], default="")
    waited = f"It waited {duration(seconds)} to be admitted"
    others = min(seconds, sum(one.other_tenants for one in evidence.intervals(IntervalKind.QUEUE)))
    if others >= seconds / 2:
        sentence = (
            f"{waited}, for {duration(others)} of it while another tenant's requests were computed."
        )
        return sentence, Lever(
            "--tenant-weight", f"{OWN_WEIGHT} Priority counts within a tenant only."
        )
    if reason == "seats":
        why, lever = _seats(evidence)
        return f"{waited}: {why}.", lever
    if reason == "blocks":
        smaller = evidence.smaller_kv_cache()
        instead = (
            f", or --kv-cache-dtype {smaller[0]}, which holds more in the same memory"
            if smaller
            else ""
        )
        return f"{waited}: the KV cache was full.", _more_blocks(
            evidence, f"hold twice as many tokens{instead}."
        )
    if reason == "budget":
        slo = (
            " or a longer --itl-slo-ms" if evidence.machine and evidence.machine.slo_seconds else ""
        )
        advice = (
            f"A larger --max-num-batched-tokens{slo} would admit prompts sooner, at the "
            "price of longer steps."
        )
        return f"{waited}: others' tokens filled each step.", Lever(
            "--max-num-batched-tokens", advice
        )
    if reason == "prefix":
        return (
            f"{waited}: the beginning of its prompt was being computed for another request.",
            None,
        )
    why = (
        "while the step in progress was finished"
        if evidence.detailed
        else "the file does not say for what"
    )
    return f"{waited}; {why}.", None


def _seats(evidence: Evidence) -> About:
    if evidence.config is None:
        return "all seats were taken", Lever(
            "--max-num-seqs", "A larger --max-num-seqs would admit more at once."
        )
    seats = evidence.config.max_num_seqs
    budget = evidence.config.max_num_batched_tokens
    why = f"all {seats} seats were taken" if seats > 1 else "the only seat was taken"
    more = min(2 * seats, budget)
    if more <= seats:  # every running request needs a token of each step's budget
        advice = (
            f"--max-num-batched-tokens {2 * seats} with --max-num-seqs {2 * seats} would "
            "admit twice as many."
        )
        return why, Lever("--max-num-batched-tokens", advice)
    now, then = (evidence.decode_step(count) or 0.0 for count in (seats, more))
    advice = (
        f"--max-num-seqs {more} would admit more at once; a decode step of a full engine would "
        "then take "
        f"{duration(then)} instead of {duration(now)}."
    )
    return why, Lever("--max-num-seqs", advice)


def _more_blocks(evidence: Evidence, effect: str, saved: float | None = None) -> Lever:
    blocks = evidence.config.num_kv_blocks if evidence.config else None
    advice = (
        f"--num-kv-blocks {2 * blocks} would {effect}"
        if blocks
        else f"More --num-kv-blocks would {effect}"
    )
    return Lever("--num-kv-blocks", advice, saved)


def _prefill_batching(evidence: Evidence, seconds: float) -> About:
    config = evidence.config
    lever = None
    if evidence.timeline.prefill.steps == 1:
        pass  # nothing was cut
    elif evidence.machine and evidence.machine.slo_seconds:
        advice = (
            f"A longer --itl-slo-ms than {1e3 * evidence.machine.slo_seconds:.3g} allows larger chunks, and "
            "longer gaps for others."
        )
        lever = Lever("--itl-slo-ms", advice)
    elif config and config.scheduling_policy == "priority":
        lever = Lever("priority", "A lower priority number would put this request before others.")
    else:
        advice = (
            "--scheduling-policy priority and a lower priority number would put this request first."
        )
        lever = Lever("--scheduling-policy", advice)
    return (
        f"While its prompt was computed, {duration(seconds)} went to other requests in the same "
        "steps.",
        lever,
    )


def _cold_start(evidence: Evidence, seconds: float) -> About:
    cold = max(0.0, seconds - sum(evidence.before.values()))
    sentence = ", ".join(
        f"{name} took {duration(spent)}" for name, spent in evidence.before.items() if spent > 0
    )
    if cold > 0:
        sentence += (
            f"{'. ' if sentence else ''}It was one of the engine's first prompts: "
            "computing it took "
        )
        sentence += f"{duration(cold)} longer than it would now"
    advice = (
        "A running server, or an earlier request, has already paid for loading, compiling "
        "and touching memory."
    )
    # Loading is not time of the request: the lever is ranked only by what was cold in the request
    # itself.
    return f"{sentence}.", Lever("twinphase serve", advice, cold or None, cold)


def prefix_sentence(evidence: Evidence) -> str:
    """How much of the prompt was cached, and why not more."""
    request = evidence.request
    miss = evidence.request.prefix_miss
    found = f"{request.num_cached_tokens} of {request.num_prompt_tokens} prompt tokens were cached"
    if miss is None:
        return f"{found}."
    if miss.reason is MissReason.DISABLED:
        return "The prefix cache is off (--no-enable-prefix-caching)."
    return f"{found}; {MISS_SENTENCES[miss.reason].format(miss.token_index)}."


def _missed_prefix(evidence: Evidence, seconds: float) -> About:
    sentence = prefix_sentence(evidence)
    lever = _missed_prefix_lever(evidence, seconds)
    if seconds > 0:
        known = (
            f"Computing {evidence.num_known} of these tokens again took about {duration(seconds)}."
        )
        return f"{sentence} {known}", lever
    return f"{sentence} Whether the rest was sent before is not known.", lever


def _missed_prefix_lever(evidence: Evidence, seconds: float) -> Lever | None:
    """How to have a longer cached prefix; None where what was computed was new, or nobody may share it."""
    miss = evidence.request.prefix_miss
    machine = evidence.machine
    own = evidence.timeline.seconds(IntervalKind.PREFILL)
    size = machine.config.block_size if machine else 16
    if miss is None:
        return None
    if miss.reason is MissReason.EVICTED:
        saves = f" It would save up to {duration(seconds)}." if seconds > 0 else ""
        return _more_blocks(evidence, f"keep twice as much.{saves}", seconds or None)
    if miss.reason is MissReason.DISABLED:
        advice = "--enable-prefix-caching would share the beginnings that prompts have in common."
        return Lever("--enable-prefix-caching", advice, None, own)
    if (
        miss.reason is MissReason.BLOCK_GRANULARITY
        and machine
        and miss.token_index
        and size > machine.block_multiple
    ):
        smaller = machine.block_multiple * max(1, size // 2 // machine.block_multiple)
        more = f"would share more of what follows token {miss.token_index}, if it was sent before."
        return Lever("--block-size", f"--block-size {smaller} {more}", None, own)
    # Every chat begins with the template's first tokens: a prompt that departs there is as good as
    # new.
    if (
        miss.reason is MissReason.DIVERGED
        and miss.part not in NEW_CONTENT
        and miss.token_index >= size
    ):
        where = f" of the {miss.part} part" if miss.part else ""
        changed = f"If what follows token {miss.token_index}{where} was sent before"
        return Lever(
            "prompt", f"{changed}: put what changes there behind what stays the same.", None, own
        )
    return None


def _grammar(evidence: Evidence, seconds: float) -> About:
    advice = "Send the same grammar again (compiled ones are kept), or a simpler one."
    sentence = f"Compiling the grammar of its structured output took {duration(seconds)}."
    return sentence, Lever("structured_outputs", advice)


# The time after the first token


def _model_size(evidence: Evidence, seconds: float) -> About:
    near = evidence.efficiency("decode")
    machine = evidence.machine
    shape = machine.shape if machine else None
    size = f" of {weight_bytes_read(shape, 1, 1) / 1e6:,.0f} MB" if shape else ""
    sentence = f"Each token goes through the whole model{size}"
    if shape and shape.num_experts:
        sentence += (
            f" but the experts that it is not sent to ({shape.experts_per_row} of "
            f"{shape.num_experts} are used)"
        )
    advice = "A smaller model, or one with fewer bits per weight, has less to read in each step."
    saved = None
    if near.bound in NEITHER:
        what = "Reading it" if nearest_ceiling(evidence)[0] == "memory" else "Its arithmetic"
        sentence += f". {what} at the measured peak would take this part of the time."
    elif near.bound == "memory":
        saved = seconds / 2
        advice += f" Half the bytes would save about {duration(saved)}."
        sentence += " and is bound by memory" + (
            f", MBU {percent(near.mbu)}." if near.mbu is not None else "."
        )
    else:
        sentence += f" and is bound by {near.bound}."
    return sentence, Lever("model", advice, saved)


def _context_length(evidence: Evidence, seconds: float) -> About:
    smaller = evidence.smaller_kv_cache()
    lever = None
    if smaller is not None and nearest_ceiling(evidence)[0] == "memory":
        dtype, part = smaller
        saved = (1 - part) * seconds
        effect = f"would read {percent(part)} of the KV bytes, and save about {duration(saved)}."
        lever = Lever("--kv-cache-dtype", f"--kv-cache-dtype {dtype} {effect}", saved)
    sentence = (
        f"Each token reads the keys and values of {evidence.num_prompt} prompt tokens and "
        "the output before it."
    )
    return sentence, lever


def _threads(evidence: Evidence, seconds: float) -> About:
    threads = evidence.config and evidence.config.threads
    cores = evidence.cores
    ranks = evidence.config.tensor_parallel_size if evidence.config else 1
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    sentence = f"{threads} of the machine's {cores} processors compute{each}."
    if not seconds:
        lever = Lever("--threads", f"--threads {cores} would use them all.")
        return f"{sentence} What bounds it need not divide among more.", lever
    lever = Lever(
        "--threads",
        f"--threads {cores} would use them all, and save {duration(seconds)} at best.",
        seconds,
    )
    return (
        f"{sentence} It is bound by compute: all of them would save {duration(seconds)} at best.",
        lever,
    )


def _isa(evidence: Evidence, seconds: float) -> About:
    forced, best = (
        (evidence.machine.config.isa, evidence.machine.best_isa)
        if evidence.machine
        else (None, None)
    )
    sentence = f"--isa {forced} is forced on a processor that has {best}."
    return sentence, Lever("--isa", f"Without --isa, {best} is chosen.")


def _decode_batching(evidence: Evidence, seconds: float) -> About:
    together = evidence.together
    others = (
        "others" if together < 2 else f"about {together - 1} other{'s' if together > 2 else ''}"
    )
    sentence = f"Decoding together with {others} took {duration(seconds)} of it."
    seats = "A lower --max-num-seqs"
    shorter = ""
    if evidence.timeline.decode.decodes:  # otherwise the ledger has only sums
        if together < 2:
            return sentence, None
        now, then = (evidence.decode_step(count) for count in (together, together // 2))
        seats = f"--max-num-seqs {together // 2}"
        shorter = (
            "" if now is None or then is None else f" from {duration(now)} to {duration(then)}"
        )
    advice = (
        f"{seats} would shorten decode steps{shorter}, but others would wait longer to be admitted."
    )
    return sentence, Lever(
        "--max-num-seqs", advice
    )  # which of them would wait, and for how long, is not predicted


def _stalls(evidence: Evidence, seconds: float) -> About:
    if not evidence.detailed or evidence.machine is None:
        advice = (
            "would cut others' prompts into smaller chunks: that shortens the longest gap, "
            "not their sum."
        )
        sentence = f"Prompt chunks of other requests held up its decode for {duration(seconds)}."
        return sentence, Lever("--itl-slo-ms", f"--itl-slo-ms {advice}")
    stalls = evidence.intervals(IntervalKind.STALL)
    tokens = sum(stall.prefill_tokens for stall in stalls)
    worst = max(stalls, key=_length)
    sentence = (
        f"{tokens} prompt tokens of {_others(evidence, stalls)} held up its decode for "
        f"{duration(seconds)} in "
        f"{len(stalls)} steps, for {duration(_length(worst))} in step {worst.step} alone."
    )
    foreign = sum(stall.other_tenants for stall in stalls)
    if foreign > 0:
        sentence += f" {duration(foreign)} of that were another tenant's prompts."
    model = evidence.machine.cost_model
    step = evidence.decode_step(evidence.together) or 0.0
    small = StepWork.of_chunk(
        worst.prefill_tokens, SMALL_CHUNK, False, evidence.machine.shape.window
    )
    extra = model.seconds(small) - model.seconds(StepWork())
    slo = 1e3 * model.slo_seconds(step + extra)
    now = evidence.machine.slo_seconds and 1e3 * evidence.machine.slo_seconds
    if now is not None and now <= slo:
        advice = (
            f"--itl-slo-ms {now:.3g} already cuts chunks small; fewer seats leave more of "
            "each step to prefill."
        )
        return sentence, Lever("--max-num-seqs", advice)
    advice = (
        f"--itl-slo-ms {max(1, round(slo))} would cut others' prompts into chunks of about "
        f"{SMALL_CHUNK} tokens, each "
        f"adding {duration(extra)} to a gap instead of {duration(_length(worst))}. That shortens "
        "the longest gap, not "
        "their sum, and others' first tokens come later."
    )
    return sentence, Lever("--itl-slo-ms", advice)


def _rejected_drafts(evidence: Evidence, seconds: float) -> About:
    request = evidence.request
    wrong = request.num_draft_tokens - request.num_accepted_draft_tokens
    advice = "--speculative-config none guesses nothing; then right guesses save nothing either."
    return f"Computing {wrong} wrong guesses took {duration(seconds)}.", Lever(
        "--speculative-config", advice
    )


def speculation_sentence(evidence: Evidence) -> str | None:
    """What guesses brought and cost; None where none was computed."""
    request = evidence.request
    totals = evidence.timeline.decode
    if not request.num_draft_tokens or not totals.steps:
        return None
    spent = [
        duration(evidence.timeline.seconds(kind))
        for kind in (IntervalKind.DRAFTING, IntervalKind.REJECTED)
    ]
    return (
        f"Speculation: {request.num_accepted_draft_tokens} of {request.num_draft_tokens} guessed "
        "tokens were right, "
        f"which gave {totals.tokens / totals.steps:.2f} tokens per decode step; guessing took "
        f"{spent[0]}, and "
        f"computing wrong guesses {spent[1]}."
    )


def _length(interval: Interval) -> float:
    return interval.end - interval.start


def _others(evidence: Evidence, stalls: list[Interval]) -> str:
    """Who held it up: their ids where they are the asker's own, else only how many they were."""
    names = list(dict.fromkeys(name for stall in stalls for name in stall.caused_by))
    if not names:
        return "others"
    others = f"{len(names)} other request" + ("s" if len(names) > 1 else "")
    return (
        f"{others} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        if evidence.names
        else others
    )


def _sampling(evidence: Evidence, seconds: float) -> About:
    params = evidence.request.sampling_params or SamplingParams(
        temperature=0.0
    )  # unknown: nothing is said of it
    wanted = {
        "sampled values": not params.greedy,
        "logprobs": params.logprobs is not None,
        "penalties": params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0,
        "a logit bias": bool(params.logit_bias),
        "a grammar": params.has_form,
    }
    asked = ", ".join(name for name, there in wanted.items() if there)
    # How much of it plain greedy decoding would still take is not known.
    lever = (
        Lever("sampling", f"It asked for {asked}; plain greedy decoding chooses fastest.")
        if asked
        else None
    )
    return f"Choosing its tokens took {duration(seconds)}.", lever


def _step_overhead(evidence: Evidence, seconds: float) -> About:
    sentence = (
        "Scheduling, bookkeeping and what else is neither memory nor arithmetic took "
        f"{duration(seconds)}"
    )
    name, value = nearest_ceiling(evidence)
    metric = {"memory": "MBU", "compute": "MFU"}.get(name)
    own = f" of the {duration(evidence.later[IntervalKind.DECODE])} of its own decoding"
    return f"{sentence}{own}" + (f" ({metric} {percent(value)})." if metric else "."), None


def _unknown_bound(evidence: Evidence, seconds: float) -> About:
    steps = evidence.timeline.decode.steps
    each = f", {duration(seconds / steps)} per token" if steps else ""
    return f"Its own decoding took {duration(seconds)}{each}. What bounds it is unknown.", None


# Both


def _cache_pressure(evidence: Evidence, seconds: float) -> About:
    request = evidence.request
    times = "once" if request.num_preemptions == 1 else f"{request.num_preemptions} times"
    sentence = (
        f"It lost its KV {times} to other requests; waiting for room and computing "
        f"{request.num_recomputed_tokens} "
        f"tokens again took {duration(seconds)}."
    )
    return sentence, _more_blocks(evidence, "hold twice as many tokens.", seconds)


def _contention(evidence: Evidence, seconds: float) -> About:
    advice = "Stop what else runs, or give the engine processors of its own (taskset, cgroups)."
    sentence = (
        f"For {duration(seconds)} its steps were ready to run but had no processor: other "
        "programs used them."
    )
    return sentence, Lever("machine", advice, seconds)


def _rank_wait(evidence: Evidence, seconds: float) -> About:
    sentence = (
        f"For {duration(seconds)} the first of its ranks waited for others, which had "
        "more to do or were slower."
    )
    advice = (
        "Fewer ranks of more threads wait less, and so do as many as divide the KV heads evenly."
    )
    return sentence, Lever("--tensor-parallel-size", advice)


def _slow_reader(evidence: Evidence, seconds: float) -> About:
    sentence = f"Handing text to its reader, or waiting for the reader, took {duration(seconds)}."
    return sentence, Lever(
        "client", "Read the stream as it comes, and do other work elsewhere.", seconds
    )


def _plain(what: str, evidence: Evidence, seconds: float) -> About:
    return f"{what} took {duration(seconds)}.", None


CAUSES: dict[str, Callable[[Evidence, float], About]] = {
    "prompt_length": _prompt_length,
    "queue": _queue,
    "prefill_batching": _prefill_batching,
    "cold_start": _cold_start,
    "missed_prefix": _missed_prefix,
    "grammar": _grammar,
    "model_size": _model_size,
    "context_length": _context_length,
    "threads": _threads,
    "isa": _isa,
    "decode_batching": _decode_batching,
    "stalls": _stalls,
    "drafting": partial(_plain, "Guessing its next tokens"),
    "rejected_drafts": _rejected_drafts,
    "sampling": _sampling,
    "step_overhead": _step_overhead,
    "unknown_bound": _unknown_bound,
    "cache_pressure": _cache_pressure,
    "contention": _contention,
    "rank_wait": _rank_wait,
    "slow_reader": _slow_reader,
    "route": partial(_plain, "Reaching its worker"),
    "transfer": partial(_plain, "Its KV blocks' way to the worker that went on"),
    "tokenize": partial(_plain, "Tokenizing the prompt"),
    "detokenize": partial(_plain, "Turning tokens into text"),
    "unattributed": partial(_plain, "Work that the engine did not name"),
}
