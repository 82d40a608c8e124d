"""`twinphase plan`: finds the cheapest deployment that meets service levels, by simulation.

A formula proposes fleets for every machine and layout; simulations with the real scheduler decide,
cheapest fleet first. A fleet that misses a level is tried again with one more worker in the pool
that was late. For a large fleet, a slice with the same load per worker is simulated.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from twinphase import (
    Band,
    Capacity,
    Deployment,
    Distribution,
    LoadShape,
    Machine,
    Paced,
    Progress,
    Simulated,
    TraceRequest,
    TwinphaseError,
    capacity_of,
    open_load,
    read_trials,
    roles_of,
    run_requests,
)
from twinphase.phases.observation import Observation
from twinphase_bench.simulate.levels import Levels
from twinphase_bench.simulate.repair import changes

# Share of a worker's time that a proposal uses; queues need the rest.
TARGET_USE = 0.75
# Maximum workers of a slice, and maximum requests of a simulation.
SLICE_WORKERS = 4
MAX_OUTPUT_TOKENS = 60_000
REQUESTS = (120, 400)
MAX_WORKERS = 4096
# A fleet counts as better if its miss is below this share of the best earlier miss. A layout is
# abandoned after the following number of fleets that are not better.
MIN_GAIN = 0.97
MAX_STALE = 2
# Maximum number of simulated fleets to find one that holds with its whole bands.
MAX_CERTAIN = 6
# If no fleet holds, repairs of the best one get this share of the search's time.
REPAIR_SHARE = 0.5
RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Demand:
    """The load of a plan: lengths, and either a rate or users.

    Attributes:
        rate: requests per second; None if the users determine it.
    """

    prompt: Distribution
    output: Distribution
    reasoning: Distribution | None = None
    shared_prefix: int = 0
    rate: float | None = None
    users: int = 0
    think_time: float = 0.0

    @property
    def tokens(self) -> tuple[float, float]:
        """Mean prompt tokens, shared prefix included, and mean output tokens with reasoning."""
        thinking = self.reasoning.mean if self.reasoning else 0.0
        return self.prompt.mean + self.shared_prefix, self.output.mean + thinking

    def shape(self, seconds_per_token: float) -> LoadShape:
        """Mean values of the load; users' rates depend on the times of answers and pauses."""
        prompt, output = self.tokens
        rate = self.rate
        if rate is None:
            rate = self.users / (self.think_time + output * seconds_per_token)
        long = self.prompt.quantile(0.99) + self.shared_prefix
        return LoadShape(rate, prompt, output, float(self.shared_prefix), long)


@dataclass(frozen=True)
class Candidate:
    """A fleet and its price per hour.

    Attributes:
        worst: smallest factor by which its predecessors missed a level.
        stale: number of predecessors since the last improvement.
    """

    deployment: Deployment
    price: float
    load: LoadShape
    worst: float = math.inf
    stale: int = 0

    @property
    def layout(self) -> str:
        return "two pools" if "prefill" in self.deployment.roles else "one pool"

    @property
    def pools(self) -> tuple[int, int]:
        roles = self.deployment.roles
        if "prefill" in roles:
            return roles.count("prefill"), roles.count("decode")
        return len(roles), 0


@dataclass(frozen=True)
class Tried:
    """A simulated candidate.

    Attributes:
        levels: simulated latencies, in seconds.
        bands: error bands of `levels`, except levels without a measured error.
        missed: levels that the simulated latencies miss.
        close: levels whose bound lies inside the band, which is too close to call.
        slice_of: size of the whole fleet divided by that of the simulated one.
    """

    candidate: Candidate
    levels: Mapping[str, float]
    bands: Mapping[str, Band]
    missed: Sequence[str]
    close: Sequence[str]
    done: Simulated
    slice_of: int

    @property
    def holds(self) -> str:
        """Whether the candidate meets the levels: "yes", "no" or "too close"."""
        if set(self.missed) - set(self.close):
            return "no"
        return "too close" if self.close else "yes"


@dataclass(frozen=True)
class Repair:
    """A flag that brings a fleet closer to the levels that it misses."""

    flag: str
    tried: Tried


@dataclass
class Plan:
    """The result of a search: `tried` in order; `left` is why it ended early, or "".

    Attributes:
        repairs: changes of the best fleet if none holds, the best change first.
        observations: requests of the cheapest fleet, with their ledgers.
    """

    levels: Levels
    demand: Demand
    tried: list[Tried] = field(default_factory=list)
    left: str = ""
    not_possible: list[str] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    observations: Sequence[Observation] = ()

    def excess(self, one: Tried) -> float:
        """The largest factor by which a fleet exceeds a level; up to 1 it misses none."""
        return max(one.levels[name] / bound for name, bound in self.levels.bounds.items())

    @property
    def nearest(self) -> Tried | None:
        """The fleet that comes closest to the levels."""
        return min(self.tried, key=self.excess, default=None)

    @property
    def holding(self) -> list[Tried]:
        """Fleets that meet all levels, the cheapest first."""
        found = [one for one in self.tried if not one.missed]
        return sorted(found, key=lambda one: one.candidate.price)

    @property
    def certain(self) -> Tried | None:
        """The cheapest fleet that meets the levels with its whole bands."""
        return next((one for one in self.holding if not one.close), None)

    def cheapest(self, layout: str) -> Tried | None:
        return next((one for one in self.holding if one.candidate.layout == layout), None)


@dataclass(frozen=True)
class Space:
    """The search space: machines with prices per worker and hour, and engine options.

    Attributes:
        drafts: maximum drafts per decode, tried in addition to no speculation; 0 tries none.
        acceptance: probability that a draft is accepted.
    """

    model: str
    machines: Mapping[str, float]
    dtype: str = ""
    seats: Sequence[int] = (64, 256)
    chunks: Sequence[int] = (512, 2048)
    kv_types: Sequence[str] = ("auto",)
    ranks: Sequence[int] = RANKS
    calibrated: Mapping[str, Machine] = field(default_factory=dict)
    drafts: int = 0
    acceptance: float = 0.0

    def engines(self, gap: float | None) -> Iterator[dict[str, Any]]:
        """The possible engine options; `gap`, if given, becomes the scheduler's SLO."""
        pace = {} if gap is None else {"itl_slo_ms": round(1e3 * gap, 1)}
        for kind in self.kv_types:
            for chunk in self.chunks:
                for seats in self.seats:
                    if seats <= chunk:
                        yield {
                            "max_num_seqs": seats,
                            "max_num_batched_tokens": chunk,
                            **pace,
                            **({"kv_cache_dtype": kind} if kind != "auto" else {}),
                        }

    def workers(self, gap: float | None, refused: list[str]) -> Iterator[tuple[Deployment, float]]:
        """One worker per machine, options and number of ranks that fit, with its price."""
        for name, price in self.machines.items():
            fitting = 0
            for ranks in (1,) if name == "this" else self.ranks:
                machine = self.calibrated.get(name) or Machine(name, devices=ranks)
                why = ""
                for engine in self.engines(gap):
                    one = Deployment(self.model, machine, ("both",), engine, dtype=self.dtype)
                    try:
                        one.worker("both")
                    except TwinphaseError as error:
                        why = f"{name} x {ranks}: {error.cause}"
                        continue
                    yield one, price * ranks
                fitting += not why
                if why and ranks == self.ranks[-1] and not fitting:
                    refused.append(why)
                # More ranks than the minimum and the next number are rarely cheaper.
                if fitting >= 2:
                    break


def proposals(space: Space, demand: Demand, levels: Levels, refused: list[str]) -> list[Candidate]:
    """The cheapest fleet per machine and layout according to the formula, cheapest first."""
    best: dict[tuple[str, ...], Candidate] = {}
    known: list[tuple[Deployment, float, Capacity, LoadShape]] = []
    for one, price in space.workers(levels.gap, refused):
        worker = one.worker("both")
        rough = capacity_of(worker, demand.shape(levels.gap or 0.02), levels.gap)
        load = demand.shape(rough.step_seconds)
        found = capacity_of(worker, load, levels.gap)
        if levels.gap is not None and found.step_seconds > levels.gap:
            step = f"{1e3 * found.step_seconds:.3g} ms"
            refused.append(f"{one.title}: a decode step of one request alone takes {step}.")
            continue
        if found.long_prompt_seconds > 2 * levels.bounds.get("ttft", math.inf):
            refused.append(f"{one.title}: the prefill of a long prompt alone takes too long.")
            continue
        for drafts in dict.fromkeys((0, space.drafts)):
            drafting = replace(one, drafts=drafts, acceptance=space.acceptance if drafts else 0.0)
            found = capacity_of(
                worker, load, levels.gap, drafts=drafts, acceptance=drafting.acceptance
            )
            known.append((drafting, price, found, load))
            number = _workers(load.rate * found.seconds)
            fleet = replace(drafting, roles=roles_of(number, None, None))
            _offer(best, fleet, number * price, load)
    cheapest = {}
    for part in ("prefill_seconds", "decode_seconds"):
        cheapest[part] = sorted(known, key=lambda it: it[1] * getattr(it[2], part))[:3]
    for reader, read_price, reading, load in cheapest["prefill_seconds"]:
        for decoder, price, decoding, _ in cheapest["decode_seconds"]:
            if reader.engine.get("kv_cache_dtype") != decoder.engine.get("kv_cache_dtype"):
                continue
            prefill = _workers(load.rate * reading.prefill_seconds)
            decode = _workers(load.rate * decoding.decode_seconds)
            other = None if reader.machine == decoder.machine else decoder.machine
            one = replace(
                decoder,
                machine=reader.machine,
                roles=roles_of(None, prefill, decode),
                decode_machine=other,
            )
            _offer(best, one, prefill * read_price + decode * price, load)
    return sorted(best.values(), key=lambda candidate: candidate.price)


def _workers(use: float) -> int:
    return min(MAX_WORKERS, max(1, math.ceil(use / TARGET_USE)))


def _offer(
    best: dict[tuple[str, ...], Candidate], one: Deployment, price: float, load: LoadShape
) -> None:
    """Keep the cheapest candidate per machine, layout and number of ranks."""
    other = one.decode_machine
    machines = (one.machine.name, str(one.machine.devices), other.name if other else "")
    key = (*machines, one.roles[0], str(one.drafts))
    if key not in best or price < best[key].price:
        best[key] = Candidate(one, price, load)


def search(
    space: Space, demand: Demand, levels: Levels, progress: Progress, *, seconds: float, seed: int
) -> Plan:
    """Simulate proposals, cheapest first, until each layout has one that holds or time is up."""
    plan = Plan(levels, demand)
    order = count()
    queue = [
        (one.price, next(order), one) for one in proposals(space, demand, levels, plan.not_possible)
    ]
    heapq.heapify(queue)
    began = time.perf_counter()
    seen: set[tuple[str, int, int]] = set()
    while queue:
        _, _, candidate = heapq.heappop(queue)
        deployment = candidate.deployment
        key = (repr(replace(deployment, roles=("both",))), *candidate.pools)
        # A layout that holds needs no more expensive fleet, unless there is no runner-up yet.
        done = plan.cheapest(candidate.layout) is not None and len(plan.holding) > 1
        if key in seen or done:
            continue
        seen.add(key)
        used = time.perf_counter() - began
        progress(f"simulating {deployment.title}", min(99, round(100 * used / seconds)), 100)
        if used > seconds:
            plan.left = f"the time of {seconds:g} s is used; {len(queue) + 1} fleets were not tried"
            break
        tried = simulate(candidate, demand, levels, seed)
        plan.tried.append(tried)
        for larger in _larger(tried, tried.missed, levels):
            heapq.heappush(queue, (larger.price, next(order), larger))
    if plan.holding and not plan.left:
        _search_certain(plan, seed, progress, began + seconds)
    if plan.holding:
        # Only the fleets in the report get ledgers, which take half of a simulation's time.
        best = plan.holding[0].candidate
        plan.observations = simulate(best, demand, levels, seed, ledgers=True).done.observations
    else:
        plan.repairs = _repairs(plan, seed, time.perf_counter() + REPAIR_SHARE * seconds)
    return plan


def _search_certain(plan: Plan, seed: int, progress: Progress, until: float) -> None:
    """Enlarge the cheapest fleet with levels too close to call, until its bands hold them."""
    tried = plan.holding[0]
    for _ in range(MAX_CERTAIN):
        larger = min(
            _larger(tried, tried.close, plan.levels), key=lambda one: one.price, default=None
        )
        if plan.certain is not None or larger is None or time.perf_counter() > until:
            return
        progress(f"simulating {larger.deployment.title}", 99, 100)
        tried = simulate(larger, plan.demand, plan.levels, seed)
        plan.tried.append(tried)


def _repairs(plan: Plan, seed: int, until: float) -> list[Repair]:
    """Changes of one flag that bring the best fleet closer to its levels, by simulation."""
    nearest = plan.nearest
    if nearest is None:
        return []
    found = []
    for change in changes(nearest.candidate.deployment):
        if time.perf_counter() > until:
            break
        # The search itself tries more workers.
        if change.deployment.roles != nearest.candidate.deployment.roles:
            continue
        candidate = replace(nearest.candidate, deployment=change.deployment)
        with contextlib.suppress(TwinphaseError):
            tried = simulate(candidate, plan.demand, plan.levels, seed)
            if plan.excess(tried) < MIN_GAIN * plan.excess(nearest):
                found.append(Repair(change.flag, tried))
    return sorted(found, key=lambda one: plan.excess(one.tried))


def simulate(
    candidate: Candidate, demand: Demand, levels: Levels, seed: int, *, ledgers: bool = False
) -> Tried:
    """Simulate a slice of a fleet under its share of the load."""
    deployment = candidate.deployment
    slice_of = _slice(candidate.pools)
    prefill, decode = (number // slice_of for number in candidate.pools)
    roles = roles_of(None, prefill, decode) if decode else roles_of(prefill, None, None)
    load = candidate.load
    number = max(REQUESTS[0], min(REQUESTS[1], round(MAX_OUTPUT_TOKENS / load.output)))
    spec = replace(deployment, roles=roles).fleet(seed, ledgers=ledgers)
    requests = requests_of(
        demand, load.rate / slice_of, number, seed, spec.workers[0].config.max_model_len or 1 << 20
    )
    done = run_requests(spec, requests)
    found = levels.measured(done)
    known = levels.bands(read_trials(), deployment.source)
    close = [
        name
        for name, bound in levels.bounds.items()
        if name in known and known[name].contains(bound, found[name])
    ]
    return Tried(
        candidate,
        found,
        bands=known,
        missed=levels.missed(found),
        close=close,
        done=done,
        slice_of=slice_of,
    )


def requests_of(
    demand: Demand, rate: float, number: int, seed: int, context: int
) -> list[TraceRequest]:
    """An open load with Poisson arrivals and the lengths of a demand."""
    offsets = Paced(rate, seed).offsets([None] * number)
    return open_load(
        offsets,
        demand.prompt,
        demand.output,
        reasoning=demand.reasoning,
        shared_prefix=demand.shared_prefix,
        max_tokens=context,
        seed=seed,
    )


def _slice(pools: tuple[int, int]) -> int:
    """The number of equal slices of a fleet, each with a few workers."""
    workers = sum(pools)
    common = math.gcd(*pools) if pools[1] else pools[0]
    parts = [one for one in range(1, common + 1) if common % one == 0]
    return next((one for one in parts if workers // one <= SLICE_WORKERS), parts[-1])


def _larger(tried: Tried, late: Sequence[str], levels: Levels) -> Iterator[Candidate]:
    """Fleets with more workers in the pool of the levels that are late, if any."""
    if not late:
        return
    candidate = tried.candidate
    deployment = candidate.deployment
    prefill, decode = candidate.pools
    worst = max(tried.levels[name] / levels.bounds[name] for name in late)
    stale = candidate.stale + 1 if worst > MIN_GAIN * candidate.worst else 0
    if stale > MAX_STALE:  # More workers do not help.
        return
    candidate = replace(candidate, worst=min(worst, candidate.worst), stale=stale)
    # If a level is missed by far, adding single workers would waste time.
    step = 0.1 if worst < 2 else 0.25
    each = candidate.price / (prefill + decode)
    if not decode:
        more = max(1, math.ceil(step * prefill))
        if prefill + more <= MAX_WORKERS:
            roles = roles_of(prefill + more, None, None)
            price = candidate.price + more * each
            yield replace(candidate, deployment=replace(deployment, roles=roles), price=price)
        return
    for name, numbers in (
        ("ttft", (prefill + max(1, math.ceil(step * prefill)), decode)),
        ("itl", (prefill, decode + max(1, math.ceil(step * decode)))),
    ):
        wanted = "ttft" in late if name == "ttft" else set(late) != {"ttft"}
        if wanted and sum(numbers) <= MAX_WORKERS:
            roles = roles_of(None, *numbers)
            price = candidate.price + (sum(numbers) - prefill - decode) * each
            yield replace(candidate, deployment=replace(deployment, roles=roles), price=price)
