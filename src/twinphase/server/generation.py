"""A generating request over HTTP: the answer as events or as one body.

Every dialect (`dialects/`) translates its requests to OpenAI's (`openai_types.py`), which are
answered here, and brings `Replies` that write deltas in its own format.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from time import perf_counter

from starlette.responses import StreamingResponse

from twinphase.engine.frontends.async_engine import AsyncEngine, run_inline_if_short
from twinphase.engine.frontends.outputs import StreamUpdate
from twinphase.errors import TwinphaseError
from twinphase.phases import latency
from twinphase.server import problems
from twinphase.server.access import Ticket, salted
from twinphase.server.answers import Choice, Delta, run_job, submit_all
from twinphase.server.exchange import Exchange
from twinphase.server.jobs import (
    Job,
    chat_job,
    completion_job,
    count_prompts,
    num_characters,
    with_defaults,
)
from twinphase.server.observe import server_timing
from twinphase.server.openai_types import ChatCompletionRequest, CompletionRequest
from twinphase.server.replies import Replies
from twinphase.server.service import Service

STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Generation(Exchange):
    """Answers to prompts, as one body or as events."""

    def __init__(
        self,
        service: Service,
        make_job: Callable[[AsyncEngine, float], Job],
        make_replies: Callable[..., Replies],
        *,
        num_requests: int,
        num_characters: int,
        stream: bool,
    ) -> None:
        """`make_job` encodes the prompts of `num_characters`, given engine and time of arrival."""
        super().__init__(service, num_requests)
        self._make_job = make_job
        self._make_replies = make_replies
        self._num_characters = num_characters
        self._stream = stream
        self.replies: Replies | None = None  # once the prompts are queued
        self._last_token: dict[int, float] = {}  # by choice: when its last token was handed over

    async def _answer(self, ticket: Ticket) -> None:
        service = self._service
        engine = service.require_engine()
        make_job = partial(self._make_job, engine, self._arrival)
        job = await run_inline_if_short(make_job, self._num_characters)
        ticket.queue(sum(len(prompt.token_ids) for prompt in job.prompts))
        salt = salted(self._tenant, job.body.cache_salt)
        choices = await submit_all(engine, job, salt, self._tenant, ticket.tenant.weight)
        waiting = set(range(len(job.prompts)))

        def on_update(choice: Choice, update: StreamUpdate) -> None:
            prompt = choice.index // job.n
            if prompt in waiting and (update.num_prefilled or update.finished):
                waiting.discard(prompt)
                ticket.begun(len(job.prompts[prompt].token_ids))

        for choice in choices:
            service.observe_begin(choice)
        shape = service.facts.shape if service.facts else None
        spec_metrics = service.config.per_request_spec_decode_metrics
        self.replies = replies = self._make_replies(job, choices, shape, spec_metrics)
        try:
            if self._stream:
                await self._send_events(job, choices, replies, on_update)
            else:
                async with aclosing(run_job(choices, on_update)) as deltas:
                    async for delta in deltas:
                        self._handed_over(delta)
                spent = server_timing(choices[0].record.timeline)
                headers = {"server-timing": spent, **replies.headers()}
                await self._send_json(replies.body, headers)
        finally:
            for choice in choices:
                service.observe_end(choice, self._request_headers)

    async def _send_events(
        self,
        job: Job,
        choices: list[Choice],
        replies: Replies,
        on_update: Callable[[Choice, StreamUpdate], None],
    ) -> None:
        headers = {**STREAMED, **replies.headers()}
        await self._start(StreamingResponse((), 200, headers, replies.stream_type))
        async with aclosing(run_job(choices, on_update)) as deltas:
            async for delta in deltas:
                data = replies.chunk(delta)
                if data:
                    await self._send(data)
                self._handed_over(delta)
        await self._send(replies.end(), more=False)

    def _handed_over(self, delta: Delta) -> None:
        if not delta.token_ids:
            return
        now = perf_counter()
        metrics = self._service.metrics
        choice = delta.choice
        last = self._last_token.get(choice.index)
        if last is None:
            metrics.first_token(latency.ttft(self._arrival, now))
            if len(delta.token_ids) > 1:
                metrics.token_gap(0.0, len(delta.token_ids) - 1)
        else:
            metrics.token_gap(now - last, len(delta.token_ids))
        if choice.stream.last_step_end is not None:
            metrics.delivered(now - choice.stream.last_step_end)
        self._last_token[choice.index] = now

    async def _end_with(self, error: TwinphaseError) -> None:
        if self._stream and self.replies is not None:
            await self._send(self.replies.failure(problems.body(error, self._shape)), more=False)


def answer(
    service: Service,
    body: ChatCompletionRequest | CompletionRequest,
    make_replies: Callable[..., Replies],
    adjust: Callable[[Job], Job] = lambda job: job,
) -> Generation:
    """The response to a chat or to prompts; `adjust` may change the job before it is submitted."""
    service.check_task("generate")
    service.check_model(body.model)
    service.check_n(body.n)
    num_requests = body.n or 1
    if isinstance(body, CompletionRequest):
        service.check_n(body.best_of, "best_of")
        num_requests = count_prompts(body, service.config.max_prompts) * (
            body.best_of or num_requests
        )

    def make_job(engine: AsyncEngine, arrival: float) -> Job:
        own = with_defaults(body, service.config.override_generation_config)
        name = body.model or service.model_names[0]
        if isinstance(own, CompletionRequest):
            return adjust(completion_job(engine, own, name, arrival))
        return adjust(chat_job(engine, own, name, arrival, tool_prompt=service.config.tool_prompt))

    return Generation(
        service,
        make_job,
        make_replies,
        num_requests=num_requests,
        num_characters=num_characters(body),
        stream=bool(body.stream),
    )
