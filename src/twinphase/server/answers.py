"""Runs a job: submits its requests to the engine, and divides each answer's text into deltas.

Streamed and complete replies consist of the same deltas, so they cannot differ. `replies.py` writes
their JSON.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from twinphase.batch import Phase, TokenLogprobs
from twinphase.constraint import CONSTRAINT_FAILURE
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.frontends.outputs import StreamUpdate, plain_logprobs
from twinphase.engine.frontends.stream import RequestStream
from twinphase.engine.frontends.text import EncodedPrompt
from twinphase.errors import EngineUnavailableError, InvalidRequestError, TwinphaseError
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord
from twinphase.server.jobs import Job, Reader
from twinphase.server.plain_calls import PlainCallParser
from twinphase.server.quoted_calls import QuotedCallParser
from twinphase.server.reasoning import ReasoningSplitter
from twinphase.server.tool_calls import (
    CallParser,
    ToolCall,
    ToolCallDelta,
    ToolCallParser,
    join_deltas,
)
from twinphase.server.xml_calls import XmlCallParser


@dataclass(frozen=True)
class Delta:
    """The part of an answer that an update adds.

    Attributes:
        num_prefilled: prompt tokens computed so far, if the delta has nothing else; None otherwise.
        first: True up to and including the first delta that is not empty.
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
        if self.content or self.reasoning or self.tool_calls or self.logprobs or self.finished:
            return False
        return not (self.token_ids and self.choice.job.body.return_token_ids)


@dataclass
class Pieces:
    """The parts of an answer's new text."""

    reasoning: str
    content: str
    calls: list[ToolCallDelta]


class AnswerDivider:
    """Divides the text of an answer into reasoning, content and calls, and labels its tokens.

    Attributes:
        labels: labels of the tokens whose part is certain, in order: "content", "thought", "call",
            or "end" for tokens without text at the end. White space between reasoning and content
            counts as content. Without reasoning and tools all tokens are content.
    """

    def __init__(self, reader: Reader) -> None:
        self.labels: list[str] = []
        self._splitter = ReasoningSplitter(reader.tags, reader.thinking) if reader.tags else None
        self._tools: CallParser | PlainCallParser | None = None
        if reader.tool_format:
            format = reader.tool_format
            parser: CallParser
            if format.quote:
                parser = QuotedCallParser()
            else:
                parser = XmlCallParser(reader.tools) if format.xml else ToolCallParser(format)
            plain = reader.plain_tools
            self._tools = PlainCallParser(parser, plain) if plain else parser
        self._ends: deque[int] = deque()  # End positions of tokens whose text is incomplete.
        self._position = 0  # Number of characters taken so far.
        self._num_held = 0  # Number of complete tokens that may become content or a call.
        self._has_content = False  # Whether content came since the last label.
        self._is_thought = False

    def take(self, text: str, text_ends: Sequence[int], finished: bool) -> Pieces:
        """Divide new text, and label the tokens, which end at `text_ends`, where certain."""
        if self._splitter is None and self._tools is None:
            self.labels += ["content"] * len(text_ends)
            return Pieces("", text, [])
        pieces = Pieces("", "", [])
        self._ends += text_ends
        while self._ends and self._ends[0] <= self._position + len(text):
            length = max(0, self._ends.popleft() - self._position)
            self._feed(text[:length], pieces)
            text = text[length:]
            self._label_token()
        self._feed(text, pieces)
        if finished:
            self._finish(pieces)
        return pieces

    def _feed(self, text: str, pieces: Pieces) -> None:
        self._position += len(text)
        self._is_thought = self._is_thought or self._is_thinking
        reasoning, content = self._splitter.feed(text) if self._splitter else ("", text)
        self._is_thought = self._is_thought or self._is_thinking
        self._add(reasoning, content, pieces)

    def _add(self, reasoning: str, content: str, pieces: Pieces, finished: bool = False) -> None:
        pieces.reasoning += reasoning
        calls: list[ToolCallDelta] = []
        if self._tools is not None:
            content, calls = self._tools.feed(content)
            if finished:
                rest, more = self._tools.flush()
                content += rest
                calls += more
        pieces.content += content
        self._has_content = self._has_content or bool(content)
        for call in calls:
            # A call that grows with each token gets one delta per update.
            if pieces.calls and pieces.calls[-1].index == call.index:
                last = pieces.calls.pop()
                call = replace(last, arguments=last.arguments + call.arguments)
            pieces.calls.append(call)

    def _label_token(self) -> None:
        self._num_held += 1
        if self._has_content:
            self._label_held("content")
        elif self._is_thought:
            self._label_held("thought")
        elif self._is_beside_call:
            self._label_held("call")
        self._has_content = self._is_thought = False

    def _label_held(self, label: str) -> None:
        self.labels += [label] * self._num_held
        self._num_held = 0

    def _finish(self, pieces: Pieces) -> None:
        was_thinking = self._is_thinking
        was_beside_call = self._is_beside_call
        held = self._splitter.flush() if self._splitter else ("", "")
        self._add(*held, pieces, finished=True)
        is_call = self._is_beside_call and not was_beside_call
        self._label_held("content" if self._has_content else "call" if is_call else "end")
        # A stop string cut the text of these tokens.
        self._num_held = len(self._ends)
        outside = "thought" if was_thinking else "call" if self._is_beside_call else "content"
        self._label_held(outside)

    @property
    def _is_thinking(self) -> bool:
        return self._splitter is not None and self._splitter.reasoning

    @property
    def _is_beside_call(self) -> bool:
        return self._tools is not None and self._tools.is_beside_call


class Choice:
    """One answer: the engine's stream, and the divided text so far.

    Attributes:
        num_reasoning_tokens: number of reasoning tokens, tags included; known once the answer has
            finished.
        finish_reason: OpenAI's finish reason, once the answer has finished.
        timings: timings sent to the client, once they were.
    """

    def __init__(self, job: Job, index: int, stream: RequestStream) -> None:
        self.job = job
        self.index = index
        self.stream = stream
        self.content = self.reasoning = ""
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.timings: dict[str, Any] | None = None
        self._divider = AnswerDivider(job.reader)
        self._calls: list[ToolCallDelta] = []
        self._begun = self._echoed = False

    @property
    def prompt(self) -> EncodedPrompt:
        return self.job.prompt_of(self.index)

    @property
    def record(self) -> RequestRecord:
        return self.stream.transcript.record

    @property
    def token_ids(self) -> list[int]:
        return [] if self.job.prompt_only else self.stream.transcript.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [] if self.job.prompt_only else self.stream.transcript.logprobs

    @property
    def labels(self) -> list[str]:
        """Labels of the tokens, as in `AnswerDivider`."""
        return self._divider.labels

    @property
    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """The prompt's log probabilities in vLLM's shape; None if they were not requested."""
        found = self.stream.transcript.output().prompt_logprobs
        return None if found is None else [plain_logprobs(position) for position in found]

    @property
    def tool_calls(self) -> list[ToolCall]:
        return join_deltas(self._calls)

    @property
    def stop_reason(self) -> int | str | None:
        return self.stream.transcript.stop_reason

    def take(self, update: StreamUpdate) -> Delta:
        """Divide an update's text into the next delta.

        Raises:
            TwinphaseError: the request failed.
        """
        if update.phase is Phase.PREFILL and not update.finished:
            return Delta(self, num_prefilled=update.num_prefilled)
        if self.job.prompt_only:
            update = replace(update, text="", token_ids=[], logprobs=[], text_ends=[])
        pieces = self._divider.take(update.text, update.text_ends, update.finished)
        if self.job.echo and not self._echoed:
            pieces.content = self._prompt_text() + pieces.content
            self._echoed = True
        self.content += pieces.content
        self.reasoning += pieces.reasoning
        self._calls += pieces.calls
        if update.finished:
            self._finish()
        delta = Delta(
            self,
            content=pieces.content,
            reasoning=pieces.reasoning if self.job.reader.keep_reasoning else "",
            tool_calls=pieces.calls,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            first=not self._begun,
            finished=update.finished,
        )
        self._begun = self._begun or not delta.is_empty
        return delta

    def _finish(self) -> None:
        reason = self.record.finish_reason
        error = str(self.record.counts.error)
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
            self.num_reasoning_tokens = self.labels.count("thought")

    def _prompt_text(self) -> str:
        if self.prompt.text is not None:
            return self.prompt.text
        return self.stream.transcript.tokenizer.decode(self.prompt.token_ids)


async def submit_all(
    engine: AsyncEngine, job: Job, cache_salt: str | None, tenant: str = "", weight: float = 1.0
) -> list[Choice]:
    """Queue all requests of a tenant's job, or none."""

    async def submit(index: int) -> Choice:
        stream = await engine.submit(
            job.prompt_of(index),
            job.params_of(index),
            request_id=job.request_id(index),
            priority=job.body.priority,
            cache_salt=cache_salt,
            tenant=tenant,
            weight=weight,
            keep_special=job.reader.markers,
        )
        return Choice(job, index, stream)

    # Each submission waits for the end of a step, so they run concurrently.
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
    """Yield the deltas of all answers as they arrive; `on_update` is called before each one.

    The other answers are aborted if one fails or if the iteration ends early.
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
        # A stream considers its last update delivered when the next one is requested; until then it
        # collects text.
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
