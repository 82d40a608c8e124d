"""The interfaces of measured targets, which generate tokens for prompts.

A `Target` runs one phase at a time for a phase sweep; a `LoadTarget` takes many requests at once.
The other files of this folder are the targets, which `kinds.py` lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinphase.phases.observation import Observation


@dataclass(frozen=True)
class TargetFacts:
    """Facts about a target for the report.

    Attributes:
        name: text on the command line.
        kind: "twinphase", "openai", "transformers", "llama-cpp".
        engine: name and version of the engine; "unknown" if it does not report them.
        model: the target's name for the model.
        precision: precision of the weights, and of the KV cache if known; otherwise "unknown".
        context_length: maximum prompt + output, in tokens; None is unknown.
        prefill_definition, decode_definition: definitions of the measured times.
        details: other conditions for the report, such as threads, model hash and flags.
    """

    name: str
    kind: str
    engine: str
    model: str
    precision: str
    context_length: int | None
    prefill_definition: str
    decode_definition: str
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A prompt that shares no prefix with any other prompt of its run.

    Attributes:
        text: text for targets that take text.
        token_ids: token ids for targets that take ids; otherwise empty.
        num_tokens: number of tokens, exact for ids, approximate for text. Results use the target's
            own count.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True)
class PhaseSample:
    """One measurement of one phase.

    Attributes:
        tokens: uncached prompt tokens of a prefill, by the target's count; or the mean number of
            tokens before the decoded ones.
        times: seconds of the prefill, or of each decode step, which computes a token of every
            sequence.
        batch: number of sequences that decoded together throughout.
    """

    tokens: float
    times: tuple[float, ...]
    batch: int = 1

    @property
    def seconds(self) -> float:
        """The mean time, as in TPOT."""
        return sum(self.times) / len(self.times)


class Target(Protocol):
    """A target whose phases can be measured separately; failures are TwinphaseErrors."""

    facts: TargetFacts

    def prefill(self, num_tokens: int) -> PhaseSample:
        """Measure one prefill of about `num_tokens` tokens, none of them cached."""

    def decode(self, position: int, batch: int, num_tokens: int) -> PhaseSample:
        """Measure `num_tokens` decode steps after prompts of about `position` tokens each."""

    def close(self) -> None:
        """Free the model, or close connections."""


class LoadTarget:
    """A target that serves many requests at once; subclasses define `facts` and `send`.

    Attributes:
        facts: facts for the report.
        lead: seconds before a request is due at which `start` must be called.
        notes: facts that a reader needs to judge a load.
    """

    facts: TargetFacts
    lead = 0.0
    notes: Sequence[str] = ()

    async def start(self, prompt: Prompt, max_tokens: int, intended: float) -> Any:
        """Send a request; `read` parses the reply after the load."""
        return await self.send(prompt, max_tokens, intended)

    def read(self, reply: Any) -> Observation:
        """Parse the result of `start` into an observation; called after the load."""
        observation: Observation = reply
        return observation

    async def send(self, prompt: Prompt, max_tokens: int, intended: float) -> Observation:
        """Send a request when it is due, and receive its whole answer.

        Failures are recorded in the observation instead of raised.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Close connections."""
