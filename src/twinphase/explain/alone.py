"""What a request would have taken with the engine for itself: measured where it was alone, else the cost model's word.

Not for the rest of an explanation (`explain.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import duration, length
from twinphase.phases.timeline import IntervalKind

__all__ = ["Alone", "alone_sentences", "had_it_run_alone"]

# What company in its own steps costs, and what a full engine or a full cache costs besides: alone there is none of it.
COMPANY = (IntervalKind.PREFILL_WAIT, IntervalKind.BATCHING, IntervalKind.STALL, IntervalKind.RECOMPUTE)
OTHERS = {*COMPANY, IntervalKind.QUEUE}
HELD_BACK = {"seats", "blocks", "budget", "prefix"}  # reasons to queue that are others'


@dataclass(frozen=True)
class Alone:
    """A request with the engine for itself and its cached tokens as they were.

    Attributes:
        seconds: prefill + decode + everything measured that is neither theirs nor others' (tokenizing, text, ...); None
            where it cannot be told.
        ttft: until the first token; None as above.
        tpot: of a token after it; None as above, and below two output tokens.
        prefill_seconds, decode_seconds: by the cost model.
        own_shares: this request's shares of the steps that it was really in, prefill + decode; alone they are not more.
        verdict: "alone": it was, and `seconds` was measured; "predicted"; or "unknown": the cost model is further off
            from `own_shares` than it usually errs.
    """

    seconds: float | None
    ttft: float | None
    tpot: float | None
    prefill_seconds: float
    decode_seconds: float
    own_shares: float
    verdict: str = "predicted"


def had_it_run_alone(evidence: Evidence) -> Alone | None:
    """The same request in an empty engine; None without a cost model.

    Where nobody was in its steps, its own times are those. Otherwise prefill in chunks as the engine cuts them, then a
    step a token, each with the context that it has by then, by the cost model; never more than its measured shares.
    """
    prefill = evidence.prefill_alone()
    if prefill is None or evidence.machine is None:
        return None
    num_decoded = max(0, evidence.request.num_output_tokens - 1)
    # A step's time is linear in its context, so that the mean context gives the mean time.
    decode = num_decoded * (evidence.decode_step_at(evidence.num_prompt + (num_decoded + 1) / 2) or 0.0)
    first, later = evidence.first, evidence.later
    own_prefill, own_decode = (evidence.timeline.seconds(kind) for kind in (IntervalKind.PREFILL, IntervalKind.DECODE))
    own = own_prefill + own_decode
    named = {*OTHERS, IntervalKind.PREFILL, IntervalKind.DECODE}
    before = sum(seconds for kind, seconds in first.items() if kind not in named)
    after = sum(seconds for kind, seconds in later.items() if kind not in named)
    verdict, taken = "predicted", (min(prefill, own_prefill), min(decode, own_decode))
    if not _company(evidence):
        queued = sum(length(queue) for queue in evidence.intervals(IntervalKind.QUEUE) if queue.reason in HELD_BACK)
        verdict, taken = "predicted" if queued else "alone", (own_prefill, own_decode)
        before += first[IntervalKind.QUEUE] - min(queued, first[IntervalKind.QUEUE])
    elif _too_far(prefill + decode, own, evidence):
        return Alone(None, None, None, prefill, decode, own, "unknown")
    tpot = (taken[1] + after) / num_decoded if num_decoded else None
    return Alone(before + sum(taken) + after, before + taken[0], tpot, prefill, decode, own, verdict)


def _company(evidence: Evidence) -> bool:
    """Somebody else was in its steps, or took its place."""
    decode = evidence.timeline.decode
    return (
        any(evidence.timeline.seconds(kind) > 0 for kind in COMPANY)
        or evidence.timeline.prefill.decodes > 0
        or decode.decodes > decode.steps
    )


def _too_far(predicted: float, own: float, evidence: Evidence) -> bool:
    """The prediction is further from what was measured than 95 % of the model's others were from theirs."""
    p95 = evidence.machine.cost_model.error().p95 if evidence.machine else None
    return abs(predicted - own) > own * p95 if p95 is not None else predicted > own


def alone_sentences(found: Mapping[str, Any]) -> list[str]:
    """Of an explanation as plain values."""
    alone, error = found.get("alone"), found.get("error") or {}
    if not alone:
        return ["unknown: there is no cost model of the engine that served it"]
    if alone["verdict"] == "alone":
        return ["it was alone: nobody else was in any of its steps"]
    by_model = (
        f"prefill {duration(alone['prefill_seconds'])}, decode {duration(alone['decode_seconds'])} by the cost model; "
        f"its shares of the steps it was in were {duration(alone['own_shares'])} together"
    )
    if alone["seconds"] is None:
        rows = ["cannot tell: the cost model is further from what was measured than it usually errs", by_model]
    else:
        tpot = "unknown" if alone["tpot"] is None else duration(alone["tpot"])
        rows = [
            f"{duration(alone['seconds'])} in place of {duration(found['waterfall']['wall_seconds'])}; first token "
            f"after {duration(alone['ttft'])}, {tpot} a token after it",
            by_model,
        ]
    if error.get("median") is not None:
        rows.append(
            f"the model's last {error['steps']} predictions were off by {100 * error['median']:.0f} % in the middle, "
            f"{100 * error['p95']:.0f} % at the 95th percentile"
        )
    return rows
