"""A request's time on an otherwise idle engine: measured if it was alone, or else predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import duration, percent
from twinphase.phases.timeline import IntervalKind

# Intervals that exist because of other requests, a full engine or a full cache.
SHARING = (
    IntervalKind.PREFILL_WAIT,
    IntervalKind.BATCHING,
    IntervalKind.STALL,
    IntervalKind.RECOMPUTE,
)
NOT_ITS_OWN = {*SHARING, IntervalKind.QUEUE}
# Reasons for queueing that other requests cause.
OTHERS_REASONS = {"seats", "states", "blocks", "budget", "prefix"}


@dataclass(frozen=True)
class Alone:
    """Times of a request on an otherwise idle engine, with the same cached tokens.

    Attributes:
        prefill_seconds, decode_seconds: times predicted by the cost model.
        own_shares: measured seconds of this request's shares of its steps; an upper bound.
        verdict: "alone" if `seconds` was measured; "predicted"; or "unknown" if the prediction is
            further from `own_shares` than the cost model's usual error.
        seconds: prefill, decode, and the measured time that others do not cause (such as
            tokenizing); None is unknown.
        ttft: seconds to the first token; None is unknown.
        tpot: seconds per later token; None if unknown, or with fewer than two output tokens.
    """

    prefill_seconds: float
    decode_seconds: float
    own_shares: float
    verdict: str
    seconds: float | None = None
    ttft: float | None = None
    tpot: float | None = None


def had_it_run_alone(evidence: Evidence) -> Alone | None:
    """Estimate the same request on an idle engine; None without a cost model.

    If no other request was in its steps, the measured times are used. Otherwise the cost model
    predicts prefill in the engine's chunks and a step per token; the measured shares are upper
    bounds.
    """
    prefill = evidence.prefill_alone()
    if prefill is None or evidence.machine is None:
        return None
    num_decoded = max(0, evidence.request.num_output_tokens - 1)
    # A step's time is linear in its context, so the mean context gives the mean time. Drafts depend
    # on the request's own text, so alone it would have needed about the same number of steps.
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
        return Alone(prefill, decode, own, "unknown")
    return Alone(
        prefill,
        decode,
        own,
        verdict,
        seconds=before + sum(taken) + after,
        ttft=before + taken[0],
        tpot=(taken[1] + after) / num_decoded if num_decoded else None,
    )


def _shared_steps(evidence: Evidence) -> bool:
    """Whether other requests were in this request's steps, or preempted it."""
    decode = evidence.timeline.decode
    return (
        any(evidence.timeline.seconds(kind) > 0 for kind in SHARING)
        or evidence.timeline.prefill.decodes > 0
        or decode.decodes > decode.steps
    )


def _beyond_its_error(predicted: float, own: float, evidence: Evidence) -> bool:
    """Whether the prediction's error exceeds 95 % of the model's last errors."""
    p95 = evidence.model_error.p95 if evidence.model_error else None
    return abs(predicted - own) > own * p95 if p95 is not None else predicted > own


def alone_sentences(found: Mapping[str, Any]) -> list[str]:
    """The sentences for an explanation in plain values."""
    alone = found.get("alone")
    error = found.get("error") or {}
    if not alone:
        return ["Unknown: there is no cost model of the engine that served it."]
    if alone["verdict"] == "alone":
        return ["It was alone: no other request was in any of its steps."]
    by_model = (
        f"By the cost model prefill takes {duration(alone['prefill_seconds'])} and decode "
        f"{duration(alone['decode_seconds'])}; its shares of the steps it was in were "
        f"{duration(alone['own_shares'])} together."
    )
    if alone["seconds"] is None:
        rows = [
            "Unknown: the cost model's prediction is further from the measured time than its "
            "usual error.",
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
