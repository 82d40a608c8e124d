"""The workers and requests as a router keeps them: what was sent where, and what is left of it.

No thread, no I/O, no clock; the live router (`router.py`) and the simulation both tell it what
happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from twinphase.cluster.block_index import BlockIndex
from twinphase.cluster.routing import Decision, Role, Routing, WorkerLoad
from twinphase.scheduler.chunk import StepCost

USUAL_OUTPUT = 128.0  # tokens of an answer, before any has ended
OUTPUT_FADE = 0.02  # of the difference to each answer that ends


@dataclass
class _Sent:
    """A request where it is now; `unread` are predicted seconds until its prompt is read."""

    decision: Decision
    chain: Sequence[bytes]
    num_done: int  # tokens of its answer when it was sent there
    unread: float


class Fleet:
    """Who there is, and who has what.

    Attributes:
        workers: by name, in the order in which they joined.
        index: which worker's prefix cache holds which blocks.
        usual_output: tokens that answers had of late, a fading mean.
    """

    def __init__(self, routing: Routing) -> None:
        self.workers: dict[str, WorkerLoad] = {}
        self.index = BlockIndex()
        self.usual_output = USUAL_OUTPUT
        self._routing = routing
        self._sent: dict[str, _Sent] = {}

    def join(self, name: str, role: Role, times: StepCost) -> None:
        """A worker is there, with an empty prefix cache; one of that name was there before, and is no more."""
        self.leave(name)
        self.workers[name] = WorkerLoad(name, role, times)

    def leave(self, name: str) -> list[str]:
        """A worker has died or left: the requests that it was reading or to decode, which are on no worker now."""
        self.workers.pop(name, None)
        self.index.forget(name)
        lost = [
            request_id
            for request_id, sent in self._sent.items()
            if sent.decision.worker == name
            or (sent.decision.prefill_worker == name and sent.unread)
        ]
        for request_id in lost:
            self._take_back(request_id)
        return lost

    def send(
        self,
        request_id: str,
        num_tokens: int,
        chain: Sequence[bytes],
        *,
        num_done: int = 0,
        most: int | None = None,
    ) -> Decision:
        """Choose a worker for a request, and remember that it is there.

        Args:
            request_id: of one that is on no worker.
            num_tokens: of its prompt, and of its answer as far as it has come.
            chain: hashes of its full blocks, from the beginning.
            num_done: tokens of its answer so far.
            most: tokens of its answer at most, if that is known.

        Raises:
            EngineUnavailableError: no worker takes requests.
        """
        left = max(1.0, self.usual_output - num_done)
        if most is not None:
            left = min(left, most - num_done)
        hits = self.index.hits(chain)
        decision = self._routing.choose(num_tokens, left, hits, self.workers.values())
        self._sent[request_id] = _Sent(decision, chain, num_done, decision.read_seconds)
        worker = self.workers[decision.worker]
        reader = self._reader(decision)
        worker.num_decodes += 1
        worker.decode_tokens += num_tokens
        if reader is not None:
            reader.prefill_seconds += decision.read_seconds
        for name in {decision.worker, decision.prefill_worker or decision.worker}:
            self.index.expect(name, islice(chain, hits.get(name, 0), None))
        return decision

    def where(self, request_id: str) -> Decision | None:
        """Where a request was sent; None for one that has ended, or is on no worker."""
        sent = self._sent.get(request_id)
        return sent.decision if sent else None

    def read(self, request_id: str, num_prefilled: int) -> None:
        """So many tokens of a request are in the KV cache of the worker who reads it."""
        sent = self._sent.get(request_id)
        if sent is None or not sent.unread:
            return
        decision = sent.decision
        rest = max(0, decision.num_tokens - num_prefilled) / max(
            1, decision.num_tokens - decision.num_cached
        )
        unread = min(sent.unread, rest * decision.read_seconds)
        if (reader := self._reader(decision)) is not None:
            reader.prefill_seconds = max(0.0, reader.prefill_seconds - (sent.unread - unread))
        sent.unread = unread

    def end(self, request_id: str, num_outputs: int | None = None) -> None:
        """A request has ended, with an answer of so many tokens; None if it was not let finish."""
        if self._take_back(request_id) and num_outputs is not None:
            self.usual_output += OUTPUT_FADE * (num_outputs - self.usual_output)

    def _take_back(self, request_id: str) -> bool:
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return False
        decision = sent.decision
        if (reader := self._reader(decision)) is not None:
            reader.prefill_seconds = max(0.0, reader.prefill_seconds - sent.unread)
        if (worker := self.workers.get(decision.worker)) is not None:
            worker.num_decodes -= 1
            worker.decode_tokens -= decision.num_tokens
        for name in {
            decision.worker,
            decision.prefill_worker or decision.worker,
        } & self.workers.keys():
            self.index.give_up(name, sent.chain)
        return True

    def _reader(self, decision: Decision) -> WorkerLoad | None:
        return self.workers.get(decision.prefill_worker or decision.worker)
