"""The pace: the gap between tokens that running requests keep while prompts are prefilled."""

from __future__ import annotations

from dataclasses import dataclass

# Context length of the decode that predictions of chunks assume.
DECODE_CONTEXT_TOKENS = 256


@dataclass(frozen=True)
class Pace:
    """Limits of prefill chunks in favour of running requests; all times are seconds.

    Attributes:
        slo_seconds: longest gap between tokens of a running request; None where there is no SLO.
        step_factor: how many times as long as its decodes alone a step may take, even against the
            SLO, so that prefill keeps its part of the time between many decodes.
        chosen: whether `Pacing.choose` chose the pace, and not the user.
        gap_seconds: predicted gap for one request that decodes beside a prefill. This and the
            following are set by `Pacing.predict`.
        prompt_tokens: length of the prompt of the next two predictions.
        prompt_seconds: its prefill beside one request that decodes, at this pace.
        uncut_prompt_seconds: the same without an SLO.
    """

    slo_seconds: float | None = None
    step_factor: float = 0.0
    chosen: bool = False
    gap_seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    uncut_prompt_seconds: float = 0.0
