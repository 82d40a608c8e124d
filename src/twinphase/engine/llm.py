"""`LLM`: a model by name, text in, text out, in the shape that vLLM's users know.

This is the door at which text stops: behind it the engine sees token ids only, and stop strings are found here. For
one thread; not a server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twinphase.batch import Phase
from twinphase.engine.engine import StepResult
from twinphase.engine.interrupt import deferred_interrupt
from twinphase.engine.load import LoadedEngine
from twinphase.engine.outputs import RequestOutput, StreamUpdate, Transcript
from twinphase.engine.text import Message, Prompt, is_plain, plain_prompt
from twinphase.errors import InvalidRequestError
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from twinphase.explain.explanation import Explanation
    from twinphase.tokenizer.chat_template import ChatTemplate
    from twinphase.tokenizer.tokenizer import Tokenizer

__all__ = ["LLM"]


class LLM:
    """A loaded model and its engine.

    Attributes:
        config: as resolved for this model.
        checkpoint: the open model file.
        model_config: the model's shape.
        engine: the engine, which other front ends may drive too.
    """

    def __init__(
        self, model: str | Path, *, compile_progress: Callable[[int, int, str], None] | None = None, **config: Any
    ) -> None:
        """Load a model.

        Args:
            model: a path, or a name that `twinphase pull` takes.
            compile_progress: called with (done, total, kernel) when kernels have to be compiled first.
            config: fields of `EngineConfig`.

        Raises:
            TwinphaseError: the model cannot be found, read or run, or a field of the configuration is out of range.
        """
        self._loaded = LoadedEngine(model, compile_progress=compile_progress, **config)
        self.config, self.checkpoint = self._loaded.config, self._loaded.checkpoint
        self.model_config, self.engine = self._loaded.model_config, self._loaded.engine
        self._ids = count()
        self._transcripts: dict[str, Transcript] = {}  # unfinished requests

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template."""
        return self._loaded.text.chat_template

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once: the scheduler runs as many together as fit.

        Args:
            prompts: one text, several, several lists of token ids, or vLLM's {"prompt": ...} and
                {"prompt_token_ids": ...}.
            sampling_params: for all prompts, or one for each; vLLM's defaults if None.
            use_tqdm: on a terminal, show a bar with finished prompts and both phases' token rates (vLLM's name).
            priority: one for each prompt; needs `scheduling_policy="priority"`.
            cache_salt: share cached prefixes only with requests of the same salt.

        Returns:
            Results in the order of the prompts. After Ctrl-C they are partial, with `finish_reason` "abort". One that
            failed by itself has `finish_reason` "error" and its reason in `error`.

        Raises:
            InvalidRequestError: a prompt or parameter that cannot be honoured; then none is computed.
        """
        return self._complete(_prompt_list(prompts), sampling_params, use_tqdm, priority, cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; a next turn computes only what the prefix cache does not hold.

        Args:
            messages: each with "role" and "content".
            sampling_params: as for `generate`; so are the others.
            use_tqdm: as for `generate`.
            priority: as for `generate`.
            cache_salt: as for `generate`.

        Raises:
            InvalidRequestError: as for `generate`; or messages that the model's template refuses.
        """
        single = all(isinstance(message, Mapping) for message in messages)
        conversations: list[Any] = [messages] if single else list(messages)
        return self._complete(conversations, sampling_params, use_tqdm, priority, cache_salt)

    def explain(self, output: RequestOutput) -> Explanation:
        """Why a request took as long as it did, what bound it, and which flag would change that by how much.

        Args:
            output: of this `LLM`.
        """
        if output.request is None:
            raise ValueError("the output does not carry its request")
        return self._loaded.explain(output.request.counts(), output.metrics, names=True)  # all are this caller's

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamUpdate]:
        """Complete one prompt and yield what each step brought.

        The request is queued before this returns, so its errors are raised here. Closing the iterator, or leaving its
        loop, aborts the request. Ctrl-C during a step ends the stream with `finish_reason` "abort"; between steps it
        is raised in the caller, whose last update has the result so far.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            sampling_params: vLLM's defaults if None.
        """
        return _Stream(self, self._submit(prompt, sampling_params or SamplingParams()))

    def _complete(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        cache_salt: str | None,
    ) -> list[RequestOutput]:
        transcripts: list[Transcript] = []
        params = SamplingParams() if sampling_params is None else sampling_params
        params = _one_each(params, SamplingParams, len(prompts), "sampling parameters")
        priorities = _one_each(0 if priority is None else priority, int, len(prompts), "priorities")
        try:
            for prompt, own, urgency in zip(prompts, params, priorities, strict=True):
                transcripts.append(self._submit(prompt, own, urgency, cache_salt))
            with _progress(len(prompts)) if use_tqdm else nullcontext() as bar:
                for transcript in transcripts:  # those behind have often finished when the turn comes to them
                    while not transcript.finished:
                        result = self._step()
                        if bar:
                            bar.update(result.record, len(transcripts) - len(self._transcripts))
        except KeyboardInterrupt:  # between two steps, or pressed twice: what there is comes back, marked "abort"
            if len(transcripts) < len(prompts):
                raise
        finally:
            self._abort(transcripts)
        return [transcript.output() for transcript in transcripts]

    def _submit(
        self, prompt: Prompt, params: SamplingParams, priority: int = 0, cache_salt: str | None = None
    ) -> Transcript:
        """Tokenize and queue; the timeline begins here."""
        clock = self.engine.clock
        timeline = RequestTimeline(clock())
        text, token_ids = self._loaded.encode(prompt)
        constraint = self._loaded.text.constraint(params, token_ids)
        timeline.mark(IntervalKind.TOKENIZE, clock())
        request = Request(str(next(self._ids)), token_ids, params, timeline.arrival, priority, cache_salt)
        request.constraint = constraint
        self.engine.add_request(request, timeline=timeline)
        transcript = Transcript(request, text, self.tokenizer, timeline, continues_prompt=is_plain(prompt))
        self._transcripts[request.request_id] = transcript
        return transcript

    def _step(self) -> StepResult:
        """One step of the engine, for whoever's requests are in it, and their text."""
        with deferred_interrupt() as interrupt:
            result = self.engine.step()
            self._take(result)
        if interrupt.requested:
            self._abort(list(self._transcripts.values()))
        return result

    def _take(self, result: StepResult) -> None:
        clock, ledger = self.engine.clock, self.engine.ledger
        alone = len(result.batch.scheduled) == 1
        for share in result.batch.scheduled:
            transcript = self._transcripts.get(share.request_id)
            if transcript is None:  # another front end's
                continue
            end = share.num_computed_tokens + share.num_scheduled_tokens
            transcript.num_prefilled = min(end, len(transcript.request.prompt_token_ids))
            if not share.samples and not transcript.finished:
                continue
            timeline = transcript.timeline
            ledger.begin_text(timeline, clock(), alone)
            num_new = transcript.take_tokens(result.output.logprobs.get(share.request_id, []))
            if transcript.finished:
                # A stop string is news to the engine; what it ended itself it passes over.
                self.engine.finish(share.request_id, FinishReason.STOP)
                del self._transcripts[share.request_id]
            now = clock()
            timeline.mark(IntervalKind.DETOKENIZE, now)
            timeline.hand_over_tokens(num_new, now)
            if transcript.finished:
                timeline.compact()
        if not alone:
            ledger.end_text(clock(), alone)

    def _abort(self, transcripts: Sequence[Transcript]) -> None:
        for transcript in transcripts:
            if not transcript.finished:
                self.engine.abort(transcript.request.request_id)
                del self._transcripts[transcript.request.request_id]
                transcript.flush()


class _Stream(Iterator[StreamUpdate]):
    """Makes a step for each update; a generator would not notice that it is closed before its first one."""

    def __init__(self, llm: LLM, transcript: Transcript) -> None:
        self._llm, self._transcript = llm, transcript
        self._num_chars = self._num_tokens = 0
        self._handed_over = self._ended = False

    def __next__(self) -> StreamUpdate:
        transcript, llm = self._transcript, self._llm
        if self._handed_over:
            timeline = transcript.timeline
            timeline.mark(IntervalKind.SEND, max(llm.engine.clock(), timeline.end))
        if self._ended:
            raise StopIteration
        try:
            if not transcript.finished:
                llm._step()
        except BaseException:
            self.close()
            raise
        text, token_ids = transcript.text[self._num_chars :], transcript.request.output_token_ids[self._num_tokens :]
        self._num_chars, self._num_tokens = len(transcript.text), self._num_tokens + len(token_ids)
        phase = Phase.DECODE if self._num_tokens else Phase.PREFILL
        self._handed_over, self._ended = True, transcript.finished
        return StreamUpdate(text, token_ids, phase, transcript.num_prefilled, self._ended, transcript)

    def close(self) -> None:
        """Abort the request if it has not finished."""
        self._ended = True
        self._llm._abort([self._transcript])

    def __del__(self) -> None:
        self.close()


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    return (
        [prompts] if isinstance(prompts, (str, Mapping)) else [plain_prompt(cast(Prompt, prompt)) for prompt in prompts]
    )


def _one_each(given: Any, kind: type, count: int, what: str) -> list[Any]:
    """`given` for each of `count` prompts, or the list of as many that it is."""
    if isinstance(given, kind):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(f"There are {count} prompts and {len(given)} {what}.", "Give one for each prompt.")
    return list(given)


def _progress(total: int) -> Any:
    """A bar on a terminal; imported here because rich costs start-up time."""
    if not sys.stderr.isatty():
        return nullcontext()
    from twinphase.engine.progress import GenerateProgress

    return GenerateProgress(total)
