"""The load of each worker in a router: predicted prefill seconds, decodes, cached blocks.

It has no thread, no I/O and no clock, so that the live router (`router.py`) and the simulation
share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from twinphase.cluster.block_index import BlockIndex
from twinphase.cluster.role import Role
from twinphase.cluster.routing import Decision, Pools, Routing, WorkerLoad
from twinphase.scheduler.chunk import StepCost

INITIAL_USUAL_OUTPUT_TOKENS = 128.0
USUAL_OUTPUT_LEARNING_RATE = 0.02


@dataclass
class Placement:
    """The workers chosen for a request, and the load that it adds to them until it ends.

    Attributes:
        decoder, prefiller: loads of the two workers; the same object if one worker does both.
        chain: hashes of the request's full blocks.
        prefill_seconds: predicted time to prefill the rest of the prompt.
    """

    decision: Decision
    decoder: WorkerLoad
    prefiller: WorkerLoad
    chain: Sequence[bytes]
    prefill_seconds: float
    has_ended: bool = False


class Fleet:
    """The workers with their loads.

    Attributes:
        workers: loads by name, in the order that the workers joined.
        index: the blocks in each worker's prefix cache.
        usual_output: exponential moving average of the answers' lengths, in tokens.
        routing: chooses workers.
    """

    def __init__(self, routing: Routing) -> None:
        self.workers: dict[str, WorkerLoad] = {}
        self.index = BlockIndex()
        self.usual_output = INITIAL_USUAL_OUTPUT_TOKENS
        self.routing = routing
        self._pools: Pools | None = None

    def join(self, name: str, role: Role, times: StepCost) -> None:
        """Add a worker with an empty prefix cache; it replaces an earlier worker of that name."""
        self.leave(name)
        self.workers[name] = WorkerLoad(name, role, times)
        self._pools = None

    def leave(self, name: str) -> None:
        """Remove a worker that died or left."""
        self.workers.pop(name, None)
        self.index.forget(name)
        self._pools = None

    def place(
        self,
        num_tokens: int,
        chain: Sequence[bytes],
        *,
        num_done: int = 0,
        max_tokens: int | None = None,
    ) -> Placement:
        """Choose a worker for a request, and add the request to that worker's load until `end`.

        Args:
            num_tokens: tokens of its prompt and of its answer so far.
            chain: hashes of its full blocks, from the beginning.
            num_done: tokens of its answer so far.
            max_tokens: maximum tokens of its answer, if that is known.

        Raises:
            EngineUnavailableError: no worker accepts requests.
        """
        left = max(1.0, self.usual_output - num_done)
        if max_tokens is not None:
            left = min(left, max_tokens - num_done)
        hits = self.index.hits(chain)
        if self._pools is None or not self._pools.is_current:
            self._pools = Pools(self.workers.values())
        decision = self.routing.choose(num_tokens, left, hits, self._pools)
        decoder = self.workers[decision.worker]
        prefiller = self.workers[decision.prefill_worker or decision.worker]
        decoder.num_decodes += 1
        decoder.decode_tokens += num_tokens
        prefiller.prefill_seconds += decision.prefill_seconds
        for name in {decoder.name, prefiller.name}:
            self.index.expect(name, islice(chain, hits.get(name, 0), None))
        return Placement(decision, decoder, prefiller, chain, decision.prefill_seconds)

    def prefilled(self, placement: Placement, num_prefilled: int) -> None:
        """Note that `num_prefilled` tokens of the request are in its prefill worker's KV cache."""
        decision = placement.decision
        to_prefill = max(1, decision.num_tokens - decision.num_cached)
        share = max(0, decision.num_tokens - num_prefilled) / to_prefill
        self._set_prefill_seconds(
            placement, min(placement.prefill_seconds, share * decision.prefill_seconds)
        )

    def end(self, placement: Placement, num_outputs: int | None = None) -> None:
        """Remove a request from the loads; `num_outputs` is the length of a complete answer."""
        if placement.has_ended:
            return
        placement.has_ended = True
        self._set_prefill_seconds(placement, 0.0)
        placement.decoder.num_decodes -= 1
        placement.decoder.decode_tokens -= placement.decision.num_tokens
        for load in (placement.decoder, placement.prefiller):
            if self.workers.get(load.name) is load:
                self.index.give_up(load.name, placement.chain)
        if num_outputs is not None:
            self.usual_output += USUAL_OUTPUT_LEARNING_RATE * (num_outputs - self.usual_output)

    def _set_prefill_seconds(self, placement: Placement, seconds: float) -> None:
        load = placement.prefiller
        load.prefill_seconds = max(0.0, load.prefill_seconds - placement.prefill_seconds + seconds)
        placement.prefill_seconds = seconds
