"""Runs a job: submits its requests to the engine and divides each answer's text into what a reply is made of.

Streamed and whole replies are made of the same deltas, so they cannot differ. Not for JSON
(`replies.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from twinphase.batch import Phase, TokenLogprobs
from twinphase.constraint import CONSTRAINT_FAILURE
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.frontends.outputs import StreamUpdate, plain_logprobs
from twinphase.engine.frontends.stream import RequestStream
from twinphase.errors import EngineUnavailableError, InvalidRequestError, TwinphaseError
from twinphase.outcome import FinishReason
from twinphase.server.jobs import Job
from twinphase.server.tool_calls import ToolCall, ToolCallDelta, join_deltas
from twinphase.tokenizer.detokenizer import Detokenizer


@dataclass(frozen=True)
class Delta:
    """What an update brought to an answer.

    Attributes:
        num_prefilled: prompt tokens read so far, while nothing else is new; None otherwise.
        first: True until the first delta that is not empty, and in it.
    """

    choice: Choice
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_prefilled: int | None = None
    first: bool = False
    finished: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether a client would learn nothing from it."""
        if self.content or self.reasoning or self.tool_calls or self.logprobs or self.finished:
            return False
        return not (self.token_ids and self.choice.job.return_token_ids)


class Choice:
    """One answer: the engine's stream, and what was made of it so far.

    Attributes:
        num_reasoning_tokens: known when the answer has finished.
        finish_reason: in OpenAI's words, when it has finished.
    """

    def __init__(self, job: Job, index: int, stream: RequestStream) -> None:
        self.job = job
        self.index = index
        self.stream = stream
        self.content = self.reasoning = ""
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self._splitter = job.reader.splitter()
        self._tools = job.reader.tool_parser()
        self._calls: list[ToolCallDelta] = []
        self._begun = self._echoed = False

    @property
    def token_ids(self) -> list[int]:
        return [] if self.job.prompt_only else self.stream.transcript.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [] if self.job.prompt_only else self.stream.transcript.logprobs

    @property
    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """Of each prompt token, in vLLM's shape; None of the first, and altogether if not asked for."""
        found = self.stream.transcript.output().prompt_logprobs
        return None if found is None else [plain_logprobs(position) for position in found]

    @property
    def tool_calls(self) -> list[ToolCall]:
        return join_deltas(self._calls)

    @property
    def stop_reason(self) -> int | str | None:
        return self.stream.transcript.stop_reason

    def take(self, update: StreamUpdate) -> Delta:
        """The next delta; raises what the request failed with."""
        if update.phase is Phase.PREFILL and not update.finished:
            return Delta(self, num_prefilled=update.num_prefilled)
        if self.job.prompt_only:
            update = replace(update, text="", token_ids=[], logprobs=[])
        reasoning, content, calls = self._divide(update.text, update.finished)
        if self.job.echo and not self._echoed:
            content = self._prompt_text() + content
            self._echoed = True
        self.content = self.content + content
        self.reasoning = self.reasoning + reasoning
        self._calls += calls
        if update.finished:
            self._finish()
        shown = reasoning if self.job.reader.keep_reasoning else ""
        first = not self._begun
        delta = Delta(
            self,
            content,
            shown,
            calls,
            update.token_ids,
            update.logprobs,
            None,
            first,
            update.finished,
        )
        self._begun = self._begun or not delta.is_empty
        return delta

    def _divide(self, text: str, finished: bool) -> tuple[str, str, list[ToolCallDelta]]:
        reasoning, content = self._splitter.feed(text) if self._splitter else ("", text)
        if self._splitter and finished:
            last = self._splitter.flush()
            reasoning = reasoning + last[0]
            content = content + last[1]
        if self._tools is None:
            return reasoning, content, []
        content, calls = self._tools.feed(content)
        if finished:
            rest, more = self._tools.flush()
            content = content + rest
            calls = calls + more
        return reasoning, content, calls

    def _finish(self) -> None:
        transcript = self.stream.transcript
        reason = transcript.finish_reason
        error = str(transcript.counts.error)
        if reason == "error" and error.startswith(CONSTRAINT_FAILURE):
            raise InvalidRequestError(f"{error}.".replace("..", "."), "Use a simpler form.")
        if reason == "error":
            raise TwinphaseError(
                f"The request failed: {error.rstrip('.')}.", "Other requests are not affected."
            )
        if reason == "abort":
            raise EngineUnavailableError("The request was ended by the server.", "Send it again.")
        if self.job.prompt_only:
            reason = FinishReason.LENGTH
        self.finish_reason = (
            "tool_calls" if self._calls and reason == "stop" else reason and reason.value
        )
        if self.reasoning:
            self.num_reasoning_tokens = self._count_reasoning()

    def _count_reasoning(self) -> int:
        """Tokens up to the end of the thinking part, tags included."""
        splitter = self.job.reader.splitter()
        assert splitter is not None, "there is reasoning"
        detokenizer = Detokenizer(
            self.stream.transcript.tokenizer, keep_special=self.job.reader.markers
        )
        thought = self.job.reader.thinking
        for index, token_id in enumerate(self.token_ids):
            splitter.feed(detokenizer.append(token_id))
            if thought and not splitter.reasoning:
                return index + 1
            thought = thought or splitter.reasoning
        return len(self.token_ids)

    def _prompt_text(self) -> str:
        prompt = self.job.prompt_of(self.index)
        return (
            prompt.text
            if prompt.text is not None
            else self.stream.transcript.tokenizer.decode(prompt.token_ids)
        )


class ContentTokens:
    """Finds the tokens of an answer whose text is content, neither thoughts nor calls: divides it token by token."""

    def __init__(self, choice: Choice) -> None:
        reader = choice.job.reader
        self._splitter = reader.splitter()
        self._tools = reader.tool_parser()
        self._detokenizer = Detokenizer(
            choice.stream.transcript.tokenizer, keep_special=reader.markers
        )
        self._held: list[TokenLogprobs] = []  # which way their text goes is not certain yet

    def take(self, tokens: Sequence[TokenLogprobs], finished: bool) -> list[TokenLogprobs]:
        """Those of the next `tokens`, and of those held back before, that are content for certain.

        White space between thoughts and content counts as content.
        """
        if self._splitter is None and self._tools is None:
            return list(tokens)
        found: list[TokenLogprobs] = []
        for token in tokens:
            self._held.append(token)
            text = self._detokenizer.append(token.token_id)
            thought = self._is_thinking
            _, content = self._splitter.feed(text) if self._splitter else ("", text)
            calls: list[ToolCallDelta] = []
            if self._tools:
                content, calls = self._tools.feed(content)
            if content:
                found += self._held
            beside_call = self._tools is not None and self._tools.is_beside_call
            if content or calls or beside_call or thought or self._is_thinking:
                self._held = []
        if finished and self._flush():
            found += self._held
        return found

    @property
    def _is_thinking(self) -> bool:
        return self._splitter is not None and self._splitter.reasoning

    def _flush(self) -> str:
        content = self._splitter.flush()[1] if self._splitter else ""
        if self._tools:
            content = self._tools.feed(content)[0] + self._tools.flush()[0]
        return content


async def submit_all(
    engine: AsyncEngine, job: Job, cache_salt: str | None, tenant: str = "", weight: float = 1.0
) -> list[Choice]:
    """Queue every request of a tenant's job, all or none."""

    async def submit(index: int) -> Choice:
        stream = await engine.submit(
            job.prompt_of(index),
            job.params_of(index),
            request_id=job.request_id(index),
            priority=job.priority,
            cache_salt=cache_salt,
            tenant=tenant,
            weight=weight,
            keep_special=job.reader.markers,
        )
        return Choice(job, index, stream)

    if job.num_choices == 1:
        return [await submit(0)]
    # Together: each is answered between two steps.
    results = await asyncio.gather(*map(submit, range(job.num_choices)), return_exceptions=True)
    choices = [result for result in results if isinstance(result, Choice)]
    refused = [result for result in results if isinstance(result, BaseException)]
    if refused:
        for choice in choices:
            choice.stream.abandon()
        raise refused[0]
    return choices


async def run_job(
    choices: list[Choice], on_update: Callable[[Choice, StreamUpdate], None]
) -> AsyncGenerator[Delta, None]:
    """Deltas of all answers as they come.

    Leaving the iteration, or an answer that fails, aborts the others.

    `on_update` is told of each update before its delta is given.
    """
    try:
        if len(choices) == 1:
            async for update in choices[0].stream:
                on_update(choices[0], update)
                yield choices[0].take(update)
        else:
            async with aclosing(_merged(choices)) as updates:
                async for choice, update in updates:
                    on_update(choice, update)
                    yield choice.take(update)
    finally:
        for choice in choices:
            choice.stream.abandon()


async def _merged(choices: list[Choice]) -> AsyncGenerator[tuple[Choice, StreamUpdate], None]:
    queue: asyncio.Queue[tuple[Choice, StreamUpdate, asyncio.Event] | Exception | None] = (
        asyncio.Queue()
    )

    async def read(choice: Choice) -> None:
        # Asking a stream for more says that what it gave has been handed over; meanwhile it gathers
        # text.
        handed_over = asyncio.Event()
        try:
            async for update in choice.stream:
                handed_over.clear()
                queue.put_nowait((choice, update, handed_over))
                await handed_over.wait()
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                choice, update, handed_over = item
                yield choice, update
                handed_over.set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
