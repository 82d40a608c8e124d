"""What is simulated, and what comes of it: workers, requests and their outcomes.

All times are seconds of the simulation. Not for the events themselves (`simulation.py`).
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
        times: predicted step times, used by scheduler and router and to advance the clock.
        config: of its engine, resolved; the SLO "auto" is chosen as a server chooses it.
        between_steps: time between two steps, during which the front end handles tokens.
        between_steps_per_request: more of it for each request of the step.
        noise: measured times over predicted ones of steps without a prefill chunk, in their order:
            slow steps come together. The worker takes them in turn, from a random one on, and
            begins again at the end. Empty is none.
        prefill_noise: the same of steps with one.
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
    """What a request takes outside the engine: HTTP, tokenizing, and handing over tokens.

    Attributes:
        request, per_prompt_token: from the client's sending to the engine.
        token: from the end of a step to the client.
    """

    request: float = 0.0
    per_prompt_token: float = 0.0
    token: float = 0.0


@dataclass(frozen=True)
class FleetSpec:
    """The fleet.

    Attributes:
        block_bytes, bytes_per_second: size and rate of KV transfers, from copying out to storing.
        front: outside the engines.
        shape: of the model, for ledgers; None keeps none, which is faster.
        drafts: tokens drafted for each decode at most; `acceptance` is the chance that one is
            right where those before it are.
        seed: of noise and acceptance.
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
    """A request of a trace; `prompt` makes its token ids on arrival, since traces are long.

    Attributes:
        num_outputs: reasoning included.
        num_reasoning: of these, the tokens before the answer itself.
        user: who sends it, for loads whose users wait for an answer.
    """

    arrival: float
    num_outputs: int
    prompt: Callable[[], list[int]]
    num_reasoning: int = 0
    user: int = -1


@dataclass(slots=True)
class Outcome:
    """One request as its user would have seen it.

    Attributes:
        num_asked: output tokens of the whole answer.
        read_apart: prefilled by a worker of the prefill pool.
        timeline, counts: its ledger and its numbers, where ledgers are kept.
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
