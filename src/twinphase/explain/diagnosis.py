"""The causes of a bad time to first token and of bad tokens a second, by rules over what was measured.

One small function a cause, in one table a symptom (`prefill_causes.py`, `decode_causes.py`). A rule claims seconds of
the ledger, and no second of a phase's own work is claimed twice, so that the shares of one symptom add up to 1 at most.
docs/explain.md has the table, with the test that provokes each cause. Not for what a client alone can see
(`client_diagnosis.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinphase.explain.decode_causes import DECODE_RULES
from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import WORTH_NAMING, Lever
from twinphase.explain.prefill_causes import PREFILL_RULES, prefix_sentence

__all__ = ["DECODE_RULES", "PREFILL_RULES", "Diagnosis", "diagnose", "prefix_sentence"]


@dataclass(frozen=True)
class Diagnosis:
    """A cause of a bad time to first token, or of bad tokens a second.

    Attributes:
        cause: its name, as in docs/explain.md.
        phase: "prefill" for a bad TTFT, "decode" for bad tokens a second.
        evidence: one sentence with its numbers.
        seconds: that it explains; None where that cannot be told.
        share: of TTFT, or of the time after the first token; None as above.
        lever: what to change, if anything can be.
    """

    cause: str
    phase: str
    evidence: str
    seconds: float | None
    share: float | None
    lever: Lever | None = None


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """What each symptom comes from: causes of a bad TTFT, then of bad tokens a second, the largest share first.

    Causes that explain less than a tenth are left out; those whose share is not known come last.
    """
    found: list[Diagnosis] = []
    lead = sum(evidence.before.values())
    for phase, rules, whole in (
        ("prefill", PREFILL_RULES, lead + sum(evidence.first.values())),
        ("decode", DECODE_RULES, sum(evidence.later.values())),
    ):
        if whole <= 0:
            continue
        named = []
        for cause, rule in rules.items():
            claim = rule(evidence)
            if claim is None:
                continue
            seconds, sentence, lever = claim
            share = None if seconds is None else seconds / whole
            if lever is not None and lever.addressed_seconds is None:
                lever = replace(lever, addressed_seconds=seconds)
            if share is None or share >= WORTH_NAMING:
                named.append(Diagnosis(cause, phase, sentence, seconds, share, lever))
        found += sorted(named, key=lambda diagnosis: (diagnosis.share is None, -(diagnosis.share or 0.0)))
    return tuple(found)
