"""Finds the causes of a long TTFT and of slow tokens.

`attribution.py` assigns every second to one cause, so the shares of one symptom add up to at most
1; `causes.py` has the sentences. docs/explain.md lists the causes, each with a test that provokes
it. `load_diagnosis.py` diagnoses from a client's measurements instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinphase.explain.attribution import MIN_REPORTED_SHARE, attribute
from twinphase.explain.causes import CAUSES
from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import Lever


@dataclass(frozen=True)
class Diagnosis:
    """One cause of a long TTFT or of slow tokens.

    Attributes:
        cause: name, as in docs/explain.md.
        phase: "prefill" for a long TTFT, "decode" for slow tokens.
        evidence: what was measured, in one or two sentences.
        seconds: time that the cause explains; None is unknown.
        share: fraction of TTFT, or of the time after the first token; None is unknown.
        lever: what to change, if anything.
    """

    cause: str
    phase: str
    evidence: str
    seconds: float | None
    share: float | None
    lever: Lever | None = None


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """The causes of a long TTFT, then those of slow tokens, each with the largest share first.

    Causes that explain less than a tenth are omitted. Causes without a share come last, and only if
    they have a lever.
    """
    found: list[Diagnosis] = []
    for phase, before in (("prefill", sum(evidence.before.values())), ("decode", 0.0)):
        whole = before + sum(evidence.spent(phase).values())
        named = []
        for cause, seconds in attribute(evidence, phase).items():
            if seconds is not None and seconds < MIN_REPORTED_SHARE * whole:
                continue
            sentence, lever = CAUSES[cause](evidence, seconds or 0.0)
            if lever is not None and lever.addressed_seconds is None:
                lever = replace(lever, addressed_seconds=seconds)
            if seconds is not None:
                named.append(Diagnosis(cause, phase, sentence, seconds, seconds / whole, lever))
            elif lever is not None:
                named.append(Diagnosis(cause, phase, sentence, None, None, lever))
        found += sorted(named, key=lambda item: (item.share is None, -(item.share or 0.0)))
    return tuple(found)
