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

    A reason never reveals another salt's content.
    """

    # A cached prompt continues with other tokens.
    DIVERGED = "diverged"
    # The rest is shorter than a block.
    BLOCK_GRANULARITY = "block_granularity"
    # nothing is cached under this request's `cache_salt`, and nothing is shared across salts
    SALT = "salt"
    # It was cached, and its blocks were needed for other requests.
    EVICTED = "evicted"
    # No full block ever held it.
    NEVER_SEEN = "never_seen"
    # Its blocks are cached, but no snapshot of the recurrent layers' state where they end.
    NO_SNAPSHOT = "no_snapshot"
    PROMPT_LOGPROBS = "prompt_logprobs"  # They need every row of the prompt to be computed.
    DISABLED = "disabled"


@dataclass(frozen=True)
class PrefixMiss:
    """The first prompt token that the prefix cache could have spared but did not, and why.

    `part` is the kind of prompt part it lies in ("system", "question", ...), where a front end
    knows the parts. `num_known` tokens from there on are known to have been computed before: of an
    evicted prefix, or of one without a snapshot.
    """

    reason: MissReason
    token_index: int
    part: str = ""
    num_known: int = 0
