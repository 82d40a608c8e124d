"""What a user gets back, in vLLM's shape, and how a request's tokens become its text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from twinphase.batch import Phase, TokenLogprobs
from twinphase.phases.timeline import RequestTimeline
from twinphase.request import FinishReason, PrefixMiss, Request
from twinphase.tokenizer.detokenizer import Detokenizer
from twinphase.tokenizer.tokenizer import Tokenizer

__all__ = ["CompletionOutput", "Logprob", "RequestOutput", "StreamUpdate", "Transcript"]


@dataclass(frozen=True)
class Logprob:
    """Log probability (natural log) of a token, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        index: always 0.
        text: without the stop string or stop token that ended it.
        token_ids: output tokens, the stop token included.
        cumulative_logprob: sum over the output tokens; None unless logprobs were asked for.
        logprobs: per output token the sampled one and the most likely ones, by token id.
        finish_reason: "stop", "length", "abort" or "error"; None while unfinished.
        stop_reason: the stop string or stop token id that ended the text; None otherwise, so too at end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class RequestOutput:
    """A request and its answer so far.

    Attributes:
        request_id: unique in this engine.
        prompt: the prompt's text, the rendered template of a chat; None if ids were given.
        prompt_token_ids: the prompt's tokens.
        outputs: one answer.
        finished: False in a partial result.
        metrics: where the time went.
        num_cached_tokens: prompt tokens whose KV was there already.
        error: one line when `finish_reason` is "error".
        prefix_miss: why the prefix cache did not hold more of the prompt; None when it held all it could.
        num_preemptions: how often the request lost its KV to others.
        num_recomputed_tokens: tokens computed once more after that.
        request: as the engine saw it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestTimeline
    num_cached_tokens: int
    error: str | None = None
    prefix_miss: PrefixMiss | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    request: Request | None = field(default=None, repr=False)


@dataclass
class Transcript:
    """The text side of one request: takes its new tokens after each step, gives text.

    Attributes:
        request: as the engine sees it.
        prompt: text of the prompt, None if ids were given.
        tokenizer: of the model.
        timeline: of the request.
        continues_prompt: the answer goes on in the prompt's text (no chat template between them).
        keep_special: control tokens that are part of the text, such as those around a tool call.
        num_prefilled: prompt tokens in the KV cache so far, cached ones included.
        text: the answer so far.
        stop_string: the one that ended it.
        logprobs: of its tokens, if asked for.
    """

    request: Request
    prompt: str | None
    tokenizer: Tokenizer
    timeline: RequestTimeline
    continues_prompt: bool
    keep_special: Collection[int] = ()
    num_prefilled: int = 0
    text: str = ""
    stop_string: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _num_seen: int = 0

    def __post_init__(self) -> None:
        params = self.request.sampling_params
        # As in vLLM, text of the first `min_tokens` tokens is not searched for stop strings.
        self._searching = params.min_tokens == 0 or not params.stop_strings
        stop = params.stop_strings if self._searching else ()
        self._detokenizer = self._detokenize(stop, self.continues_prompt)

    @property
    def finished(self) -> bool:
        """True once the request has ended and its last text is out."""
        return self.request.finish_reason is not None

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token id that ended the text; None otherwise, so too at end of sequence."""
        if self.stop_string is not None or self.request.finish_reason is not FinishReason.STOP:
            return self.stop_string
        last, params = self.request.output_token_ids[-1], self.request.sampling_params
        ended_sequence = last in self.tokenizer.eos_token_ids and not params.ignore_eos
        return None if ended_sequence else last

    def take_tokens(self, logprobs: Sequence[TokenLogprobs]) -> int:
        """Turn the tokens that the last step appended to the request into text.

        When that completes a stop string, the tokens after it are dropped and the request's `finish_reason` becomes
        STOP; the caller tells the engine.

        Args:
            logprobs: of the step's sampled tokens, empty if not asked for.

        Returns:
            How many new tokens there were.
        """
        request = self.request
        new = request.output_token_ids[self._num_seen :]
        ended_by_token = request.finish_reason is FinishReason.STOP
        for index, token_id in enumerate(new):
            self._num_seen += 1
            if ended_by_token and index == len(new) - 1:
                break  # the stop token is no part of the text
            self.text += self._detokenizer.append(token_id)
            if self._detokenizer.stopped:
                self.stop_string = self._detokenizer.stop_string
                request.finish_reason = FinishReason.STOP
                del request.output_token_ids[self._num_seen :]
                break
            if not self._searching and self._num_seen >= request.sampling_params.min_tokens:
                self._begin_search()
        self.logprobs.extend(logprobs[: self._num_seen - len(self.logprobs)])
        if self.finished:
            self.flush()
        return len(new)

    def flush(self) -> None:
        """Append what the detokenizer holds back; the request has ended."""
        self.text += self._detokenizer.flush()

    def _detokenize(self, stop: Sequence[str], continuation: bool) -> Detokenizer:
        return Detokenizer(self.tokenizer, stop, keep_special=self.keep_special, continuation=continuation)

    def _begin_search(self) -> None:
        """From here on look for stop strings, once no part of a character is held back."""
        if not self._detokenizer.holds_back:
            stop = self.request.sampling_params.stop_strings
            self._detokenizer = self._detokenize(stop, True)
            self._searching = True

    def output(self) -> RequestOutput:
        """The result so far."""
        request = self.request
        asked = request.sampling_params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=list(request.output_token_ids),
            cumulative_logprob=sum(entry.logprob for entry in self.logprobs) if asked else None,
            logprobs=[self._by_token(entry) for entry in self.logprobs] if asked else None,
            finish_reason=request.finish_reason.value if request.finish_reason else None,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=self.finished,
            metrics=self.timeline,
            num_cached_tokens=request.num_cached_tokens,
            error=request.error,
            prefix_miss=request.prefix_miss,
            num_preemptions=request.num_preemptions,
            num_recomputed_tokens=request.num_recomputed_tokens,
            request=request,
        )

    def _by_token(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
        by_token: dict[int, Logprob] = {}
        for token_id, logprob, rank in ranked:
            text = self.tokenizer.decode([token_id], skip_special_tokens=False, continuation=True)
            by_token.setdefault(token_id, Logprob(logprob, rank, text))
        return by_token


@dataclass(frozen=True)
class StreamUpdate:
    """What one step brought to a streamed request.

    Attributes:
        text: text that became certain, often empty (while the prompt is read, or inside a character).
        token_ids: new output tokens.
        phase: what the request does next or did last: PREFILL until its first token.
        num_prefilled: prompt tokens in the KV cache so far, cached ones included.
        finished: True in the last update.
        transcript: the whole request, which goes on growing; `output` is taken from it.
    """

    text: str
    token_ids: list[int]
    phase: Phase
    num_prefilled: int
    finished: bool
    transcript: Transcript = field(repr=False)

    @property
    def output(self) -> RequestOutput:
        """The result at the moment of asking, whole once the request has finished."""
        return self.transcript.output()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.transcript.request.prompt_token_ids)
