"""The sentence and the lever of each cause of slow tokens after the first."""

from __future__ import annotations

from twinphase.batch import StepWork
from twinphase.explain.attribution import nearest_ceiling
from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import About, Lever, duration, percent
from twinphase.phases.hardware import NEITHER
from twinphase.phases.timeline import Interval, IntervalKind
from twinphase.phases.work import weight_bytes_read
from twinphase.request import SamplingParams

# Chunk size for which the effect of --itl-slo-ms is predicted.
SMALL_CHUNK_TOKENS = 64


def model_size(evidence: Evidence, seconds: float) -> About:
    near = evidence.efficiency("decode")
    machine = evidence.machine
    shape = machine.shape if machine else None
    size = f" of {weight_bytes_read(shape, 1, 1) / 1e6:,.0f} MB" if shape else ""
    sentence = f"Each token goes through the whole model{size}"
    if shape and shape.num_experts:
        sentence += (
            f", of whose experts it uses {shape.experts_per_row} of {shape.num_experts} per layer"
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


def context_length(evidence: Evidence, seconds: float) -> About:
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


def threads(evidence: Evidence, seconds: float) -> About:
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


def isa(evidence: Evidence, seconds: float) -> About:
    forced, best = (
        (evidence.machine.config.isa, evidence.machine.best_isa)
        if evidence.machine
        else (None, None)
    )
    sentence = f"--isa {forced} is forced on a processor that has {best}."
    return sentence, Lever("--isa", f"Without --isa, {best} is chosen.")


def decode_batching(evidence: Evidence, seconds: float) -> About:
    together = evidence.together
    others = (
        "others" if together < 2 else f"about {together - 1} other{'s' if together > 2 else ''}"
    )
    sentence = f"Decoding together with {others} took {duration(seconds)} of it."
    seats = "A lower --max-num-seqs"
    shorter = ""
    if evidence.timeline.decode.decodes:  # The timeline is detailed; otherwise there are only sums.
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
    # The longer queueing of other requests is not predicted.
    return sentence, Lever("--max-num-seqs", advice)


def stalls(evidence: Evidence, seconds: float) -> About:
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
        worst.prefill_tokens, SMALL_CHUNK_TOKENS, False, evidence.machine.shape.window
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
        f"{SMALL_CHUNK_TOKENS} tokens, each "
        f"adding {duration(extra)} to a gap instead of {duration(_length(worst))}. That shortens "
        "the longest gap, not "
        "their sum, and others' first tokens come later."
    )
    return sentence, Lever("--itl-slo-ms", advice)


def rejected_drafts(evidence: Evidence, seconds: float) -> About:
    request = evidence.request
    rejected = request.num_draft_tokens - request.num_accepted_draft_tokens
    advice = "--speculative-config none drafts nothing; then accepted drafts save nothing either."
    return f"Computing {rejected} rejected drafts took {duration(seconds)}.", Lever(
        "--speculative-config", advice
    )


def speculation_sentence(evidence: Evidence) -> str | None:
    """A sentence on the gain and the cost of speculation; None if no draft was verified."""
    request = evidence.request
    totals = evidence.timeline.decode
    if not request.num_draft_tokens or not totals.steps:
        return None
    spent = [
        duration(evidence.timeline.seconds(kind))
        for kind in (IntervalKind.DRAFTING, IntervalKind.REJECTED)
    ]
    per_step = totals.tokens / totals.steps
    return (
        f"Speculation: {request.num_accepted_draft_tokens} of {request.num_draft_tokens} draft "
        f"tokens were accepted, which gave {per_step:.2f} tokens per decode step; drafting took "
        f"{spent[0]}, and computing rejected drafts {spent[1]}."
    )


def _length(interval: Interval) -> float:
    return interval.end - interval.start


def _others(evidence: Evidence, stalls: list[Interval]) -> str:
    """The other requests, as ids if the caller may see them, else as a number."""
    names = list(dict.fromkeys(name for stall in stalls for name in stall.caused_by))
    if not names:
        return "others"
    others = f"{len(names)} other request" + ("s" if len(names) > 1 else "")
    return (
        f"{others} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        if evidence.names
        else others
    )


def sampling(evidence: Evidence, seconds: float) -> About:
    # Unknown parameters count as greedy, so that no lever is reported for them.
    params = evidence.request.sampling_params or SamplingParams(temperature=0.0)
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
    # The time of greedy sampling is unknown.
    lever = (
        Lever("sampling", f"It asked for {asked}; plain greedy decoding chooses fastest.")
        if asked
        else None
    )
    return f"Choosing its tokens took {duration(seconds)}.", lever


def kernels_below_peak(evidence: Evidence, seconds: float) -> About:
    name, value = nearest_ceiling(evidence)
    metric = {"memory": "MBU", "compute": "MFU"}.get(name)
    sentence = (
        f"Its kernels took {duration(seconds)} longer than memory and arithmetic at their measured "
        f"peaks would, of the {duration(evidence.later[IntervalKind.DECODE])} of its own decoding"
    )
    return sentence + (f" ({metric} {percent(value)})." if metric else "."), None


def unknown_bound(evidence: Evidence, seconds: float) -> About:
    steps = evidence.timeline.decode.steps
    each = f", {duration(seconds / steps)} per token" if steps else ""
    return f"Its own decoding took {duration(seconds)}{each}. What bounds it is unknown.", None
