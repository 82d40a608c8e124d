"""`AsyncEngine`: the front end for many users at once, in asyncio code.

The engine runs elsewhere (`host.py`), and both sides only exchange messages (`messages.py`):
requests go in, and one message per step comes out with the new tokens of all requests. Tokens
become text here, on the reader's side.
"""

from __future__ import annotations

import asyncio
import functools
import struct
import uuid
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from twinphase import errors
from twinphase.engine.embedding.embedder import (
    MAX_PASS_TEXTS,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    load,
)
from twinphase.engine.frontends.checks import (
    Prompt,
    check_id,
    check_params,
    check_task,
    engine_config,
    is_plain,
    unknown_request,
)
from twinphase.engine.frontends.outputs import Transcript
from twinphase.engine.frontends.pairs import Pairs, ScoringRequestOutput, encode_pairs
from twinphase.engine.frontends.stream import RequestStream, take_all
from twinphase.engine.frontends.text import EncodedPrompt, ModelText
from twinphase.engine.process.host import Host, ProcessHost, ThreadHost, running_loop
from twinphase.engine.process.messages import (
    Accepted,
    Add,
    Embed,
    Embedded,
    End,
    EngineFacts,
    FromEngine,
    Inspect,
    Inspected,
    Loading,
    Refused,
    RequestUpdate,
    StepStats,
    StepUpdates,
    ToEngine,
    WatchSteps,
)
from twinphase.errors import EngineDeadError, EngineUnavailableError
from twinphase.explain.explanation import Explanation
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord
from twinphase.request import SamplingParams, check_priority_and_salt, check_tenant
from twinphase.sampling.rng import derive_seed

# A longer text is encoded on a thread, so that other answers continue.
MAX_INLINE_CHARACTERS = 4096
T = TypeVar("T")


async def run_inline_if_short(work: Callable[[], T], num_characters: int) -> T:
    """The result of `work` on a text: done here if the text is short, else on a thread."""
    if num_characters <= MAX_INLINE_CHARACTERS:
        return work()
    return await asyncio.to_thread(work)


class AsyncEngine:
    """An engine for asyncio code.

    Attributes:
        facts: facts of the engine, once it is loaded; they are kept during a restart.
        progress: the stage of loading; None while the engine serves.
        stats: statistics of the last step.
        last_embedded: time of the last vector, seconds.
        on_step: called after each step, on the thread that receives the engine's messages.
    """

    def __init__(self, host: Host, *, on_step: Callable[[StepStats], None] | None = None) -> None:
        """Start the engine; a `ProcessHost` needs a running event loop."""
        self.host = host
        self.text: ModelText = host.text
        self.clock = perf_counter  # All times are in seconds of this clock.
        self.facts: EngineFacts | None = None
        self.progress: Loading | None = Loading("starting")
        self.stats: StepStats | None = None
        self.last_embedded = 0.0
        self._num_embedding = 0
        self.on_step = on_step
        # Streams of unfinished requests, by id.
        self._streams: dict[str, weakref.ref[RequestStream]] = {}
        self._accepted: set[str] = set()  # Ids of the requests that the engine has queued.
        # Awaited replies: by id for requests, by number for questions.
        self._waiting: dict[str | int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._numbers = count()
        self._seedless = count()  # Number of requests without their own seed.
        self._watcher: Callable[[FromEngine | EngineDeadError], None] | None = None
        host.start(self._receive, self._died)

    @classmethod
    def from_model(cls, model: str | Path, **config: Any) -> AsyncEngine:
        """Load a model into this process; arguments and errors are those of `LLM`."""
        return cls(ThreadHost(load(model, engine_config(config))))

    @classmethod
    def in_process(cls, model: str | Path, **config: Any) -> AsyncEngine:
        """Load a model into its own process, which is restarted when it dies.

        Needs a running event loop. Returns at once; `progress` reports the stage of loading.
        """
        return cls(ProcessHost(model, engine_config(config)))

    @property
    def is_running(self) -> bool:
        return self.host.is_running

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of a request; None until a model has been loaded."""
        return self.facts.config.max_model_len if self.facts else None

    @property
    def num_unfinished(self) -> int:
        """Number of queued and running requests, without those whose grammar is compiling."""
        return len(self._accepted & self._streams.keys()) + self._num_embedding

    async def encode(
        self, prompt: Prompt, arrival: float | None = None, *, last: int | None = None
    ) -> EncodedPrompt:
        """Encode a prompt that came at `arrival` (seconds; now if None); see `ModelText`.

        With `last`, only the last `last` tokens are kept, and the prompt may exceed the context.
        """
        arrival = self.clock() if arrival is None else arrival
        limit = self.max_model_len if last is None else None
        encode = functools.partial(self.text.encode, prompt, limit)
        length = len(prompt) if isinstance(prompt, str) else MAX_INLINE_CHARACTERS + 1
        text, token_ids = await run_inline_if_short(encode, length)
        return EncodedPrompt(text, token_ids, arrival, self.clock(), is_plain(prompt)).last(last)

    async def submit(
        self,
        prompt: Prompt | EncodedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        weight: float = 1.0,
        keep_special: Collection[int] = (),
    ) -> RequestStream:
        """Queue a request.

        Args:
            prompt: text, token ids, the messages of a conversation, or the result of `encode`.
            sampling_params: vLLM's defaults if None.
            request_id: unique among the unfinished requests; generated if None.
            priority: lower values go first; requires the policy "priority".
            cache_salt: share cached prefixes only with requests of the same salt.
            tenant: owner of the request; tenants with requests at the same time share the engine.
            weight: the tenant's share relative to other tenants, 0.001 to 1,000.
            keep_special: control tokens to keep in the answer's text.

        Returns:
            The stream of its answer. Leaving its loop, or cancelling the reader, aborts the
            request.

        Raises:
            InvalidRequestError: as `Engine.add_request`; other requests are unaffected.
            EngineUnavailableError: the engine is loading, or has ended.
        """
        if not self.is_running:
            raise self.unavailable()
        params = check_params(sampling_params)
        name = request_id if request_id is not None else uuid.uuid4().hex
        check_id(name)
        check_priority_and_salt(priority, cache_salt)
        check_tenant(tenant, weight)
        encoded = prompt if isinstance(prompt, EncodedPrompt) else await self.encode(prompt)
        record = RequestRecord.arrived(name, encoded.arrival)
        record.priority = priority
        record.cache_salt = cache_salt
        record.tenant = tenant
        record.weight = float(weight)
        record.tokenized(len(encoded.token_ids), encoded.tokenized)
        transcript = Transcript(
            record,
            encoded.text,
            encoded.token_ids,
            params,
            self.text.tokenizer,
            continues_prompt=encoded.is_plain,
            keep_special=keep_special,
        )
        if name in self._streams:
            raise errors.InvalidRequestError(
                f"Request id {name!r} is in use.",
                "Use another, or wait until that request has finished.",
            )
        stream = RequestStream(transcript, self._end)
        self._streams[name] = weakref.ref(stream)
        try:
            add = Add(
                record.copy(),
                encoded.token_ids,
                self._seeded(params),
                list(encoded.prediction_token_ids),
            )
            await self._ask(name, add)
        except BaseException:
            stream.abandon()  # The request was cancelled or refused, and ends with its stream.
            raise
        return stream

    async def embed(self, prompt: Prompt | EncodedPrompt) -> EmbeddingRequestOutput:
        """The vector of one text; arguments and errors are those of `LLM.embed`.

        Raises:
            EngineUnavailableError: the engine is loading, or has ended.
        """
        encoded = prompt if isinstance(prompt, EncodedPrompt) else await self.encode(prompt)
        (found,) = await self.embed_all([encoded])
        return found

    async def embed_all(
        self, prompts: Sequence[EncodedPrompt], *, tenant: str = "", weight: float = 1.0
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of several texts, in their order; `tenant` and `weight` as for `submit`.

        They are sent in parts, so that the engine has little left to compute after a cancellation.

        Raises:
            EngineUnavailableError: the engine is loading, or has ended.
        """
        check_task(self.text.checkpoint, self.host.task, "embed")
        texts = [prompt.token_ids for prompt in prompts]
        vectors = await self._embed(texts, [], tenant, weight)
        return [
            EmbeddingRequestOutput(str(next(self._numbers)), EmbeddingOutput(vector), token_ids)
            for vector, token_ids in zip(vectors, texts, strict=True)
        ]

    async def encode_pairs(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        truncate_prompt_tokens: int | None = None,
    ) -> Pairs:
        """Encode pairs of texts for the model; arguments and errors are those of `LLM.score`."""
        task = check_task(self.text.checkpoint, self.host.task, "score")
        limit = self.max_model_len
        if limit is None:
            raise self.unavailable()
        texts = (text_1, text_2)
        return await asyncio.to_thread(
            encode_pairs, self.text, task, *texts, limit, truncate_prompt_tokens
        )

    async def score(
        self,
        pairs: Pairs,
        *,
        use_activation: bool = True,
        tenant: str = "",
        weight: float = 1.0,
    ) -> list[ScoringRequestOutput]:
        """Score pairs as `LLM.score` does; `tenant` and `weight` are those of `submit`.

        Raises:
            EngineUnavailableError: the engine is loading, or has ended.
        """
        replies = await self._embed(pairs.texts, pairs.starts, tenant, weight)
        return pairs.outputs(replies, use_activation, self._numbers)

    async def _embed(
        self, texts: list[list[int]], starts: list[int], tenant: str, weight: float
    ) -> list[list[float]]:
        """The engine's reply for each text; the texts are sent in parts."""
        if not self.is_running:
            raise self.unavailable()
        replies: list[list[float]] = []
        self._num_embedding += 1
        try:
            for start in range(0, len(texts), MAX_PASS_TEXTS):
                part = slice(start, start + MAX_PASS_TEXTS)
                number = next(self._numbers)
                message = Embed(number, texts[part], tenant, weight, starts[part])
                found: Embedded = await self._ask(number, message)
                replies += [
                    list(struct.unpack(f"<{len(vector) // 4}f", vector)) for vector in found.vectors
                ]
        finally:
            self._num_embedding -= 1
        return replies

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with `finish_reason` "abort".

        Raises:
            RequestNotFoundError: no unfinished request has that id.
        """
        if request_id not in self._streams:
            raise unknown_request(request_id)
        self.host.put(End(request_id, FinishReason.ABORT))

    async def explain(self, stream: RequestStream) -> Explanation:
        """Why a request took as long as it did, as `LLM.explain`."""
        return (await self.inspect(stream.transcript.record))[1]

    async def inspect(self, record: RequestRecord) -> tuple[RequestRecord, Explanation]:
        """The engine's record of a request, and its explanation.

        Raises:
            RequestNotFoundError: the request has not ended, and the engine does not know it.
            EngineUnavailableError: the engine is loading, or has ended.
        """
        number = next(self._numbers)
        known = record if record.has_ended else None
        found: Inspected = await self._ask(number, Inspect(number, record.request_id, known))
        if found.record is None or found.explanation is None:
            raise unknown_request(record.request_id)
        return found.record, found.explanation

    def watch(self, watcher: Callable[[FromEngine | EngineDeadError], None] | None) -> None:
        """Call `watcher` with each message of the engine, before the message is processed.

        While there is a watcher, the engine also reports each step's content and the owners of KV
        blocks. The watcher runs on the thread that receives the messages; it gets an error if the
        engine dies.
        """
        self._watcher = watcher
        self._watch_steps()

    def _watch_steps(self) -> None:
        with suppress(EngineUnavailableError):
            self.host.put(WatchSteps(on=self._watcher is not None))

    def transcript(self, request_id: str) -> Transcript | None:
        """The front end's transcript of an unfinished request."""
        reference = self._streams.get(request_id)
        stream = reference() if reference is not None else None
        return stream.transcript if stream is not None else None

    @property
    def unfinished(self) -> list[str]:
        """The ids of the unfinished requests."""
        return list(self._streams)

    def close(self) -> None:
        """End the engine after its present step; unfinished streams fail. Thread-safe."""
        self.host.close()
        self._died(
            EngineDeadError("The engine was closed.", "Send the request again, to one that runs.")
        )

    # The methods below handle messages from the engine, on any thread.
    def _receive(self, message: FromEngine) -> None:
        if self._watcher is not None:
            self._watcher(message)
        if isinstance(message, StepUpdates):
            self.stats = message.stats or self.stats
            self._spread(message)
            if message.stats is not None and self.on_step is not None:
                self.on_step(message.stats)
        elif isinstance(message, Accepted):
            self._accepted.add(message.request_id)
            self._answer(message.request_id, None)
        elif isinstance(message, Refused) and message.about is not None:
            self._refused(message.about, message.error())
        elif isinstance(message, (Inspected, Embedded)):
            self.last_embedded = (
                self.clock() if isinstance(message, Embedded) else self.last_embedded
            )
            self._answer(message.number, message)
        elif isinstance(message, EngineFacts):
            self.facts = message
            self.progress = None
            if self._watcher is not None:
                self._watch_steps()
        elif isinstance(message, Loading):
            self.progress = message

    def _spread(self, message: StepUpdates) -> None:
        """Distribute a message's updates, with one wake-up per event loop."""
        here = running_loop()
        elsewhere: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestUpdate]]] = {}
        for update in message.updates:
            reference = self._streams.get(update.request_id)
            stream = reference() if reference is not None else None
            if update.ended is not None:
                self._streams.pop(update.request_id, None)
                self._accepted.discard(update.request_id)
            if stream is None:
                continue
            if stream.loop is here:
                take_all([(stream, update)], message.stats)
            else:
                elsewhere.setdefault(stream.loop, []).append((stream, update))
        for loop, items in elsewhere.items():
            _post_to(loop, take_all, items, message.stats)

    def _refused(self, about: str | int, error: errors.TwinphaseError) -> None:
        """Fail a request; a queued one fails only if no engine is left to continue it."""
        if about in self._accepted:
            self._accepted.discard(about)
            reference = self._streams.pop(str(about), None)
            if reference is not None and (stream := reference()) is not None:
                _post_to(stream.loop, stream.fail, error)
        self._answer(about, error)

    def _died(self, error: EngineDeadError) -> None:
        if self._watcher is not None:
            self._watcher(error)
        self.progress = Loading("starting again")
        for about in list(self._waiting):
            self._answer(about, error)
        streams = self._streams
        self._streams = {}
        self._accepted.clear()
        for reference in streams.values():
            stream = reference()
            if stream is not None:
                _post_to(stream.loop, stream.fail, error)

    def _answer(self, about: str | int, answer: Any) -> None:
        waiting = self._waiting.pop(about, None)
        if waiting is not None:
            _post_to(waiting[0], _resolve, waiting[1], answer)

    # The methods below send messages to the engine.
    async def _ask(self, about: str | int, message: ToEngine) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting[about] = loop, future
        try:
            self.host.put(message)
            return await future
        finally:
            self._waiting.pop(about, None)

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed, so that all engines of a cluster sample the same tokens."""
        if params.seed is not None or params.greedy or self.facts is None:
            return params
        return replace(params, seed=derive_seed(self.facts.config.seed, next(self._seedless)))

    def _end(self, stream: RequestStream, reason: FinishReason) -> None:
        """End a request for its stream, from any thread."""
        reference = self._streams.get(stream.request_id)
        # Another request may have this id by now.
        if reference is None or reference() not in (stream, None):
            return
        if reason is FinishReason.ABORT:
            del self._streams[stream.request_id]
        with suppress(EngineUnavailableError):
            self.host.put(End(stream.request_id, reason))

    def unavailable(self) -> EngineUnavailableError:
        """The error for requests that arrive while the engine is not ready."""
        if isinstance(self.host, ThreadHost):
            return self.host.dead()
        stage = self.progress.stage if self.progress else "starting"
        return EngineUnavailableError(
            f"The engine is not ready: {stage}.", "Send the request again in a moment."
        )


def _resolve(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _post_to(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    with suppress(RuntimeError):  # A closed loop has no readers left.
        loop.call_soon_threadsafe(function, *arguments)
