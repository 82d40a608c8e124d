"""A request's outcome: its status, its finish reason, and why the prefix cache missed."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request finished, in OpenAI's words (abort and error are ours, as in vLLM)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class MissReason(enum.StrEnum):
    """Why the prefix cache did not hold more of a prompt.

    A reason never tells of another salt's content.
    """

    DIVERGED = "diverged"  # a cached prompt goes on with other tokens
    BLOCK_GRANULARITY = "block_granularity"  # what is left is shorter than a block
    # nothing is cached under this request's `cache_salt`, and nothing is shared across salts
    SALT = "salt"
    EVICTED = "evicted"  # it was there, and its blocks were needed for others
    NEVER_SEEN = "never_seen"  # in no full block
    PROMPT_LOGPROBS = (
        "prompt_logprobs"  # they are computed with the prompt, of which they need every row
    )
    DISABLED = "disabled"


@dataclass(frozen=True)
class PrefixMiss:
    """The first prompt token that the prefix cache could have spared but did not, and why.

    `part` is the kind of prompt part it lies in ("system", "question", ...), where a front end
    knows the parts. `num_known` tokens from there on are known to have been computed before: of an
    evicted prefix only.
    """

    reason: MissReason
    token_index: int
    part: str = ""
    num_known: int = 0
