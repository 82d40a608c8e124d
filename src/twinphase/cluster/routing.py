"""Chooses the worker where a request costs all users the least time, by the cost models.

A pure function of the reported loads: no thread, no I/O, no clock. The live router (`router.py`)
and the simulation share it. Other routers weigh cached blocks against loads; here every cost is in
seconds, so that nothing needs a weight.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from twinphase.batch import StepWork
from twinphase.errors import EngineUnavailableError
from twinphase.scheduler.chunk import StepCost

Role = Literal["both", "prefill", "decode"]
# Packing, checking and unpacking a block that is sent.
FRAMING_SECONDS_PER_BLOCK = 3e-4


@dataclass
class WorkerLoad:
    """The load of a worker, as far as the router knows it.

    Attributes:
        role: a worker of role "decode" prefills too, where that is faster than receiving KV blocks.
        times: the worker's cost model.
        prefill_seconds: predicted time to prefill the prompts that are queued there.
        num_decodes: unfinished requests that were sent there to decode.
        decode_tokens: sum of the lengths of their contexts.
        accepts: false while the worker drains.
    """

    name: str
    role: Role
    times: StepCost
    prefill_seconds: float = 0.0
    num_decodes: int = 0
    decode_tokens: int = 0
    accepts: bool = True
    _step: tuple[int, float] = field(default=(-1, 0.0), repr=False)

    def step_seconds(self) -> float:
        """Cost of one token of one more request: its step, and the delay of the others' tokens."""
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
        """Recompute step times, since `times` has changed."""
        self._step = (-1, 0.0)


@dataclass(frozen=True)
class Decision:
    """Where a request goes.

    Attributes:
        worker: the decode worker.
        prefill_worker: prefills the prompt; None where `worker` does.
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
        """The policy "random" takes any worker of the right role, as a baseline.

        A router sets `block_size`, the tokens of a KV block, when the first worker joins.
        """
        self.block_size = block_size
        self.policy = policy
        self._random = random.Random(seed)

    def choose(
        self,
        num_tokens: int,
        num_outputs: float,
        hits: Mapping[str, int],
        workers: Iterable[WorkerLoad],
    ) -> Decision:
        """Where to send a request.

        Args:
            num_tokens: tokens of the prompt and of the answer so far.
            num_outputs: expected number of tokens still to decode.
            hits: cached blocks of the prefix, by worker (`BlockIndex.hits`).
            workers: all workers, draining ones included.

        Raises:
            EngineUnavailableError: no decode worker accepts requests.
        """
        accepting = [worker for worker in workers if worker.accepts]
        decode_workers = [worker for worker in accepting if worker.role != "prefill"]
        prefill_workers = [worker for worker in accepting if worker.role == "prefill"]
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
        return estimate.best(decode_workers, prefill_workers)


class _CostEstimate:
    """The cost of one request at each worker, in seconds, with the delay of other requests."""

    def __init__(
        self, num_tokens: int, num_outputs: float, hits: Mapping[str, int], block_size: int
    ) -> None:
        self._num_tokens = num_tokens
        self._num_outputs = num_outputs
        self._hits = hits
        self._block_size = block_size
        # The last token is always computed, since its logits are needed.
        self._max_cached = (num_tokens - 1) // block_size * block_size
        self._prefills: dict[int, _PrefillSeconds] = {}

    def best(
        self, decode_workers: Sequence[WorkerLoad], prefill_workers: Sequence[WorkerLoad]
    ) -> Decision:
        """The cheapest choice, and the next best in words; the first one of equals."""
        local, sent, least = self._decoding(decode_workers)
        order = sorted(range(len(decode_workers)), key=local.__getitem__)
        offers: list[tuple[float, WorkerLoad, WorkerLoad | None]]
        offers = [(local[index] - least, decode_workers[index], None) for index in order[:2]]
        if prefill_workers:
            until_prefilled = self._until_prefilled(prefill_workers)
            soonest = min(until_prefilled)
            cheapest = min(sent)
            apart = (
                decode_workers[sent.index(cheapest)],
                prefill_workers[until_prefilled.index(soonest)],
            )
            offers = sorted(
                [offers[0], (soonest + cheapest - least, *apart)], key=lambda offer: offer[0]
            )
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

    def _decoding(self, workers: Sequence[WorkerLoad]) -> tuple[list[float], list[float], float]:
        """Per worker: cost of prefill and decode there; of decode only; the least decode cost.

        A worker that receives blocks computes the tokens of the last, partial block again. Blocks
        are sent while the next chunk is computed, so that only the last one is waited for.
        """
        hits = self._hits
        size = self._block_size
        max_cached = self._max_cached
        local = list[float]()
        sent = list[float]()
        decodes = list[float]()
        times = None
        # One plain loop, since it runs over every worker for every request.
        for worker in workers:
            if worker.times is not times:
                times = worker.times
                prefill = self._prefill_seconds(worker)
                last = prefill[max_cached]
            slowed = 1 + worker.num_decodes
            decode = self._num_outputs * worker.step_seconds()
            cached = hits.get(worker.name, 0) * size
            if cached < max_cached:
                local.append(worker.prefill_seconds + prefill[cached] * slowed + decode)
                sent.append(FRAMING_SECONDS_PER_BLOCK + last * slowed + decode)
            else:
                local.append(worker.prefill_seconds + last * slowed + decode)
                sent.append(last * slowed + decode)
            decodes.append(decode)
        return local, sent, min(decodes)

    def _until_prefilled(self, workers: Sequence[WorkerLoad]) -> list[float]:
        """Per worker: seconds until the prompt is prefilled there, queued prompts included."""
        hits = self._hits
        size = self._block_size
        max_cached = self._max_cached
        until = list[float]()
        times = None
        for worker in workers:
            if worker.times is not times:
                times = worker.times
                prefill = self._prefill_seconds(worker)
            cached = hits.get(worker.name, 0) * size
            until.append(
                worker.prefill_seconds + prefill[cached if cached < max_cached else max_cached]
            )
        return until

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
