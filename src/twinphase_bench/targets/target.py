"""What is measured: anything that turns a prompt into tokens, ours or another's.

A `Target` can be asked for one phase at a time, as the phase sweep needs it; a `LoadTarget` takes
many requests at once. The other files of this folder are the targets; `kinds.py` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinphase.phases.observation import Observation


@dataclass(frozen=True)
class TargetFacts:
    """What a reader must know of a target.

    Attributes:
        name: as given on the command line.
        kind: "twinphase", "openai", "transformers", "llama-cpp".
        engine: name and version of what answers, "unknown" where it does not say.
        model: as the target names it.
        precision: of weights, and of the KV cache where known; "unknown" otherwise.
        context_length: longest prompt + output; None is unknown.
        prefill_definition, decode_definition: what is timed.
        details: more conditions for the report: threads, model hash, flags.
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
    """A prompt that shares no prefix with any other of its run.

    Attributes:
        text: for targets that take text.
        token_ids: for those that take ids; empty otherwise.
        num_tokens: exact with ids, about right with text. The target's own count goes into results.
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
        times: seconds: of the prefill, or of each decode step, which gives every sequence a token.
        batch: sequences that decoded together all the while.
    """

    tokens: float
    times: tuple[float, ...]
    batch: int = 1

    @property
    def seconds(self) -> float:
        """The mean, like TPOT."""
        return sum(self.times) / len(self.times)


class Target(Protocol):
    """A target whose phases can be measured apart; failures are a TwinphaseError."""

    facts: TargetFacts

    def prefill(self, num_tokens: int) -> PhaseSample:
        """Measure one prefill of about that many tokens, none of them cached."""

    def decode(self, position: int, batch: int, num_tokens: int) -> PhaseSample:
        """Measure `num_tokens` decode steps after prompts of about `position` tokens each."""

    def close(self) -> None:
        """Let go of the model, or of connections."""


class LoadTarget:
    """Something that serves many requests at once; a subclass gives `facts` and `send`.

    Attributes:
        facts: what a reader must know.
        lead: seconds before its intended moment at which `start` is to be called.
        notes: what a reader must know to judge a load, for the report.
    """

    facts: TargetFacts
    lead = 0.0
    notes: Sequence[str] = ()

    async def start(self, prompt: Prompt, max_tokens: int, intended: float) -> Any:
        """Send a request, but leave reading the reply to `read`, after the load."""
        return await self.send(prompt, max_tokens, intended)

    def read(self, reply: Any) -> Observation:
        """The observation in what `start` returned; called when the load is over."""
        observation: Observation = reply
        return observation

    async def send(self, prompt: Prompt, max_tokens: int, intended: float) -> Observation:
        """Send a request when it is due, and take its whole answer.

        Failures are in the observation and never raised.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of connections."""
