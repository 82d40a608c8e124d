"""What a user gets back, in vLLM's shape, and how a request's tokens become its text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from twinphase.batch import Phase, TokenLogprobs
from twinphase.outcome import FinishReason, PrefixMiss
from twinphase.phases.timeline import RequestTimeline
from twinphase.request import RequestCounts, SamplingParams
from twinphase.tokenizer.detokenizer import Detokenizer
from twinphase.tokenizer.tokenizer import Tokenizer


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
        stop_reason: the stop string or stop token id that ended the text; None otherwise, so too at
            end of sequence.
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
        outputs: one answer.
        finished: False in a partial result.
        metrics: where the time went.
        counts: the request in numbers, which `LLM.explain` reads; those below are a part of them.
        num_cached_tokens: prompt tokens whose KV was there already.
        error: one line when `finish_reason` is "error".
        prefix_miss: why the prefix cache did not hold more of the prompt; None when it held all it
            could.
        num_preemptions: how often the request lost its KV to others; known when it has finished, as
            the next one is.
        num_recomputed_tokens: tokens computed once more after that.
        prompt_logprobs: per prompt token, as of output tokens; None of the first, and altogether if
            not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestTimeline
    counts: RequestCounts = field(repr=False)
    num_cached_tokens: int = 0
    error: str | None = None
    prefix_miss: PrefixMiss | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True)
class StreamUpdate:
    """What a streamed request got since its last update.

    Attributes:
        text: text that became certain, often empty (while the prompt is read, or inside a
            character).
        token_ids, logprobs: of the new output tokens; logprobs only if asked for.
        text_ends: of the new output tokens, as in `Transcript`.
        phase: what the request does next or did last: PREFILL until its first token.
        num_prefilled: prompt tokens in the KV cache so far, cached ones included.
        finished: True in the last update.
        transcript: the whole request, which goes on growing; `output` is taken from it.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    phase: Phase
    num_prefilled: int
    finished: bool
    transcript: Transcript = field(repr=False)
    text_ends: Sequence[int] = ()

    @property
    def output(self) -> RequestOutput:
        """The result at the moment of asking, whole once the request has finished."""
        return self.transcript.output()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.transcript.prompt_token_ids)


def plain_logprobs(position: Mapping[int, Logprob] | None) -> dict[str, Any] | None:
    """One position's log probabilities as JSON has them, by token id."""
    if position is None:
        return None
    return {str(token_id): asdict(entry) for token_id, entry in position.items()}


@dataclass
class Transcript:
    """The answer to one request as it grows: takes each step's tokens, gives updates and results.

    A front end calls `take_tokens` after each step. Once `stop_string` is set it tells the engine
    to stop, and passes over what comes after. When the engine has let go of the request, it calls
    `end`.

    Attributes:
        prompt: text of the prompt, None if ids were given.
        continues_prompt: the answer goes on in the prompt's text (no chat template between them).
        keep_special: control tokens that are part of the text, such as those around a tool call.
        num_prefilled: prompt tokens in the KV cache so far, cached ones included.
        num_cached_tokens: those that the prefix cache held.
        token_ids, text, logprobs: the answer so far; logprobs only if asked for.
        text_ends: for each output token, the position in the text after its last character; beyond
            the text's end while the text may be the beginning of a stop string.
        prompt_logprobs: of the prompt tokens from the second on, as far as it is read; only if
            asked for.
        stop_string: the one that ended it.
        finish_reason: None until the engine has let go of the request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    tokenizer: Tokenizer
    timeline: RequestTimeline
    continues_prompt: bool
    keep_special: Collection[int] = ()
    num_prefilled: int = 0
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    text_ends: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_string: str | None = None
    finish_reason: FinishReason | None = None
    num_tokens_given: int = 0  # in updates
    _num_chars_given: int = 0
    _num_prefilled_given: int = 0
    _counts: RequestCounts | None = None  # the engine's, when it has let go of the request

    def __post_init__(self) -> None:
        params = self.sampling_params
        # As in vLLM, text of the first `min_tokens` tokens is not searched for stop strings.
        self._searching = params.min_tokens == 0 or not params.stop_strings
        stop = params.stop_strings if self._searching else ()
        self._detokenizer = self._detokenize(stop, self.continues_prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token id that ended the text; None otherwise, so too at end of sequence."""
        if self.stop_string is not None or self.finish_reason is not FinishReason.STOP:
            return self.stop_string
        last = self.token_ids[-1]
        ended_sequence = (
            last in self.tokenizer.eos_token_ids and not self.sampling_params.ignore_eos
        )
        return None if ended_sequence else last

    def take_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        ended: FinishReason | None,
    ) -> None:
        """Add a step's tokens and their text, up to the end of a stop string, and drop what lies behind it.

        `ended` is why the engine ended the request with them, if it did; `logprobs` is empty if not
        asked for.
        """
        if self.stop_string is not None:
            return
        for index, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            stops = ended is FinishReason.STOP and index == len(token_ids)
            # A stop token is no part of the text, unless asked for.
            if not stops or self.sampling_params.include_stop_str_in_output:
                self.text += self._detokenizer.append(token_id)
            self.text_ends.append(len(self.text) + self._detokenizer.num_held)
            if self._detokenizer.stopped:
                self.stop_string = self._detokenizer.stop_string
                break
            if not self._searching and len(self.token_ids) >= self.sampling_params.min_tokens:
                self._begin_search()
        self.logprobs.extend(logprobs[: len(self.token_ids) - len(self.logprobs)])

    def take_prompt_logprobs(self, scored: tuple[int, list[TokenLogprobs]] | None) -> None:
        """Add those of prompt tokens from an index on; whoever goes on with another's request may say them again."""
        if scored is not None:
            first, entries = scored
            self.prompt_logprobs[first - 1 : first - 1 + len(entries)] = entries

    def end(self, reason: FinishReason, counts: RequestCounts | None) -> None:
        """The engine has let go of the request, of which it tells `counts`."""
        self.text += self._detokenizer.flush()
        self._counts = counts
        self.finish_reason = reason if self.stop_string is None else FinishReason.STOP

    def counts(self) -> RequestCounts:
        """The request in numbers; what became of it is known once it has finished."""
        known = self._counts or RequestCounts(
            self.request_id, 0, num_cached_tokens=self.num_cached_tokens
        )
        return replace(
            known,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_output_tokens=len(self.token_ids),
            sampling_params=self.sampling_params,
        )

    @property
    def has_news(self) -> bool:
        """Whether the next update would say anything."""
        return (
            len(self.text) > self._num_chars_given
            or len(self.token_ids) > self.num_tokens_given
            or self.num_prefilled > self._num_prefilled_given
        )

    def next_update(self) -> StreamUpdate:
        """What has come since the last update."""
        text = self.text[self._num_chars_given :]
        token_ids = self.token_ids[self.num_tokens_given :]
        logprobs = self.logprobs[self.num_tokens_given : len(self.token_ids)]
        text_ends = self.text_ends[self.num_tokens_given :]
        self._num_chars_given = len(self.text)
        self.num_tokens_given = len(self.token_ids)
        self._num_prefilled_given = self.num_prefilled
        phase = Phase.DECODE if self.token_ids else Phase.PREFILL
        return StreamUpdate(
            text,
            token_ids,
            logprobs,
            phase,
            self.num_prefilled,
            finished=self.finished,
            transcript=self,
            text_ends=text_ends,
        )

    def output(self) -> RequestOutput:
        """The result so far."""
        counts = self.counts()
        asked = self.sampling_params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=sum(entry.logprob for entry in self.logprobs) if asked else None,
            logprobs=[self._by_token(entry) for entry in self.logprobs] if asked else None,
            finish_reason=self.finish_reason.value if self.finish_reason else None,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=self.finished,
            metrics=self.timeline,
            counts=counts,
            num_cached_tokens=counts.num_cached_tokens,
            error=counts.error,
            prefix_miss=counts.prefix_miss,
            num_preemptions=counts.num_preemptions,
            num_recomputed_tokens=counts.num_recomputed_tokens,
            prompt_logprobs=None
            if self.sampling_params.prompt_logprobs is None
            else [None, *map(self._by_token, self.prompt_logprobs)],
        )

    def _detokenize(self, stop: Sequence[str], continuation: bool) -> Detokenizer:
        keep_stop = self.sampling_params.include_stop_str_in_output
        return Detokenizer(
            self.tokenizer,
            stop,
            keep_special=self.keep_special,
            keep_stop=keep_stop,
            continuation=continuation,
        )

    def _begin_search(self) -> None:
        """From here on look for stop strings, once no part of a character is held back."""
        if not self._detokenizer.holds_back:
            self._detokenizer = self._detokenize(self.sampling_params.stop_strings, True)
            self._searching = True

    def _by_token(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [
            (token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        ]
        by_token: dict[int, Logprob] = {}
        for token_id, logprob, rank in ranked:
            text = self.tokenizer.decode([token_id], skip_special_tokens=False, continuation=True)
            by_token.setdefault(token_id, Logprob(logprob, rank, text))
        return by_token
