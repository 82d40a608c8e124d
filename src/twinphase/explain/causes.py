"""The sentence and the lever of each cause: what was measured, and what would change it.

A saved ledger does not describe its engine, so levers have no predicted gain there.
`attribution.py` computes the seconds of each cause, and `diagnosis.py` selects the causes that
matter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from twinphase.explain import decode_causes as decode
from twinphase.explain import prefill_causes as prefill
from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import About, Lever, duration


def _cache_pressure(evidence: Evidence, seconds: float) -> About:
    request = evidence.request
    times = "once" if request.num_preemptions == 1 else f"{request.num_preemptions} times"
    sentence = (
        f"It was preempted {times}; waiting for free blocks and computing "
        f"{request.num_recomputed_tokens} tokens again took {duration(seconds)}."
    )
    return sentence, prefill.more_blocks(evidence, "hold twice as many tokens.", seconds)


def _contention(evidence: Evidence, seconds: float) -> About:
    advice = "Stop other programs, or give the engine processors of its own (taskset, cgroups)."
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
    "prompt_length": prefill.prompt_length,
    "queue": prefill.queue,
    "prefill_batching": prefill.prefill_batching,
    "cold_start": prefill.cold_start,
    "missed_prefix": prefill.missed_prefix,
    "grammar": prefill.grammar,
    "model_size": decode.model_size,
    "context_length": decode.context_length,
    "threads": decode.threads,
    "isa": decode.isa,
    "decode_batching": decode.decode_batching,
    "stalls": decode.stalls,
    "drafting": partial(_plain, "Drafting its next tokens"),
    "rejected_drafts": decode.rejected_drafts,
    "sampling": decode.sampling,
    "step_overhead": partial(_plain, "Scheduling and bookkeeping around its steps"),
    "kernels_below_peak": decode.kernels_below_peak,
    "unknown_bound": decode.unknown_bound,
    "cache_pressure": _cache_pressure,
    "contention": _contention,
    "rank_wait": _rank_wait,
    "slow_reader": _slow_reader,
    "route": partial(_plain, "Reaching its worker"),
    "transfer": partial(_plain, "Transferring its KV blocks to the worker that continued"),
    "tokenize": partial(_plain, "Tokenizing the prompt"),
    "detokenize": partial(_plain, "Turning tokens into text"),
    "unattributed": partial(_plain, "Work that the engine did not name"),
}
