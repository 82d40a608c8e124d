"""`LLM`: loads a model by name and turns text into text, with vLLM's interface.

Text is handled here only, stop strings included: the engine sees token ids. Several threads may
share one `LLM` and take turns; `AsyncEngine` is better for a program with many users.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinphase.config import EngineConfig
from twinphase.engine.embedding.embedder import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    LoadedEmbedder,
    load,
)
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.frontends.checks import (
    Message,
    Prompt,
    check_params,
    check_task,
    conversations,
    engine_config,
    is_plain,
    one_for_each,
    plain_prompt,
    prompt_list,
    wrong_task,
)
from twinphase.engine.frontends.exclusive_use import Turns
from twinphase.engine.frontends.outputs import RequestOutput, StreamUpdate, Transcript
from twinphase.engine.frontends.pairs import ScoringRequestOutput, encode_pairs
from twinphase.engine.frontends.text import SamplingDefaults
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.messages import Add
from twinphase.engine.process.requests import EngineRequests
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord
from twinphase.phases.timeline import IntervalKind
from twinphase.request import SamplingParams

if TYPE_CHECKING:
    from twinphase.blueprint import Blueprint
    from twinphase.engine.process.messages import RankFacts
    from twinphase.explain.explanation import Explanation
    from twinphase.tokenizer.chat_template import ChatTemplate
    from twinphase.tokenizer.tokenizer import Tokenizer


class LLM:
    """A loaded model and its engine.

    Threads may share it; their requests are computed together. Processes cannot share it: after
    `fork`, the child gets an `EngineDeadError`.

    Attributes:
        config: configuration as resolved for this model.
        checkpoint: the open model.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        compile_progress: Callable[[float, int, str], None] | None = None,
        config: EngineConfig = EngineConfig(),
        **fields: Any,
    ) -> None:
        """Load a model.

        Args:
            model: a path, or a name that `twinphase pull` takes.
            compile_progress: called with (done, total, kernel) when kernels have to be compiled
                first; `done` of `total` kernels are complete, estimated by the elapsed time.
            config: the engine's configuration.
            fields: fields of `EngineConfig`, which replace those of `config`.

        Raises:
            TwinphaseError: the model cannot be found, read or run, or a field is unknown or its
                value out of range.
        """
        self._model = load(model, engine_config(fields, config), compile_progress=compile_progress)
        self.config = self._model.config
        self._model.text.generation = self.config
        self.checkpoint = self._model.checkpoint
        self._ids = count()
        self._turns = Turns()
        self._transcripts: dict[str, Transcript] = {}  # Unfinished transcripts, by id.
        self._abandoned: deque[Transcript] = deque()  # Transcripts without a reader.

    @property
    def _loaded(self) -> LoadedEngine:
        """The model, if it generates text; else an `InvalidRequestError`."""
        if isinstance(self._model, LoadedEmbedder):
            raise wrong_task(self.checkpoint, self._model.task, "generate")
        return self._model

    @cached_property
    def _requests(self) -> EngineRequests:
        return EngineRequests(self.engine)

    @property
    def engine(self) -> Engine:
        """The engine, which other front ends in the same thread may use too."""
        return self._loaded.engine

    @property
    def ranks(self) -> Sequence[RankFacts]:
        """The processes that compute the model, if there are several."""
        return self._loaded.ranks

    @property
    def blueprint(self) -> Blueprint:
        return self._loaded.blueprint

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.text.tokenizer

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Default sampling values of requests, and their source."""
        return self._model.text.sampling_defaults

    @property
    def chat_template(self) -> ChatTemplate:
        return self._loaded.text.chat_template

    def get_default_sampling_params(self, **given: Any) -> SamplingParams:
        """The model's own sampling values, which replace the defaults of `SamplingParams`.

        They come from the model's generation config or its catalogue entry, as `generation_config`
        and `override_generation_config` say. `given` replaces some of them.
        """
        return SamplingParams(**{**self.sampling_defaults.values, **given})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        prediction: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts together: the scheduler batches as many as fit.

        Args:
            prompts: one text, several texts or lists of token ids, or vLLM's {"prompt": ...} and
                {"prompt_token_ids": ...}.
            sampling_params: for all prompts, or one for each; if None,
                `get_default_sampling_params()`, which ends an answer after 16 tokens.
            use_tqdm: on a terminal, show a bar with finished prompts and both phases' token rates
                (vLLM's name).
            priority: one for each prompt; needs `scheduling_policy="priority"`.
            cache_salt: share cached prefixes only with requests of the same salt.
            prediction: the expected answer, one for all prompts or one each. With
                `speculative_config`, a correct one saves time; none changes the answer.

        Returns:
            Results in the order of the prompts. If one request fails, its `finish_reason` is
            "error", and `error` has the reason.

        Raises:
            InvalidRequestError: a prompt or parameter is not supported; then no prompt is computed.
            KeyboardInterrupt: Ctrl-C was pressed; all of these requests are aborted. `stream` gives
                partial results.
        """
        return self._complete(
            prompt_list(prompts), sampling_params, use_tqdm, priority, cache_salt, prediction
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        prediction: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the prefix cache avoids recomputing earlier turns.

        Messages are mappings with "role" and "content". The other arguments are those of
        `generate`; without `sampling_params`, an answer may take the rest of the context.

        Raises:
            InvalidRequestError: as for `generate`, or the model's chat template refuses the
                messages.
            KeyboardInterrupt: as for `generate`.
        """
        chats = conversations(messages)
        params = self._chat_params() if sampling_params is None else sampling_params
        return self._complete(chats, params, use_tqdm, priority, cache_salt, prediction)

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[EmbeddingRequestOutput]:
        """Turn texts into vectors of length 1; needs an encoder, or `task="embed"`.

        Args:
            prompts: one text, several texts or lists of token ids, or vLLM's {"prompt": ...} and
                {"prompt_token_ids": ...}.

        Returns:
            Results in the order of the prompts; a vector does not depend on the other prompts.

        Raises:
            InvalidRequestError: a text cannot be embedded, so that none is computed; or the model
                generates text.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        model = self._embedder("embed")
        encoded = [model.encode(prompt) for prompt in prompt_list(prompts)]
        with self._turn():
            vectors = model.embed(encoded)
        return [
            EmbeddingRequestOutput(
                str(next(self._ids)), EmbeddingOutput(vector.tolist()), token_ids
            )
            for token_ids, vector in zip(encoded, vectors, strict=True)
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Score how well pairs of texts match; needs a reranker, or a model that embeds.

        Args:
            text_1: one text (a query) for all of `text_2`, or one for each.
            text_2: a text or several (documents).
            truncate_prompt_tokens: maximum tokens per pair; the end of the longer text is cut
                first. -1 is the model's limit. If None, a longer pair is an error.
            use_activation: False returns the output of a reranker's head, before the sigmoid.

        Returns:
            Results in the order of the pairs; a score does not depend on the other pairs.

        Raises:
            InvalidRequestError: a pair cannot be scored, so that none is; or the model generates
                text.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        model = self._embedder("score")
        texts = (text_1, text_2, self.config.max_model_len or 0)
        pairs = encode_pairs(model.text, model.task, *texts, truncate_prompt_tokens)
        with self._turn():
            vectors = model.embed(pairs.texts, pairs.starts)
        return pairs.outputs([vector.tolist() for vector in vectors], use_activation, self._ids)

    def _embedder(self, wanted: str) -> LoadedEmbedder:
        """The model, if it can "embed" or "score" as wanted."""
        model = self._model
        check_task(self.checkpoint, model.task, wanted)
        assert isinstance(model, LoadedEmbedder), "the task was checked"
        return model

    def explain(self, output: RequestOutput) -> Explanation:
        """Why a request of this `LLM` took so long, and which flag would change that."""
        with self._turn():
            # All names belong to this caller.
            return self._loaded.explain(output.counts, output.metrics, names=True)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamUpdate]:
        """Complete one prompt and yield an update for each step.

        The request is queued before this returns, so its errors are raised here. Closing the
        iterator, or leaving its loop, aborts the request. After Ctrl-C during a step there is one
        more update, with the answer so far and `finish_reason` "abort"; then `KeyboardInterrupt` is
        raised. Between steps it is raised at once.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            sampling_params: if None, as for `generate`, or for `chat` where it is messages.
        """
        if sampling_params is None:
            plain = is_plain(plain_prompt(prompt))
            sampling_params = self.get_default_sampling_params() if plain else self._chat_params()
        return _Stream(self, self._submit(prompt, check_params(sampling_params)))

    def _chat_params(self) -> SamplingParams:
        """The default parameters of a chat: only the context limits the answer, as in a server."""
        return SamplingParams(**{"max_tokens": None, **self.sampling_defaults.values})

    def _complete(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        cache_salt: str | None,
        prediction: str | Sequence[str] | None,
    ) -> list[RequestOutput]:
        transcripts: list[Transcript] = []
        asked = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = map(
            check_params, one_for_each(asked, SamplingParams, len(prompts), "sampling parameters")
        )
        priorities = one_for_each(
            0 if priority is None else priority, int, len(prompts), "priorities"
        )
        expected = one_for_each(
            "" if prediction is None else prediction, str, len(prompts), "predictions"
        )
        try:
            for prompt, own, urgency, guess in zip(
                prompts, params, priorities, expected, strict=True
            ):
                transcripts.append(self._submit(prompt, own, urgency, cache_salt, guess))
            with _progress(len(prompts)) if use_tqdm else nullcontext() as bar:
                for (
                    transcript
                ) in transcripts:  # Later ones have often finished when their turn comes.
                    while not transcript.finished:
                        with self._turn():
                            result = self._step(transcript)
                        if bar and result:
                            bar.update(
                                result.record,
                                sum(transcript.finished for transcript in transcripts),
                            )
        finally:
            self._abort(transcripts)
        # Another thread may be at the end of the step that finished one of the transcripts.
        with self._turn():
            return [transcript.output() for transcript in transcripts]

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        prediction: str = "",
    ) -> Transcript:
        """Tokenize and queue a prompt; its timeline begins here."""
        with self._turns.take() as interrupt:
            self._drop_abandoned()
            clock = self.engine.clock
            record = RequestRecord.arrived(str(next(self._ids)), clock())
            record.priority = priority
            record.cache_salt = cache_salt
            text, token_ids = self._loaded.encode(prompt)
            record.tokenized(len(token_ids), clock())
            constraint = self._loaded.text.constraint(params, token_ids)
            expected = list(self._loaded.text.encode_plain(prediction))
            self._requests.add(Add(record, token_ids, params, expected), constraint)
            transcript = Transcript(
                record,
                text,
                token_ids,
                params,
                self.tokenizer,
                continues_prompt=is_plain(prompt),
            )
            self._transcripts[record.request_id] = transcript
        if interrupt.requested:
            self._abort([transcript])
            raise KeyboardInterrupt
        return transcript

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Exclusive use of the engine and all transcripts; Ctrl-C is raised at the end."""
        with self._turns.take() as interrupt:
            self._drop_abandoned()
            yield
        if interrupt.requested:
            raise KeyboardInterrupt

    def _step(self, transcript: Transcript) -> StepResult | None:
        """Run one step, unless another thread has finished this request."""
        if transcript.finished:
            return None
        result = self.engine.step()
        self._take(result)
        return result

    def _take(self, result: StepResult) -> None:
        clock = self.engine.clock
        ledger = self.engine.ledger
        alone = len(result.batch.scheduled) == 1
        for update in self._requests.updates(result):
            transcript = self._transcripts[update.request_id]
            if not update.token_ids and update.ended is None:
                transcript.take(update)
                continue
            timeline = transcript.timeline
            num_before = len(transcript.token_ids)
            ledger.begin_text(timeline, clock(), alone)
            if transcript.take(update):
                self._end(transcript, FinishReason.STOP)
            now = clock()
            timeline.mark(IntervalKind.DETOKENIZE, now)
            timeline.hand_over_tokens(len(transcript.token_ids) - num_before, now)
            if update.ended is not None:
                del self._transcripts[update.request_id]
            if transcript.finished:
                timeline.compact()
        if not alone:
            ledger.end_text(clock(), alone)

    def _end(self, transcript: Transcript, reason: FinishReason) -> None:
        update = self._requests.end(transcript.request_id, reason)
        if update is not None:
            transcript.take(update)
            del self._transcripts[transcript.request_id]

    def _abort(self, transcripts: Sequence[Transcript]) -> None:
        """Abort unfinished requests, except those of a forked child's parent."""
        if not self._turns.process.is_here or all(
            transcript.finished for transcript in transcripts
        ):
            return
        self._abandoned.extend(transcripts)
        with self._turn():
            pass

    def _abandon(self, transcript: Transcript) -> None:
        """Abort a request once the engine is free, since a destructor may run during a step."""
        self._abandoned.append(transcript)
        with self._turns.take_if_free() as free:
            if free:
                self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            transcript = self._abandoned.popleft()
            if not transcript.finished:
                self._end(transcript, FinishReason.ABORT)


class _Stream(Iterator[StreamUpdate]):
    """Runs a step per update; unlike a generator, it notices a close before the first update."""

    def __init__(self, llm: LLM, transcript: Transcript) -> None:
        self._llm = llm
        self._transcript = transcript
        self._handed_over = self._ended = self._interrupted = False

    def __next__(self) -> StreamUpdate:
        transcript = self._transcript
        llm = self._llm
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt
        try:
            with llm._turns.take() as interrupt:
                llm._drop_abandoned()
                if self._handed_over:
                    timeline = transcript.timeline
                    timeline.mark(IntervalKind.SEND, max(llm.engine.clock(), timeline.end))
                over = self._ended
                if not over:
                    llm._step(transcript)
                    if interrupt.requested and not transcript.finished:
                        llm._end(transcript, FinishReason.ABORT)
                    self._handed_over = True
                    self._ended = transcript.finished
                    update = transcript.next_update()
        except BaseException:
            self.close()
            raise
        self._interrupted = interrupt.requested
        if over:
            raise StopIteration
        return update

    def close(self) -> None:
        """Abort the request if it has not finished."""
        self._ended = True
        self._llm._abort([self._transcript])

    def __del__(self) -> None:
        self._llm._abandon(self._transcript)


def _progress(total: int) -> Any:
    """A progress bar on a terminal; the import is here because rich is slow to import."""
    if not sys.stderr.isatty():
        return nullcontext()
    from twinphase.engine.loading.progress import GenerateProgress

    return GenerateProgress(total)
