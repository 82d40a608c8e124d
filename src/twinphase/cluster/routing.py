"""Chooses the worker where a request costs all users the least time, by the cost models.

A pure function of what the router was told: no thread, no I/O, no clock. The live router
(`router.py`) and the simulation use the same one. Other routers weigh blocks against loads; here
all of it is seconds, so that nothing needs a weight.
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
FRAME_SECONDS = 3e-4  # for a block that is sent: packing, checks and unpacking


@dataclass
class WorkerLoad:
    """What the router knows of a worker.

    Attributes:
        name, role: a worker of role "decode" reads prompts too, where that is faster than sending
            them.
        times: its cost model.
        prefill_seconds: predicted, of the prompts that were sent there and are not read yet.
        num_decodes: requests that were sent there and have not finished; all of them decode, or
            will.
        decode_tokens: their contexts, added up.
        accepts: false while it drains.
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
            now, then = (
                self.times.seconds(StepWork.of_decodes(some, context))
                for some in (count, count + 1)
            )
            self._step = (count, then + count * (then - now))
        return self._step[1]

    def forget_steps(self) -> None:
        """Other `times` hold from now on."""
        self._step = (-1, 0.0)


@dataclass(frozen=True)
class Decision:
    """Where a request goes.

    Attributes:
        worker: that decodes it.
        prefill_worker: that reads its prompt; None where `worker` does.
        num_tokens, num_cached: to read, and those of them that the worker who reads already has.
        prefill_seconds: predicted for the rest of the prompt there.
        cost: predicted seconds until the first token, and for which others are held up; without
            what decoding costs even at the worker where it costs least.
        instead: the next best, in words, and its cost; None where there is no other.
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
        way = _way(self.worker, self.prefill_worker)
        unread = self.num_tokens - self.num_cached
        words = f"{way}: {unread:,} of {self.num_tokens:,} tokens to read"
        if self.instead is None:
            return words
        return (
            f"{words}, {1e3 * self.cost:.0f} ms < {1e3 * self.instead[1]:.0f} ms "
            f"({self.instead[0]})"
        )


def _way(worker: str, reader: str | None) -> str:
    return f"{reader}, then {worker}" if reader else worker


class Routing:
    """Chooses among the workers it is shown."""

    def __init__(
        self,
        *,
        block_size: int,
        policy: Literal["predicted", "random"] = "predicted",
        seed: int = 0,
    ) -> None:
        """The policy "random" takes any worker of the right role, as a baseline."""
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
            num_tokens: of its prompt, and of its answer as far as it has come.
            num_outputs: tokens that are still expected to be decoded.
            hits: blocks of its beginning that are cached, by worker (`BlockIndex.hits`).
            workers: all that there are.

        Raises:
            EngineUnavailableError: no worker that decodes takes requests.
        """
        accepting = [worker for worker in workers if worker.accepts]
        decoders = [worker for worker in accepting if worker.role != "prefill"]
        readers = [worker for worker in accepting if worker.role == "prefill"]
        if not decoders:
            raise EngineUnavailableError(
                "No worker takes requests.", "Send the request again in a moment."
            )
        quote = _Quote(num_tokens, num_outputs, hits, self.block_size)
        if self.policy == "random":
            return quote.decision(
                self._random.choice(decoders), self._random.choice(readers) if readers else None
            )
        return quote.best(decoders, readers)


class _Quote:
    """The cost of one request at each worker, in seconds, with the delay of other requests."""

    def __init__(
        self, num_tokens: int, num_outputs: float, hits: Mapping[str, int], block_size: int
    ) -> None:
        self._num_tokens = num_tokens
        self._num_outputs = num_outputs
        self._hits = hits
        self._block_size = block_size
        self._most_cached = (
            (num_tokens - 1) // block_size * block_size
        )  # the last token's logits are wanted
        self._reads: dict[int, _Reads] = {}

    def best(self, decoders: Sequence[WorkerLoad], readers: Sequence[WorkerLoad]) -> Decision:
        """The way that costs least, and the next best in words; of equals the first."""
        local, sent, least = self._decoding(decoders)
        order = sorted(range(len(decoders)), key=local.__getitem__)
        offers: list[tuple[float, WorkerLoad, WorkerLoad | None]]
        offers = [(local[index] - least, decoders[index], None) for index in order[:2]]
        if readers:
            until_read = self._until_read(readers)
            soonest = min(until_read)
            cheapest = min(sent)
            apart = decoders[sent.index(cheapest)], readers[until_read.index(soonest)]
            offers = sorted(
                [offers[0], (soonest + cheapest - least, *apart)], key=lambda offer: offer[0]
            )
        (cost, worker, reader), *others = offers
        instead = [
            (_way(one.name, other.name if other else None), cost) for cost, one, other in others
        ]
        return self.decision(worker, reader, cost, *instead)

    def decision(
        self,
        worker: WorkerLoad,
        reader: WorkerLoad | None,
        cost: float = 0.0,
        instead: tuple[str, float] | None = None,
    ) -> Decision:
        reads = reader or worker
        cached = min(self._hits.get(reads.name, 0) * self._block_size, self._most_cached)
        name = reader.name if reader else None
        return Decision(
            worker.name,
            name,
            self._num_tokens,
            cached,
            self._reads_of(reads)[cached],
            cost,
            instead,
        )

    def _decoding(self, workers: Sequence[WorkerLoad]) -> tuple[list[float], list[float], float]:
        """Per worker: prefill and decode there; decode there only; and the least cost of a decode.

        A worker that gets blocks computes the last tokens again, which fill none. Blocks are sent
        while the next ones are read, so that only the last one is waited for.
        """
        hits = self._hits
        size = self._block_size
        most = self._most_cached
        local = list[float]()
        sent = list[float]()
        decodes = list[float]()
        times = None
        for worker in workers:  # written out: a router asks this of every worker for every request
            if worker.times is not times:
                times = worker.times
                reads = self._reads_of(worker)
                last = reads[most]
            slowed = 1 + worker.num_decodes
            decode = self._num_outputs * worker.step_seconds()
            cached = hits.get(worker.name, 0) * size
            if cached < most:
                local.append(worker.prefill_seconds + reads[cached] * slowed + decode)
                sent.append(FRAME_SECONDS + last * slowed + decode)
            else:
                local.append(worker.prefill_seconds + last * slowed + decode)
                sent.append(last * slowed + decode)
            decodes.append(decode)
        return local, sent, min(decodes)

    def _until_read(self, workers: Sequence[WorkerLoad]) -> list[float]:
        """By worker: reading there, behind those that came before."""
        hits = self._hits
        size = self._block_size
        most = self._most_cached
        until = list[float]()
        times = None
        for worker in workers:
            if worker.times is not times:
                times = worker.times
                reads = self._reads_of(worker)
            cached = hits.get(worker.name, 0) * size
            until.append(worker.prefill_seconds + reads[cached if cached < most else most])
        return until

    def _reads_of(self, worker: WorkerLoad) -> _Reads:
        key = id(worker.times)  # workers of one kind share a cost model
        if key not in self._reads:
            self._reads[key] = _Reads(worker.times, self._num_tokens)
        return self._reads[key]


class _Reads(dict[int, float]):
    """Predicted seconds for the rest of a prompt, by the tokens of it that are cached."""

    def __init__(self, times: StepCost, num_tokens: int) -> None:
        self._times = times
        self._num_tokens = num_tokens

    def __missing__(self, cached: int) -> float:
        self[cached] = seconds = self._times.seconds(
            StepWork.of_chunk(cached, self._num_tokens - cached, True)
        )
        return seconds
