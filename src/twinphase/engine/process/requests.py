"""The unfinished requests of one front end: `Add` messages in, each step's updates out.

`LLM` and the loop of `AsyncEngine` both use this. The engine may have requests of other front ends
too. `frontends/outputs.py` makes the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.process.messages import Add, RequestUpdate
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord, RequestState
from twinphase.phases.timeline import IntervalKind
from twinphase.request import Request

if TYPE_CHECKING:
    from twinphase.constraint import Constraint


class EngineRequests:
    """Requests that one front end has in an engine, between their `Add` and their last update."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records: dict[str, RequestRecord] = {}

    def add(self, add: Add, constraint: Constraint | None = None) -> Request:
        """Queue a request, whose grammar is compiled already.

        Raises:
            TwinphaseError: as `Engine.add_request`.
        """
        record = add.record
        request = Request(
            record.request_id,
            add.prompt_token_ids,
            add.sampling_params,
            record.arrival,
            priority=record.priority,
            cache_salt=record.cache_salt,
            tenant=record.tenant,
            weight=record.weight,
            output_token_ids=list(add.output_token_ids),
            fresh=add.recompute,
            constraint=constraint,
            prediction_token_ids=add.prediction_token_ids,
            counts=record.counts,
        )
        if constraint is not None:
            now = max(record.timeline.end, self._engine.clock())
            record.timeline.mark(IntervalKind.QUEUE, now, reason="grammar")
        self._engine.add_request(request, timeline=record.timeline)
        self._records[record.request_id] = record
        return request

    def updates(self, result: StepResult) -> list[RequestUpdate]:
        """The updates of a step for these requests."""
        for request_id in result.batch.preempted:
            if request_id in self._records:
                self._records[request_id].move_to(RequestState.QUEUED)
        finished = {request.request_id: request for request in result.finished}
        updates = []
        for share in result.batch.scheduled:
            name = share.request_id
            record = self._records.get(name)
            if record is None:
                continue
            record.advance()
            request = finished.get(name)
            updates.append(
                RequestUpdate(
                    name,
                    result.output.token_ids.get(name, []),
                    share.num_prefilled,
                    share.num_cached_tokens,
                    result.output.logprobs.get(name, []),
                    self._ended(request) if request else None,
                    prompt_logprobs=result.output.prompt_logprobs.get(name),
                )
            )
        return updates

    def end(self, request_id: str, reason: FinishReason) -> RequestUpdate | None:
        """End a request between two steps; None if it has ended already."""
        request = self._engine.scheduler.get(request_id)
        if request is None or request_id not in self._records:
            return None
        self._engine.finish(request_id, reason)
        num_prefilled = min(request.most_computed_tokens, len(request.prompt_token_ids))
        num_cached = request.counts.num_cached_tokens
        return RequestUpdate(request_id, [], num_prefilled, num_cached, ended=self._ended(request))

    def copy(self, request_id: str) -> RequestRecord:
        """An independent copy of an unfinished request's record."""
        return self._records[request_id].copy()

    def _ended(self, request: Request) -> RequestRecord:
        record = self._records.pop(request.request_id)
        assert request.finish_reason is not None, "it has finished"
        record.end(request.finish_reason)
        record.prices = self._engine.cost_model.prices
        return record
