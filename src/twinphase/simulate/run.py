"""Runs a load through a deployment, and summarizes it per user and per worker."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter

from twinphase.cluster.routing import Routing
from twinphase.phases.observation import Observation
from twinphase.phases.timeline import IntervalKind
from twinphase.server.observe import request_timings
from twinphase.simulate.simulation import FollowUp, Observer, Simulation
from twinphase.simulate.spec import FleetSpec, Outcome, TraceRequest
from twinphase.simulate.users import Users, closed_loop

# Maximum number of listed culprits.
NAMED_CULPRITS = 5


@dataclass(frozen=True)
class PoolUse:
    """Busy shares of the workers of one role during the load."""

    role: str
    workers: int
    prefill: float
    decode: float

    @property
    def idle(self) -> float:
        return max(0.0, 1.0 - self.prefill - self.decode)


@dataclass(frozen=True)
class Culprit:
    """A request whose prefill stalled others, and the total seconds of these stalls."""

    number: int
    prompt_tokens: int
    stalled: int
    seconds: float


@dataclass
class Simulated:
    """The result of a simulated load.

    Attributes:
        outcomes, observations: one per request, in the order of arrival.
        seconds: time from the first arrival to the last token.
        pools: busy shares of the workers, by role.
        culprits: requests whose prefill stalled others most, the worst first.
        stall_seconds: sum of the stalls of all requests.
        num_steps: number of steps of all workers.
    """

    outcomes: Sequence[Outcome]
    observations: list[Observation]
    seconds: float
    pools: list[PoolUse]
    culprits: list[Culprit] = field(default_factory=list)
    stall_seconds: float = 0.0
    num_steps: int = 0


def run_requests(
    spec: FleetSpec,
    requests: Sequence[TraceRequest],
    *,
    concurrency: int | None = None,
    users: Users | None = None,
    num_requests: int = 0,
    observer: Observer | None = None,
    tick: Callable[[], None] | None = None,
) -> Simulated:
    """Simulate a load.

    Args:
        spec: the fleet.
        requests: timed requests of an open loop, or ordered requests of a closed loop.
        concurrency: requests in flight of a closed loop; None for an open one.
        users: users who send the load instead of `requests`.
        num_requests: total number of requests that the users send.
        observer: notified of arrivals and steps.
        tick: called after each request.
    """
    simulation = Simulation(spec, Routing(block_size=spec.block_size), observer)
    first: Sequence[TraceRequest] = requests
    follow_up: FollowUp = lambda asked, outcome: None  # noqa: E731
    if users is not None:
        load = users.start(num_requests)
        first = load.first()
        follow_up = load.next
    elif concurrency is not None:
        first, follow_up = closed_loop(requests, concurrency)
    collects = gc.isenabled()
    # The garbage collector would scan millions of blocks repeatedly without freeing any.
    gc.disable()
    try:
        simulation.run(first, tick=tick, follow_up=follow_up)
    finally:
        if collects:
            gc.enable()
    return summarize(simulation)


def summarize(simulation: Simulation) -> Simulated:
    """The result of a completed simulation."""
    outcomes = simulation.outcomes
    begin = min((one.arrival for one in outcomes), default=0.0)
    end = max((one.token_times[-1] for one in outcomes if one.token_times), default=0.0)
    seconds = max(end - begin, 1e-9)
    culprits, stalled = _stalls(outcomes)
    return Simulated(
        outcomes,
        [_observation(number, one) for number, one in enumerate(outcomes)],
        seconds,
        pools=_pools(simulation, seconds),
        culprits=culprits,
        stall_seconds=stalled,
        num_steps=simulation.num_steps,
    )


def _observation(number: int, one: Outcome) -> Observation:
    """A request as a client would have recorded it, with the server's own figures."""
    times = list(one.token_times)
    claims = {}
    if one.timeline is not None and one.counts is not None:
        one.timeline.token_times = times
        one.counts.num_cached_tokens = one.num_cached
        claims = {"timings": request_timings(one.timeline, one.counts)}
    has_answer = 0 < one.num_reasoning < len(times)
    return Observation(
        str(number),
        one.arrival,
        one.arrival,
        token_times=times,
        ended=times[-1],
        num_prompt_tokens=one.num_prompt,
        num_cached_tokens=one.num_cached,
        num_output_tokens=len(times),
        status=200,
        finish_reason="length",
        claims=claims,
        finished=times[-1],
        first_answer=times[one.num_reasoning] if has_answer else None,
        num_reasoning_tokens=one.num_reasoning,
    )


def _pools(simulation: Simulation, seconds: float) -> list[PoolUse]:
    found = []
    for role in dict.fromkeys(one.role for one in simulation.spec.workers):
        names = [name for name, one in simulation.workers.items() if one.spec.role == role]
        whole = seconds * len(names)
        busy = sum(simulation.busy_seconds[name] for name in names)
        decode = sum(simulation.decode_seconds[name] for name in names)
        found.append(PoolUse(role, len(names), (busy - decode) / whole, decode / whole))
    return found


def _stalls(outcomes: Sequence[Outcome]) -> tuple[list[Culprit], float]:
    """Requests whose prefill stalled others; chunks of the same step share the stall's time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    victims: dict[str, set[int]] = {}
    total = 0.0
    for number, one in enumerate(outcomes):
        for interval in one.timeline.intervals if one.timeline is not None else ():
            if interval.kind is IntervalKind.STALL:
                spent = interval.end - interval.start
                total += spent
                for name in interval.caused_by:
                    seconds[name] += spent / len(interval.caused_by)
                    victims.setdefault(name, set()).add(number)
    worst = [
        Culprit(int(name), outcomes[int(name)].num_prompt, len(victims[name]), spent)
        for name, spent in nlargest(NAMED_CULPRITS, seconds.items(), key=itemgetter(1))
    ]
    return worst, total
