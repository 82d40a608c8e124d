"""What one step computes: `Batch(decodes, prefills)` in, `StepOutput` out.

The only messages between the control plane (scheduler, cache) and the data plane (executor, backend).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from twinphase.request import SamplingParams

__all__ = ["Batch", "Phase", "ScheduledRequest", "StepOutput", "TokenLogprobs"]


class Phase(enum.Enum):
    """The half of a request that a step works on. It belongs to the scheduled request, not to the batch."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class ScheduledRequest:
    """A request's share of one step: compute `token_ids` at positions `num_computed_tokens`, +1, ...

    `samples` is true when the last scheduled token is the last known one, so that its logits give a new token.
    """

    request_id: str
    phase: Phase
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    samples: bool
    sampling_params: SamplingParams
    prompt_token_ids: list[int] = field(repr=False, default_factory=list)  # penalties look at both
    output_token_ids: list[int] = field(repr=False, default_factory=list)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens this step computes for this request."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Batch:
    """One step's work. Decodes come first in every flattened array."""

    decodes: list[ScheduledRequest]
    prefills: list[ScheduledRequest]

    @property
    def scheduled(self) -> list[ScheduledRequest]:
        """Decodes, then prefills: the order of the flattened rows."""
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        """Rows of the flattened batch."""
        return sum(s.num_scheduled_tokens for s in self.scheduled)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of one sampled token and of the most likely ones at its position (natural log)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: list[tuple[int, float]]


@dataclass
class StepOutput:
    """What a step produced: per request a list of new tokens (one today, several with speculation)."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
