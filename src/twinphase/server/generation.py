"""A generating request over HTTP: streams the answer as events, or sends one body.

Every dialect (`dialects/`) translates its requests to OpenAI's (`openai_types.py`), which this file
answers, and has `Replies` that write deltas in its own format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import perf_counter

from starlette.responses import StreamingResponse

from twinphase.engine.frontends.async_engine import run_inline_if_short
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
    """Answers a chat or prompts, with one body or a stream of events.

    Attributes:
        replies: None until the prompts are queued.
    """

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest | CompletionRequest,
        make_replies: Callable[[Job, Sequence[Choice], Service], Replies],
        adjust: Callable[[Job], Job] = lambda job: job,
    ) -> None:
        """`adjust` may change the job before it is submitted."""
        service.check_task("generate", body.model)
        service.check_n(body.n)
        num_requests = body.n or 1
        if isinstance(body, CompletionRequest):
            service.check_n(body.best_of, "best_of")
            num_requests = body.best_of or num_requests
            num_requests *= count_prompts(body, service.config.max_prompts)
        super().__init__(service, num_requests)
        self._body = with_defaults(body, service.sampling_defaults.values)
        self._make_replies = make_replies
        self._adjust = adjust
        self.replies: Replies | None = None
        # Time at which the last token was delivered, by choice.
        self._last_token: dict[int, float] = {}

    def _make_job(self) -> Job:
        service = self._service
        engine = service.require_engine()
        body = self._body
        model = body.model or service.model_names[0]
        if isinstance(body, CompletionRequest):
            return self._adjust(completion_job(engine, body, model, self._arrival))
        config = service.config
        options = {
            "tool_prompt": config.tool_prompt,
            "plain_tool_calls": config.plain_tool_calls,
        }
        return self._adjust(chat_job(engine, body, model, self._arrival, **options))

    async def _answer(self, ticket: Ticket) -> None:
        service = self._service
        job = await run_inline_if_short(self._make_job, num_characters(self._body))
        ticket.queue(sum(len(prompt.token_ids) for prompt in job.prompts))
        salt = salted(self._tenant, job.body.cache_salt)
        engine = service.require_engine()
        choices = await submit_all(engine, job, salt, self._tenant, ticket.tenant.weight)
        waiting = set(range(len(job.prompts)))

        def on_update(choice: Choice, update: StreamUpdate) -> None:
            prompt = choice.index // job.n
            if prompt in waiting and (update.num_prefilled or update.finished):
                waiting.discard(prompt)
                ticket.begun(len(job.prompts[prompt].token_ids))

        for choice in choices:
            service.observe_begin(choice)
        self.replies = replies = self._make_replies(job, choices, service)
        stream = bool(self._body.stream)
        try:
            if stream:
                headers = {**STREAMED, **replies.headers()}
                await self._start(StreamingResponse((), 200, headers, replies.stream_type))
            async with aclosing(run_job(choices, on_update)) as deltas:
                async for delta in deltas:
                    if stream and (data := replies.chunk(delta)):
                        await self._send(data)
                    self._handed_over(delta)
            if stream:
                await self._send(replies.end(), more=False)
            else:
                spent = server_timing(choices[0].record.timeline)
                headers = {"server-timing": spent, **replies.headers()}
                await self._send_json(replies.body, headers)
        finally:
            for choice in choices:
                service.observe_end(choice, self._request_headers)

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
        if self._body.stream and self.replies is not None:
            await self._send(self.replies.failure(problems.body(error, self._shape)), more=False)


def within_context(service: Service, job: Job) -> Job:
    """The job without `max_tokens` if the context ends the answers first."""
    asked = job.params.max_tokens
    limit = service.max_model_len
    longest = max(len(prompt.token_ids) for prompt in job.prompts)
    if asked is None or limit is None or longest + asked <= limit:
        return job
    return replace(job, params=replace(job.params, max_tokens=None))
