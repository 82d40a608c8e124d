"""`LLM`: a model by name, text in, text out, in the shape that vLLM's users know.

This is the door at which text stops: behind it the engine sees token ids only, and stop strings are found here. For
one thread; not a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twinphase.backends.base import Backend, KVCacheSpec
from twinphase.batch import Phase
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.config import EngineConfig
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.interrupt import deferred_interrupt
from twinphase.engine.outputs import RequestOutput, StreamUpdate, Transcript
from twinphase.engine.runner import Runner
from twinphase.errors import InvalidRequestError
from twinphase.models.config import ModelConfig
from twinphase.models.loader import Model, load_model, read_config
from twinphase.phases.cost import ModelShape
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import FinishReason, Request, SamplingParams
from twinphase.scheduler.scheduler import Scheduler
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import resolve_model

if TYPE_CHECKING:
    from twinphase.tokenizer.chat_template import ChatTemplate

__all__ = ["LLM", "Message", "Prompt", "make_backend", "make_engine", "model_shape"]

Message = Mapping[str, Any]  # "role" and "content", as in OpenAI's API
Prompt = str | list[int] | Sequence[Message]


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
        wanted = EngineConfig(**config)
        self.checkpoint = open_gguf(resolve_model(str(model)))
        self.model_config = read_config(self.checkpoint)
        self.config = wanted.resolve(self.model_config.context_length)
        backend = make_backend(self.config, compile_progress)
        loaded = load_model(self.checkpoint, backend, self.config.max_model_len)
        self.engine = make_engine(
            self.config, loaded, backend, model_shape(self.checkpoint, loaded.config), self.tokenizer.eos_token_ids
        )
        self._ids = count()
        self._transcripts: dict[str, Transcript] = {}  # unfinished requests

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer.from_checkpoint(self.checkpoint)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; raw prompts never pay for importing jinja2."""
        from twinphase.tokenizer.chat_template import ChatTemplate

        return ChatTemplate.from_checkpoint(self.checkpoint, self.tokenizer)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one text, several, or several lists of token ids.
            sampling_params: for all prompts, or one for each; vLLM's defaults if None.
            progress: show a bar that counts finished prompts.

        Returns:
            Results in the order of the prompts. After Ctrl-C they are partial, with `finish_reason` "abort".

        Raises:
            InvalidRequestError: a prompt or parameter that cannot be honoured; then none is computed.
        """
        return self._complete(_prompt_list(prompts), sampling_params, progress, keep_kv=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several.

        The KV of a single conversation is kept, so that its next turn computes only what is new.

        Args:
            messages: each with "role" and "content".
            sampling_params: as for `generate`.
            progress: as for `generate`.

        Raises:
            InvalidRequestError: as for `generate`; or messages that the model's template refuses.
        """
        single = all(isinstance(message, Mapping) for message in messages)
        conversations: list[Any] = [messages] if single else list(messages)
        return self._complete(conversations, sampling_params, progress, keep_kv=single)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamUpdate]:
        """Complete one prompt and yield what each step brought.

        The request is queued before this returns, so its errors are raised here. Closing the iterator, or leaving its
        loop, aborts the request. Ctrl-C during a step ends the stream with `finish_reason` "abort"; between steps it
        is raised in the caller, whose last update has the result so far.

        Args:
            prompt: text, token ids, or the messages of a conversation, whose KV is kept for its next turn.
            sampling_params: vLLM's defaults if None.
        """
        return self._stream(self._submit(prompt, sampling_params or SamplingParams(), keep_kv=not _is_plain(prompt)))

    def _stream(self, transcript: Transcript) -> Iterator[StreamUpdate]:
        timeline, num_chars, num_tokens = transcript.timeline, 0, 0
        try:
            while True:
                if not transcript.finished:
                    self._step()
                text, token_ids = transcript.text[num_chars:], transcript.request.output_token_ids[num_tokens:]
                num_chars, num_tokens = len(transcript.text), num_tokens + len(token_ids)
                phase = Phase.DECODE if num_tokens else Phase.PREFILL
                last = transcript.finished
                yield StreamUpdate(text, token_ids, phase, transcript.num_prefilled, last, transcript)
                timeline.mark(IntervalKind.SEND, self.engine.clock())
                if last:
                    return
        finally:
            self._abort([transcript])

    def _complete(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        keep_kv: bool,
    ) -> list[RequestOutput]:
        transcripts: list[Transcript] = []
        try:
            for prompt, params in zip(prompts, _params_list(sampling_params, len(prompts)), strict=True):
                transcripts.append(self._submit(prompt, params, keep_kv))
            with _progress_bar(len(prompts)) if progress else nullcontext(_show_nothing) as show:
                while unfinished := sum(not transcript.finished for transcript in transcripts):
                    show(len(prompts) - unfinished)
                    self._step()
        except KeyboardInterrupt:  # between two steps, or pressed twice: what there is comes back, marked "abort"
            if len(transcripts) < len(prompts):
                raise
        finally:
            self._abort(transcripts)
        return [transcript.output() for transcript in transcripts]

    def _submit(self, prompt: Prompt, params: SamplingParams, keep_kv: bool) -> Transcript:
        """Tokenize and queue; the timeline begins here."""
        clock = self.engine.clock
        timeline = RequestTimeline(clock())
        text, token_ids = self._encode(prompt)
        timeline.mark(IntervalKind.TOKENIZE, clock())
        request = Request(str(next(self._ids)), token_ids, params, arrival_time=timeline.arrival)
        self.engine.add_request(request, keep_kv=keep_kv, timeline=timeline)
        transcript = Transcript(request, text, self.tokenizer, timeline, continues_prompt=_is_plain(prompt))
        self._transcripts[request.request_id] = transcript
        return transcript

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text of a prompt (None if it came as ids) and its token ids."""
        limit = self.config.max_model_len
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("The prompt is empty.", "Give at least one character.")
            return prompt, self.tokenizer.encode(prompt, max_tokens=limit)
        if _is_plain(prompt):
            return None, list(cast(list[int], prompt))  # the engine checks each id
        text = self.chat_template.render(cast(Sequence[Message], prompt))
        return text, self.tokenizer.encode(text, add_special_tokens=False, max_tokens=limit)

    def _step(self) -> None:
        """One step of the engine, for whoever's requests are in it, and their text."""
        with deferred_interrupt() as interrupt:
            result = self.engine.step()
            self._take(result)
        if interrupt.requested:
            self._abort(list(self._transcripts.values()))

    def _take(self, result: StepResult) -> None:
        clock = self.engine.clock
        for share in result.batch.scheduled:
            transcript = self._transcripts.get(share.request_id)
            if transcript is None:  # another front end's
                continue
            request = transcript.request
            end = share.num_computed_tokens + share.num_scheduled_tokens
            transcript.num_prefilled = min(end, len(request.prompt_token_ids))
            num_new = transcript.take_tokens(result.output.logprobs.get(share.request_id, []))
            if transcript.finished:
                # A stop string is news to the engine; what it ended itself it passes over.
                self.engine.finish(share.request_id, FinishReason.STOP)
                del self._transcripts[share.request_id]
            now = clock()
            if share.samples:
                transcript.timeline.mark(IntervalKind.DETOKENIZE, now)
                transcript.timeline.hand_over_tokens(num_new, now)

    def _abort(self, transcripts: Sequence[Transcript]) -> None:
        for transcript in transcripts:
            if not transcript.finished:
                self.engine.abort(transcript.request.request_id)
                del self._transcripts[transcript.request.request_id]
                transcript.flush()


def make_backend(config: EngineConfig, compile_progress: Callable[[int, int, str], None] | None = None) -> Backend:
    """The backend a configuration asks for; imported here because the other one costs start-up time."""
    if config.backend == "reference":
        from twinphase.backends.reference import ReferenceBackend

        return ReferenceBackend()
    from twinphase.backends.cpu.backend import CpuBackend

    backend: Backend = CpuBackend(
        threads=config.threads,
        isa=config.isa,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        progress=compile_progress,
    )
    return backend


def make_engine(
    config: EngineConfig, model: Model, backend: Backend, shape: ModelShape, eos_token_ids: frozenset[int]
) -> Engine:
    """Allocate the KV cache and put an engine together.

    Args:
        config: resolved.
        model: loaded on `backend`.
        backend: without a KV cache yet.
        shape: the model's numbers for FLOP and bytes.
        eos_token_ids: tokens that end a sequence.
    """
    if config.max_model_len is None or config.num_kv_blocks is None:
        raise ValueError("the configuration is not resolved")
    spec = KVCacheSpec(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
    )
    backend.allocate_kv_cache(spec)
    shape = replace(shape, kv_token_bytes=backend.kv_bytes_per_token())
    scheduler = Scheduler(
        KVCacheManager(config.num_kv_blocks, config.block_size),
        max_model_len=config.max_model_len,
        eos_token_ids=eos_token_ids,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    runner = Runner(model, backend, block_size=config.block_size, eos_token_ids=eos_token_ids)
    return Engine(scheduler, runner, shape=shape, vocab_size=model.config.vocab_size, seed=config.seed)


def model_shape(checkpoint: Checkpoint, config: ModelConfig) -> ModelShape:
    """The numbers of the cost formulas; bytes are those of the checkpoint's own precision."""
    head = checkpoint.tensors.get("output.weight") or checkpoint.tensors["token_embd.weight"]
    layers = (info for name, info in checkpoint.tensors.items() if name.startswith("blk.") and len(info.shape) == 2)
    return ModelShape(
        linear_parameters=config.linear_parameters,
        head_parameters=config.vocab_size * config.hidden_size,
        linear_bytes=sum(info.nbytes for info in layers),
        head_bytes=head.nbytes,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _is_plain(prompt: Prompt) -> bool:
    """True for text and token ids, False for messages."""
    return isinstance(prompt, str) or not all(isinstance(item, Mapping) for item in prompt) or not prompt


def _prompt_list(prompts: str | Sequence[str] | Sequence[list[int]]) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    for item in items:
        if not isinstance(item, (str, list)):
            raise InvalidRequestError(
                f"A prompt is of type {type(item).__name__}.", "Give texts, or lists of token ids."
            )
    return items


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"There are {num_prompts} prompts and {len(params)} sampling parameters.", "Give one for each prompt."
        )
    return list(params)


def _show_nothing(done: int) -> None:
    pass


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A terminal bar; gives the function that moves it."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("Prompts", total=total)
        yield lambda done: bar.update(task, completed=done)
