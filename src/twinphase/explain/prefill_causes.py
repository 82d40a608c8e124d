"""The sentence and the lever of each cause of a long time to first token."""

from __future__ import annotations

from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import About, Lever, duration, percent
from twinphase.outcome import MissReason
from twinphase.phases.hardware import BOUND_WORDS
from twinphase.phases.timeline import IntervalKind

# From this number of computed tokens on, a path that is faster for prompts is worth naming.
ISA_ADVICE_TOKENS = 256
# Parts of a prompt that are new in each request.
NEW_CONTENT = {"question", "tool_result"}
MISS_SENTENCES = {
    MissReason.DIVERGED: "at token {} the prompt departs from the cached ones",
    MissReason.BLOCK_GRANULARITY: "from token {} on, less than a block is left to share",
    MissReason.SALT: "nothing is cached under its cache_salt (or API key) yet, and nothing is "
    "shared across them",
    MissReason.EVICTED: "what follows token {} was cached once and has been evicted",
    MissReason.NO_SNAPSHOT: "what follows token {} is cached, but no snapshot of the recurrent "
    "layers' state is there to continue from",
    MissReason.NEVER_SEEN: "what follows token {} is new",
    MissReason.PROMPT_LOGPROBS: "log probabilities of the prompt need all of it computed",
}
OWN_WEIGHT = (
    "A larger --tenant-weight for its key would give it more of the engine while others ask too."
)


def prompt_length(evidence: Evidence, seconds: float) -> About:
    near = evidence.efficiency("prefill")
    miss = evidence.request.prefix_miss
    sentence = f"Computing its {evidence.num_computed} new prompt tokens took {duration(seconds)}."
    if near.bound != "unknown":
        mfu = f", MFU {percent(near.mfu)}." if near.mfu is not None else "."
        words = BOUND_WORDS[near.bound]
        sentence += f" {words[0].upper()}{words[1:]}{mfu}"
    if miss is not None and miss.reason is MissReason.SALT:
        sentence += (
            " It is the first of its cache_salt (or API key): others' tokens are not "
            "shared with it."
        )
    whole = evidence.prefill_alone()
    half = evidence.prefill_alone(evidence.num_computed // 2)
    saved = seconds * max(0.0, 1 - half / whole) if whole and half is not None else None
    gain = (
        f" Half as many new tokens would save about {duration(saved)}." if saved is not None else ""
    )
    advice = f"A shorter prompt takes less time to compute.{gain}"
    machine = evidence.machine
    if machine and machine.prompt_isa and evidence.num_computed >= ISA_ADVICE_TOKENS:
        advice += (
            f" --isa {machine.prompt_isa} computes long prompts faster on this processor, and a "
            "lone answer more slowly."
        )
    return sentence, Lever("prompt", advice, saved)


def queue(evidence: Evidence, seconds: float) -> About:
    by_reason: dict[str, float] = {}
    others = 0.0
    for wait in evidence.intervals(IntervalKind.QUEUE):
        by_reason[wait.reason] = by_reason.get(wait.reason, 0.0) + wait.end - wait.start
        others += wait.other_tenants
    by_reason.pop("grammar", None)
    reason = max(by_reason, key=lambda name: by_reason[name], default="")
    waited = f"It waited {duration(seconds)} to be admitted"
    others = min(seconds, others)
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
    if reason == "states":
        slots = evidence.machine and evidence.machine.config.num_state_slots
        advice = f"--num-state-slots {2 * slots}" if slots else "More --num-state-slots"
        return f"{waited}: all slots for recurrent states were taken.", Lever(
            "--num-state-slots", f"{advice} would let more requests run at once."
        )
    if reason == "blocks":
        smaller = evidence.smaller_kv_cache()
        instead = (
            f", or --kv-cache-dtype {smaller[0]}, which holds more in the same memory"
            if smaller
            else ""
        )
        return f"{waited}: the KV cache was full.", more_blocks(
            evidence, f"hold twice as many tokens{instead}."
        )
    if reason == "budget":
        limited = evidence.machine and evidence.machine.slo_seconds
        slo = " or a longer --itl-slo-ms" if limited else ""
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
    if evidence.detailed:
        return f"{waited}, until the step in progress had finished.", None
    return f"{waited}; the file does not say for what.", None


def _seats(evidence: Evidence) -> About:
    if evidence.config is None:
        return "all seats were taken", Lever(
            "--max-num-seqs", "A larger --max-num-seqs would admit more at once."
        )
    seats = evidence.config.max_num_seqs
    budget = evidence.config.max_num_batched_tokens
    why = f"all {seats} seats were taken" if seats > 1 else "the only seat was taken"
    more = min(2 * seats, budget)
    if more <= seats:  # Every running request needs one token of each step's budget.
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


def more_blocks(evidence: Evidence, effect: str, saved: float | None = None) -> Lever:
    blocks = evidence.config.num_kv_blocks if evidence.config else None
    advice = (
        f"--num-kv-blocks {2 * blocks} would {effect}"
        if blocks
        else f"More --num-kv-blocks would {effect}"
    )
    return Lever("--num-kv-blocks", advice, saved)


def prefill_batching(evidence: Evidence, seconds: float) -> About:
    config = evidence.config
    lever = None
    if evidence.timeline.prefill.steps == 1:
        pass  # The prompt was not divided into chunks.
    elif evidence.machine and evidence.machine.slo_seconds:
        slo_ms = 1e3 * evidence.machine.slo_seconds
        advice = (
            f"A longer --itl-slo-ms than {slo_ms:.3g} allows larger chunks, and "
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


def cold_start(evidence: Evidence, seconds: float) -> About:
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
    # Loading is not part of the request, so only the cold part of its time ranks the lever.
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


def missed_prefix(evidence: Evidence, seconds: float) -> About:
    sentence = prefix_sentence(evidence)
    lever = _missed_prefix_lever(evidence, seconds)
    if seconds > 0:
        known = (
            f"Computing {evidence.num_known} of these tokens again took about {duration(seconds)}."
        )
        return f"{sentence} {known}", lever
    return f"{sentence} Whether the rest was sent before is not known.", lever


def _missed_prefix_lever(evidence: Evidence, seconds: float) -> Lever | None:
    """The lever to cache more of the prompt; None if the computed tokens were new or not shared."""
    miss = evidence.request.prefix_miss
    machine = evidence.machine
    own = evidence.timeline.seconds(IntervalKind.PREFILL)
    size = machine.config.block_size if machine else 16
    if miss is None:
        return None
    if miss.reason is MissReason.EVICTED:
        saves = f" It would save up to {duration(seconds)}." if seconds > 0 else ""
        return more_blocks(evidence, f"keep twice as much.{saves}", seconds or None)
    if miss.reason is MissReason.NO_SNAPSHOT:
        advice = "More --num-state-slots would keep more snapshots, and a smaller --state-interval"
        return Lever("--num-state-slots", f"{advice} would leave them closer together.")
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
    # A prompt that differs within the template's first tokens is new.
    if (
        miss.reason is MissReason.DIVERGED
        and miss.part not in NEW_CONTENT
        and miss.token_index >= size
    ):
        where = f" of the {miss.part} part" if miss.part else ""
        changed = f"If what follows token {miss.token_index}{where} was sent before"
        return Lever(
            "prompt", f"{changed}: put the changing parts after the constant ones.", None, own
        )
    return None


def grammar(evidence: Evidence, seconds: float) -> About:
    advice = "Send the same grammar again (compiled ones are kept), or a simpler one."
    sentence = f"Compiling the grammar of its structured output took {duration(seconds)}."
    return sentence, Lever("structured_outputs", advice)
