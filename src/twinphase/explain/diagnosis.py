"""The causes of a bad time to first token and of bad tokens per second.

`attribution.py` gives every second to one cause, so that the shares of one symptom add up to 1 at
most; `causes.py` has the words. docs/explain.md lists the causes, each with the test that provokes
it. Not for what only a client can see (`twinphase/explain/load_diagnosis.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinphase.explain.attribution import WORTH_NAMING, attribute
from twinphase.explain.causes import CAUSES
from twinphase.explain.evidence import Evidence
from twinphase.explain.levers import Lever


@dataclass(frozen=True)
class Diagnosis:
    """A cause of a bad time to first token, or of bad tokens per second."""

    cause: str  # its name, as in docs/explain.md
    phase: str  # "prefill" for a bad TTFT, "decode" for bad tokens per second
    evidence: str  # what was measured, in a sentence or two
    seconds: float | None  # what it explains; None where that cannot be told
    share: float | None  # of TTFT, or of the time after the first token; None as above
    lever: Lever | None = None  # what to change, if anything can be


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """The causes of a bad TTFT, then of bad tokens per second, the largest share first.

    Causes that explain less than a tenth are left out; those without a share come last, if
    something can be changed.
    """
    found: list[Diagnosis] = []
    for phase, before in (("prefill", sum(evidence.before.values())), ("decode", 0.0)):
        whole = before + sum(evidence.spent(phase).values())
        named = []
        for cause, seconds in attribute(evidence, phase).items():
            if seconds is not None and seconds < WORTH_NAMING * whole:
                continue
            sentence, lever = CAUSES[cause](evidence, seconds or 0.0)
            if lever is not None and lever.addressed_seconds is None:
                lever = replace(lever, addressed_seconds=seconds)
            if seconds is not None:
                named.append(Diagnosis(cause, phase, sentence, seconds, seconds / whole, lever))
            elif lever is not None:
                named.append(Diagnosis(cause, phase, sentence, None, None, lever))
        found += sorted(named, key=lambda one: (one.share is None, -(one.share or 0.0)))
    return tuple(found)
