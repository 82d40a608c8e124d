"""Chooses the worker where a request delays all users the least, by the cost models.

The choice is a pure function of the reported loads, without threads, I/O or a clock; the live
router (`router.py`) and the simulation share it. Other routers weigh cached blocks against loads;
here every cost is in seconds, so that nothing needs a weight.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from twinphase.batch import StepWork
from twinphase.cluster.role import Role
from twinphase.errors import EngineUnavailableError
from twinphase.scheduler.chunk import StepCost

# Seconds to pack, check and unpack one block that is sent.
FRAMING_SECONDS_PER_BLOCK = 3e-4
# These fields of a load decide its pools and its cost model.
POOL_FIELDS = ("role", "times", "accepts")

Floats = npt.NDArray[np.float64]


@dataclass
class WorkerLoad:
    """The load of a worker, as far as the router knows it.

    Attributes:
        role: role of the worker; "decode" prefills too, if that is faster than receiving KV blocks.
        times: the worker's cost model.
        prefill_seconds: predicted time to prefill the prompts that are queued there.
        num_decodes: unfinished requests that were sent there to decode.
        decode_tokens: sum of the lengths of their contexts.
        accepts: False while the worker drains.
    """

    name: str
    role: Role
    times: StepCost
    prefill_seconds: float = 0.0
    num_decodes: int = 0
    decode_tokens: int = 0
    accepts: bool = True
    _step: tuple[int, float] = field(default=(-1, 0.0), repr=False)
    _pools: Pools | None = field(default=None, repr=False, compare=False)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if (pools := self.__dict__.get("_pools")) is not None:
            pools.note_change(self.name, name)

    def step_seconds(self) -> float:
        """Seconds per token that one more decoding request costs: its step, and others' delay."""
        if self._step[0] != self.num_decodes:
            count = self.num_decodes
            context = self.decode_tokens / count if count else 0.0
            current, longer = (
                self.times.seconds(StepWork.of_decodes(decodes, context, self.times.window))
                for decodes in (count, count + 1)
            )
            self._step = (count, longer + count * (longer - current))
        return self._step[1]

    def forget_steps(self) -> None:
        """Recompute step times after a change of `times`."""
        self._step = (-1, 0.0)
        if self._pools is not None:
            self._pools.is_current = False


class Pool:
    """The loads of workers as columns, so that the costs at all workers are one vector sum.

    Attributes:
        loads: loads in the order that the workers joined; `places` maps names to positions.
        queued: `prefill_seconds` of each.
        slowed: number of requests that a prefill there delays, the prefilled one included.
        steps: `step_seconds` of each.
        by_times: positions of the workers that share a cost model, one entry per model.
    """

    def __init__(self, loads: Sequence[WorkerLoad], *, decodes: bool) -> None:
        self.loads = loads
        self.places = {load.name: place for place, load in enumerate(loads)}
        self.queued: Floats = np.zeros(len(loads))
        self.slowed: Floats = np.zeros(len(loads))
        self.steps: Floats = np.zeros(len(loads))
        self._decodes = decodes
        groups: dict[int, list[int]] = {}
        for place, load in enumerate(loads):
            groups.setdefault(id(load.times), []).append(place)
        self.by_times = [np.array(places) for places in groups.values()]
        for load in loads:
            self.update(load.name)

    def update(self, name: str) -> None:
        """Copy a worker's load into the columns; workers of other pools are ignored."""
        place = self.places.get(name)
        if place is not None:
            load = self.loads[place]
            self.queued[place] = load.prefill_seconds
            self.slowed[place] = 1 + load.num_decodes
            if self._decodes:
                self.steps[place] = load.step_seconds()


class Pools:
    """The workers that accept requests: one pool that decodes, and one that only prefills.

    Attributes:
        is_current: false once a worker's role, cost model or acceptance has changed.
    """

    def __init__(self, workers: Iterable[WorkerLoad]) -> None:
        loads = list(workers)
        accepting = [load for load in loads if load.accepts]
        self.decode = Pool([one for one in accepting if one.role != "prefill"], decodes=True)
        self.prefill = Pool([one for one in accepting if one.role == "prefill"], decodes=False)
        self.is_current = True
        self._changed: set[str] = set()
        for load in loads:
            load._pools = self
        self._changed.clear()

    def note_change(self, name: str, attribute: str) -> None:
        """Note that an attribute of a worker's load has changed."""
        if attribute in POOL_FIELDS:
            self.is_current = False
        elif not attribute.startswith("_"):
            self._changed.add(name)

    def update(self) -> None:
        """Apply the changes since the last call."""
        for name in self._changed:
            self.decode.update(name)
            self.prefill.update(name)
        self._changed.clear()


@dataclass(frozen=True)
class Decision:
    """The workers chosen for a request, and why.

    Attributes:
        worker: the decode worker.
        prefill_worker: the prefill worker; None if `worker` prefills too.
        num_tokens: tokens of the prompt and of the answer so far.
        num_cached: number of these that the prefill worker has cached.
        prefill_seconds: predicted time to prefill the rest.
        cost: predicted seconds until the first token, plus the delay of other requests, minus the
            decode cost at the cheapest worker.
        instead: the next best choice in words, and its cost; None if there is no other.
    """

    worker: str
    prefill_worker: str | None
    num_tokens: int
    num_cached: int
    prefill_seconds: float
    cost: float = 0.0
    instead: tuple[str, float] | None = None

    @cached_property
    def reason(self) -> str:
        """The decision in words, as the ledger and `explain` show it."""
        path = _path(self.worker, self.prefill_worker)
        uncached = self.num_tokens - self.num_cached
        reason = f"{path}: {uncached:,} of {self.num_tokens:,} tokens to prefill"
        if self.instead is None:
            return reason
        return (
            f"{reason}, {1e3 * self.cost:.0f} ms < {1e3 * self.instead[1]:.0f} ms "
            f"({self.instead[0]})"
        )


def _path(worker: str, prefill_worker: str | None) -> str:
    return f"{prefill_worker}, then {worker}" if prefill_worker else worker


class Routing:
    """Chooses workers by predicted cost, or at random."""

    def __init__(
        self,
        *,
        block_size: int = 0,
        policy: Literal["predicted", "random"] = "predicted",
        seed: int = 0,
    ) -> None:
        """The policy "random" takes any worker of the right role; it is the baseline of benchmarks.

        A router sets `block_size`, in tokens, when the first worker joins.
        """
        self.block_size = block_size
        self.policy = policy
        self._random = random.Random(seed)

    def choose(
        self,
        num_tokens: int,
        num_outputs: float,
        hits: Mapping[str, int],
        workers: Iterable[WorkerLoad] | Pools,
    ) -> Decision:
        """Choose where to send a request.

        Args:
            num_tokens: tokens of the prompt and of the answer so far.
            num_outputs: expected number of tokens still to decode.
            hits: cached blocks of the prefix, by worker (`BlockIndex.hits`).
            workers: all workers, draining ones included.

        Raises:
            EngineUnavailableError: no decode worker accepts requests.
        """
        pools = workers if isinstance(workers, Pools) else Pools(workers)
        decode_workers = pools.decode.loads
        prefill_workers = pools.prefill.loads
        if not decode_workers:
            raise EngineUnavailableError(
                "No worker takes requests.", "Send the request again in a moment."
            )
        estimate = _CostEstimate(num_tokens, num_outputs, hits, self.block_size)
        if self.policy == "random":
            return estimate.decision(
                self._random.choice(decode_workers),
                self._random.choice(prefill_workers) if prefill_workers else None,
            )
        pools.update()
        return estimate.best(pools)


class _CostEstimate:
    """The cost of one request at each worker, in seconds, with the delay of other requests."""

    def __init__(
        self, num_tokens: int, num_outputs: float, hits: Mapping[str, int], block_size: int
    ) -> None:
        self._num_tokens = num_tokens
        self._num_outputs = num_outputs
        self._hits = hits
        self._block_size = block_size
        # The last token is always computed, because its logits are needed.
        self._max_cached = (num_tokens - 1) // block_size * block_size
        self._prefills: dict[int, _PrefillSeconds] = {}

    def best(self, pools: Pools) -> Decision:
        """The cheapest choice, and the second best in words; ties go to the first worker."""
        workers = pools.decode.loads
        local, sent, least = self._decoding(pools.decode)
        offers: list[tuple[float, WorkerLoad, WorkerLoad | None]] = []
        for _ in range(min(2, len(workers))):
            place = int(local.argmin())
            offers.append((float(local[place]) - least, workers[place], None))
            local[place] = np.inf
        if pools.prefill.loads:
            until_prefilled = self._until_prefilled(pools.prefill)
            soonest = int(until_prefilled.argmin())
            cheapest = int(sent.argmin())
            cost = float(until_prefilled[soonest]) + float(sent[cheapest]) - least
            apart = (cost, workers[cheapest], pools.prefill.loads[soonest])
            offers = sorted([offers[0], apart], key=lambda offer: offer[0])
        (cost, worker, prefill_worker), *others = offers
        instead = [
            (_path(decoder.name, prefiller.name if prefiller else None), cost)
            for cost, decoder, prefiller in others
        ]
        return self.decision(worker, prefill_worker, cost, *instead)

    def decision(
        self,
        worker: WorkerLoad,
        prefill_worker: WorkerLoad | None,
        cost: float = 0.0,
        instead: tuple[str, float] | None = None,
    ) -> Decision:
        prefiller = prefill_worker or worker
        cached = min(self._hits.get(prefiller.name, 0) * self._block_size, self._max_cached)
        return Decision(
            worker.name,
            prefill_worker.name if prefill_worker else None,
            self._num_tokens,
            cached,
            prefill_seconds=self._prefill_seconds(prefiller)[cached],
            cost=cost,
            instead=instead,
        )

    def _decoding(self, pool: Pool) -> tuple[Floats, Floats, float]:
        """Cost per worker of prefill and decode, and of decode alone; and the least decode cost.

        A worker that receives blocks computes the tokens of the last, partial block again. Blocks
        are sent while the next chunk is computed, so that only the last block adds a delay.
        """
        prefill, last = self._prefilling(pool)
        wait = np.full(len(pool.loads), FRAMING_SECONDS_PER_BLOCK if self._max_cached else 0.0)
        for name, blocks in self._hits.items():
            place = pool.places.get(name)
            if place is not None and blocks * self._block_size >= self._max_cached:
                wait[place] = 0.0
        decode = self._num_outputs * pool.steps
        local = pool.queued + prefill * pool.slowed + decode
        sent = wait + last * pool.slowed + decode
        return local, sent, float(decode.min())

    def _until_prefilled(self, pool: Pool) -> Floats:
        """Seconds per worker until the prompt is prefilled there, queued prompts included."""
        return pool.queued + self._prefilling(pool)[0]

    def _prefilling(self, pool: Pool) -> tuple[Floats, Floats]:
        """Seconds per worker to prefill the uncached tokens, and to send the last block."""
        prefill = np.empty(len(pool.loads))
        last = np.empty(len(pool.loads))
        for places in pool.by_times:
            seconds = self._prefill_seconds(pool.loads[places[0]])
            prefill[places] = seconds[0]
            last[places] = seconds[self._max_cached]
        for name, blocks in self._hits.items():
            place = pool.places.get(name)
            if place is not None:
                cached = min(blocks * self._block_size, self._max_cached)
                prefill[place] = self._prefill_seconds(pool.loads[place])[cached]
        return prefill, last

    def _prefill_seconds(self, worker: WorkerLoad) -> _PrefillSeconds:
        # Workers on equal machines share a cost model.
        key = id(worker.times)
        if key not in self._prefills:
            self._prefills[key] = _PrefillSeconds(worker.times, self._num_tokens)
        return self._prefills[key]


class _PrefillSeconds(dict[int, float]):
    """Predicted seconds to prefill the rest of a prompt, by its number of cached tokens."""

    def __init__(self, times: StepCost, num_tokens: int) -> None:
        self._times = times
        self._num_tokens = num_tokens

    def __missing__(self, cached: int) -> float:
        self[cached] = seconds = self._times.seconds(
            StepWork.of_chunk(cached, self._num_tokens - cached, True, self._times.window)
        )
        return seconds
