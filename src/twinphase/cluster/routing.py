"""Which worker a request goes to: the one where it costs everybody the least time, by the workers' own cost models.

A pure function of what the router was told: no thread, no I/O, no clock. The live router (`router.py`) and the
simulation use the same one. Other routers weigh blocks against loads; here all of it is seconds, so that nothing needs
a weight.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from typing import Literal

from twinphase.batch import StepWork
from twinphase.errors import EngineUnavailableError
from twinphase.scheduler.chunk import StepTimes

__all__ = ["Decision", "Role", "Routing", "WorkerLoad"]

Role = Literal["both", "prefill", "decode"]
FRAME_SECONDS = 3e-4  # for a block that is sent: packing, checks and unpacking


@dataclass
class WorkerLoad:
    """What the router knows of a worker.

    Attributes:
        name, role: a worker of role "decode" reads prompts too, where that is faster than sending them.
        times: its cost model.
        prefill_seconds: predicted, of the prompts that were sent there and are not read yet.
        num_decodes: requests that were sent there and have not finished; all of them decode, or will.
        decode_tokens: their contexts, added up.
        accepts: false while it drains.
    """

    name: str
    role: Role
    times: StepTimes
    prefill_seconds: float = 0.0
    num_decodes: int = 0
    decode_tokens: int = 0
    accepts: bool = True
    _steps: tuple[int, float, float] = field(default=(-1, 0.0, 0.0), repr=False)

    def step_seconds(self) -> tuple[float, float]:
        """A step of the requests that it has, and of one more."""
        if self._steps[0] != self.num_decodes:
            context = self.decode_tokens / self.num_decodes if self.num_decodes else 0.0
            now, then = (self.times.seconds(StepWork.of_decodes(count, context))
                         for count in (self.num_decodes, self.num_decodes + 1))  # fmt: skip
            self._steps = (self.num_decodes, now, then)
        return self._steps[1:]

    def forget_steps(self) -> None:
        """Other `times` hold from now on."""
        self._steps = (-1, 0.0, 0.0)


@dataclass(frozen=True)
class Decision:
    """Where a request goes.

    Attributes:
        worker: that decodes it.
        prefill_worker: that reads its prompt; None where `worker` does.
        num_tokens, num_cached: to read, and those of them that the worker who reads already has.
        read_seconds: predicted for the rest of the prompt there.
        cost: predicted seconds until the first token, and for which others are held up; without what decoding costs
            even at the worker where it costs least.
        instead: the next best, in words, and its cost; None where there is no other.
    """

    worker: str
    prefill_worker: str | None
    num_tokens: int
    num_cached: int
    read_seconds: float
    cost: float = 0.0
    instead: tuple[str, float] | None = None

    @cached_property
    def reason(self) -> str:
        """The decision in words, as the ledger and `explain` show it."""
        words = f"{_where(self)}: {self.num_tokens - self.num_cached:,} of {self.num_tokens:,} tokens to read"
        if self.instead is None:
            return words
        return f"{words}, {1e3 * self.cost:.0f} ms < {1e3 * self.instead[1]:.0f} ms ({self.instead[0]})"


def _where(decision: Decision) -> str:
    return f"{decision.prefill_worker}, then {decision.worker}" if decision.prefill_worker else decision.worker


class Routing:
    """Chooses among the workers it is shown."""

    def __init__(self, *, block_size: int, policy: Literal["predicted", "random"] = "predicted", seed: int = 0) -> None:
        """`policy` "random" takes any worker of the right role: what the prediction is worth is seen beside it."""
        self.block_size, self.policy = block_size, policy
        self._random = random.Random(seed)

    def choose(
        self, num_tokens: int, num_outputs: float, hits: Mapping[str, int], workers: Iterable[WorkerLoad]
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
        decoders, readers = list[WorkerLoad](), list[WorkerLoad]()
        for worker in workers:
            if worker.accepts:
                (readers if worker.role == "prefill" else decoders).append(worker)
        if not decoders:
            raise EngineUnavailableError("No worker takes requests.", "Send the request again in a moment.")
        quote = _Quote(num_tokens, num_outputs, hits, self.block_size)
        if self.policy == "random":
            return quote.decision(self._random.choice(decoders), self._random.choice(readers) if readers else None)
        least = min(map(quote.decode, decoders))
        offers = [(quote.local(decoder) - least, quote.decision(decoder)) for decoder in _best(decoders, quote.local)]
        if readers:
            (reader, *_), (decoder, *_) = _best(readers, quote.until_read), _best(decoders, quote.after_transfer)
            cost = quote.until_read(reader) + quote.after_transfer(decoder) - least
            offers = sorted([offers[0], (cost, quote.decision(decoder, reader))], key=lambda offer: offer[0])
        (cost, decision), *others = offers
        return replace(decision, cost=cost, instead=(_where(others[0][1]), others[0][0]) if others else None)


def _best(workers: Sequence[WorkerLoad], cost: Callable[[WorkerLoad], float]) -> list[WorkerLoad]:
    """The two best, the better one first; of equals the first."""
    return nsmallest(2, workers, key=cost)


class _Quote:
    """What one request would cost at each worker: seconds, those of others that it holds up added."""

    def __init__(self, num_tokens: int, num_outputs: float, hits: Mapping[str, int], block_size: int) -> None:
        self._num_tokens, self._num_outputs, self._hits, self._block_size = num_tokens, num_outputs, hits, block_size
        self._most_cached = (num_tokens - 1) // block_size * block_size  # the last token's logits are wanted
        self._read: dict[tuple[int, int], float] = {}

    def decision(self, worker: WorkerLoad, reader: WorkerLoad | None = None) -> Decision:
        reads = reader or worker
        name = reader.name if reader else None
        return Decision(
            worker.name, name, self._num_tokens, self._cached(reads), self._reading(reads, self._cached(reads))
        )

    def local(self, worker: WorkerLoad) -> float:
        """Reading and decoding there."""
        read = self._reading(worker, self._cached(worker))
        return worker.prefill_seconds + read * (1 + worker.num_decodes) + self.decode(worker)

    def until_read(self, worker: WorkerLoad) -> float:
        """Reading there, behind those that came before."""
        return worker.prefill_seconds + self._reading(worker, self._cached(worker))

    def after_transfer(self, worker: WorkerLoad) -> float:
        """Decoding there what another reads: it computes the last tokens again, which fill no block.

        Blocks are sent while the next ones are read, so that only the last one is waited for.
        """
        last = self._reading(worker, self._most_cached) * (1 + worker.num_decodes)
        sent = FRAME_SECONDS if self._cached(worker) < self._most_cached else 0.0
        return sent + last + self.decode(worker)

    def decode(self, worker: WorkerLoad) -> float:
        now, then = worker.step_seconds()
        return self._num_outputs * (then + worker.num_decodes * (then - now))

    def _cached(self, worker: WorkerLoad) -> int:
        return min(self._hits.get(worker.name, 0) * self._block_size, self._most_cached)

    def _reading(self, worker: WorkerLoad, cached: int) -> float:
        key = id(worker.times), cached  # workers of one kind share a cost model, and most have the same cached: nothing
        if key not in self._read:
            self._read[key] = worker.times.seconds(StepWork.of_chunk(cached, self._num_tokens - cached, True))
        return self._read[key]
