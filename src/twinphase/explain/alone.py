"""What a request would have taken with the engine to itself: measured where it was alone, else by the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import duration, percent
from twinphase.phases.timeline import IntervalKind

# What sharing its own steps costs a request, and what a full engine or a full cache costs it
# besides.
SHARING = (
    IntervalKind.PREFILL_WAIT,
    IntervalKind.BATCHING,
    IntervalKind.STALL,
    IntervalKind.RECOMPUTE,
)
NOT_ITS_OWN = {*SHARING, IntervalKind.QUEUE}
OTHERS_REASONS = {"seats", "blocks", "budget", "prefix"}  # to queue


@dataclass(frozen=True)
class Alone:
    """A request with the engine to itself, and its cached tokens as they were.

    Attributes:
        seconds: prefill + decode + everything measured that is neither of them nor others'
            (tokenizing, text, ...); None where it cannot be told.
        prefill_seconds, decode_seconds: by the cost model.
        own_shares: this request's shares of the steps that it was in, prefill + decode; alone it
            would not take more.
        verdict: "alone": it was, and `seconds` was measured; "predicted"; or "unknown": the cost
            model is further off from `own_shares` than it usually errs.
    """

    seconds: float | None
    ttft: float | None  # until the first token; None where it cannot be told
    tpot: float | None  # per token after it; None as `ttft`, and below two output tokens
    prefill_seconds: float
    decode_seconds: float
    own_shares: float
    verdict: str = "predicted"


def had_it_run_alone(evidence: Evidence) -> Alone | None:
    """The same request in an empty engine; None without a cost model.

    Where nobody else was in its steps, its own times are the answer. Otherwise it is the cost
    model's: prefill in chunks as the engine cuts them, then a step per token at its context; never
    more than the measured shares.
    """
    prefill = evidence.prefill_alone()
    if prefill is None or evidence.machine is None:
        return None
    num_decoded = max(0, evidence.request.num_output_tokens - 1)
    # A step's time is linear in its context, so that the mean context gives the mean time. With
    # drafts, alone it would have taken about as many steps, since what is drafted is its own text.
    steps = evidence.timeline.decode.steps if evidence.request.num_draft_tokens else num_decoded
    decode = steps * (evidence.decode_step(1, evidence.num_prompt + (num_decoded + 1) / 2) or 0.0)
    own_prefill, own_decode = (
        evidence.timeline.seconds(kind) for kind in (IntervalKind.PREFILL, IntervalKind.DECODE)
    )
    own = own_prefill + own_decode
    left_out = {*NOT_ITS_OWN, IntervalKind.PREFILL, IntervalKind.DECODE}
    before = sum(seconds for kind, seconds in evidence.first.items() if kind not in left_out)
    after = sum(seconds for kind, seconds in evidence.later.items() if kind not in left_out)
    verdict = "predicted"
    taken = (min(prefill, own_prefill), min(decode, own_decode))
    if not _shared_steps(evidence):
        queues = evidence.intervals(IntervalKind.QUEUE)
        queued = sum(queue.end - queue.start for queue in queues if queue.reason in OTHERS_REASONS)
        verdict = "predicted" if queued else "alone"
        taken = (own_prefill, own_decode)
        before += max(0.0, evidence.first[IntervalKind.QUEUE] - queued)
    elif _beyond_its_error(prefill + decode, own, evidence):
        return Alone(None, None, None, prefill, decode, own, "unknown")
    tpot = (taken[1] + after) / num_decoded if num_decoded else None
    return Alone(
        before + sum(taken) + after, before + taken[0], tpot, prefill, decode, own, verdict
    )


def _shared_steps(evidence: Evidence) -> bool:
    """Whether somebody else was in its steps, or took its place."""
    decode = evidence.timeline.decode
    return (
        any(evidence.timeline.seconds(kind) > 0 for kind in SHARING)
        or evidence.timeline.prefill.decodes > 0
        or decode.decodes > decode.steps
    )


def _beyond_its_error(predicted: float, own: float, evidence: Evidence) -> bool:
    """Whether the prediction is further off than 95 % of the model's last ones."""
    p95 = evidence.model_error.p95 if evidence.model_error else None
    return abs(predicted - own) > own * p95 if p95 is not None else predicted > own


def alone_sentences(found: Mapping[str, Any]) -> list[str]:
    """What to say about it, of an explanation as plain values."""
    alone = found.get("alone")
    error = found.get("error") or {}
    if not alone:
        return ["Unknown: there is no cost model of the engine that served it."]
    if alone["verdict"] == "alone":
        return ["It was alone: no other request was in any of its steps."]
    by_model = (
        f"By the cost model prefill takes {duration(alone['prefill_seconds'])} and decode "
        f"{duration(alone['decode_seconds'])}; its shares of the steps it was in were "
        f"{duration(alone['own_shares'])} "
        "together."
    )
    if alone["seconds"] is None:
        rows = [
            "It cannot be told: the cost model is further from what was measured than it usually "
            "errs.",
            by_model,
        ]
    else:
        tpot = "unknown" if alone["tpot"] is None else duration(alone["tpot"])
        rows = [
            f"{duration(alone['seconds'])} instead of "
            f"{duration(found['waterfall']['wall_seconds'])}: first token "
            f"after {duration(alone['ttft'])}, then {tpot} per token.",
            by_model,
        ]
    if error.get("median") is not None:
        rows.append(
            f"The model's last {error['steps']} predictions had a median error of "
            f"{percent(error['median'])}, and "
            f"{percent(error['p95'])} at the 95th percentile."
        )
    return rows
