"""Inputs and results of a simulation: workers, requests and their outcomes.

All times are seconds of the simulation. The events are in `simulation.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from twinphase.cluster.role import Role
from twinphase.config import EngineConfig
from twinphase.phases.timeline import RequestTimeline
from twinphase.phases.work import ModelShape
from twinphase.request import RequestCounts
from twinphase.scheduler.chunk import StepCost


@dataclass(frozen=True)
class WorkerSpec:
    """One worker of a fleet.

    Attributes:
        times: cost model for the scheduler, the router and the clock.
        config: resolved configuration of its engine; a server's rule resolves the SLO "auto".
        between_steps: seconds between two steps, while the front end handles tokens.
        between_steps_per_request: additional seconds per request of the step.
        noise: measured / predicted time of consecutive steps without a prefill chunk; the order
            matters because slow steps come in groups. The worker cycles through them from a random
            one. Empty means no noise.
        prefill_noise: the same for steps with a prefill chunk.
    """

    role: Role
    times: StepCost
    config: EngineConfig
    between_steps: float = 0.0
    between_steps_per_request: float = 0.0
    noise: Sequence[float] = ()
    prefill_noise: Sequence[float] = ()


@dataclass(frozen=True)
class Front:
    """Times of a request outside the engine: HTTP, tokenizing, and handing over tokens.

    Attributes:
        request, per_prompt_token: seconds from the client to the engine, fixed and per token.
        token: seconds from the end of a step to the client.
    """

    request: float = 0.0
    per_prompt_token: float = 0.0
    token: float = 0.0


@dataclass(frozen=True)
class FleetSpec:
    """The workers of a simulation, their connections and its random seed.

    Attributes:
        block_bytes, bytes_per_second: size of a KV block, and rate of transfers including copies.
        front: times of requests outside the engines.
        shape: shape of the model for ledgers; None keeps no ledgers, which is faster.
        drafts: maximum drafted tokens per decode; `acceptance` is the probability that a draft is
            accepted if those before it are.
        seed: random seed for noise and acceptance.
    """

    workers: Sequence[WorkerSpec]
    block_bytes: int = 0
    bytes_per_second: float = 4e8
    front: Front = Front()
    shape: ModelShape | None = None
    drafts: int = 0
    acceptance: float = 0.0
    seed: int = 0

    @property
    def block_size(self) -> int:
        return self.workers[0].config.block_size

    def names(self) -> list[str]:
        """A name for each worker, by its role: `prefill-0`, `decode-0`, `worker-0`."""
        numbers: dict[Role, count[int]] = {"both": count(), "prefill": count(), "decode": count()}
        return [
            f"{'worker' if one.role == 'both' else one.role}-{next(numbers[one.role])}"
            for one in self.workers
        ]


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace; `prompt` makes its token ids on arrival to save memory.

    Attributes:
        num_outputs: output tokens, reasoning included.
        num_reasoning: number of reasoning tokens among them.
        user: number of the sending user, in loads whose users wait for answers.
    """

    arrival: float
    num_outputs: int
    prompt: Callable[[], list[int]]
    num_reasoning: int = 0
    user: int = -1


@dataclass(slots=True)
class Outcome:
    """One request as its user would have experienced it.

    Attributes:
        num_asked: requested output tokens of the whole answer.
        read_apart: whether a worker of the prefill pool prefilled it.
        timeline, counts: its ledger and its counts, if ledgers are kept.
    """

    arrival: float
    num_prompt: int = 0
    num_asked: int = 0
    num_cached: int = 0
    read_apart: bool = False
    num_reasoning: int = 0
    token_times: array[float] = field(default_factory=lambda: array("d"))
    timeline: RequestTimeline | None = None
    counts: RequestCounts | None = None

    @property
    def num_outputs(self) -> int:
        return len(self.token_times)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def tpot(self) -> float:
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
