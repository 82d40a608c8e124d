"""Results in vLLM's shape, and the conversion of a request's tokens to text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from twinphase.batch import Phase, TokenLogprobs
from twinphase.engine.process.messages import RequestUpdate
from twinphase.outcome import FinishReason, PrefixMiss
from twinphase.phases.record import RequestRecord
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
        text: the answer without the stop string or stop token that ended it.
        token_ids: output tokens, the stop token included.
        cumulative_logprob: sum over the output tokens; None unless logprobs were asked for.
        logprobs: per output token, the sampled token and the most likely ones, by token id.
        finish_reason: "stop", "length", "abort" or "error"; None while unfinished.
        stop_reason: the stop string or stop token id that ended the text; None otherwise, also at
            the end of sequence.
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
        prompt: the prompt's text, or the rendered chat template; None if token ids were given.
        outputs: a list of one answer.
        finished: False in a partial result.
        record: the request in numbers and times.
        prompt_logprobs: as `logprobs`, per prompt token; None for the first token, and None as a
            whole if not requested.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    record: RequestRecord = field(repr=False)  # Hundreds of intervals would hide the answer.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def request_id(self) -> str:
        """Unique in this engine."""
        return self.record.request_id

    @property
    def metrics(self) -> RequestTimeline:
        """The timeline, which shows where the time went."""
        return self.record.timeline

    @property
    def counts(self) -> RequestCounts:
        """The request's counts; some are attributes of this class too."""
        return self.record.counts

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was in the prefix cache."""
        return self.counts.num_cached_tokens

    @property
    def error(self) -> str | None:
        """The reason, in one line, if `finish_reason` is "error"."""
        return self.counts.error

    @property
    def prefix_miss(self) -> PrefixMiss | None:
        """Why the prefix cache did not hold more of the prompt; None if it held all it could."""
        return self.counts.prefix_miss

    @property
    def num_preemptions(self) -> int:
        """How often the request lost its KV blocks to others; known once it has finished."""
        return self.counts.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again after preemptions; known once the request has finished."""
        return self.counts.num_recomputed_tokens


@dataclass(frozen=True)
class StreamUpdate:
    """Changes of a streamed request since its last update.

    Attributes:
        text: new final text; often empty during prefill, or inside a multi-byte character.
        token_ids, logprobs: the new output tokens; logprobs only if requested.
        text_ends: as in `Transcript`, for the new output tokens.
        phase: PREFILL until the first token, DECODE from then on.
        num_prefilled: prompt tokens in the KV cache so far, cached ones included.
        finished: True in the last update.
        transcript: the whole request, which keeps growing; `output` is taken from it.
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
        """The result so far, complete once the request has finished."""
        return self.transcript.output()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.transcript.prompt_token_ids)


def plain_logprobs(position: Mapping[int, Logprob] | None) -> dict[str, Any] | None:
    """The log probabilities of one position as JSON, by token id."""
    if position is None:
        return None
    return {str(token_id): asdict(entry) for token_id, entry in position.items()}


@dataclass
class Transcript:
    """The growing answer to one request: takes each step's tokens, and makes updates and results.

    A front end calls `take` after each step.

    Attributes:
        record: the front end's record; the engine's, once the request has ended.
        prompt: text of the prompt; None if token ids were given.
        continues_prompt: the answer continues the prompt's text (no chat template between them).
        keep_special: control tokens that are part of the text, such as those around a tool call.
        num_prefilled: prompt tokens in the KV cache so far, cached ones included.
        token_ids, text, logprobs: the answer so far; logprobs only if requested.
        text_ends: for each output token, the position in the text after its last character; beyond
            the text's end while the text may be the beginning of a stop string.
        prompt_logprobs: entries of the prompt tokens prefilled so far, from the second token on;
            only if requested.
        stop_string: the stop string that ended the answer.
    """

    record: RequestRecord
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    tokenizer: Tokenizer
    continues_prompt: bool
    keep_special: Collection[int] = ()
    num_prefilled: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    text_ends: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_string: str | None = None
    num_tokens_given: int = 0  # Number of tokens in updates so far.
    _num_chars_given: int = 0
    _num_prefilled_given: int = 0

    def __post_init__(self) -> None:
        params = self.sampling_params
        # As in vLLM, stop strings are not searched in the text of the first `min_tokens` tokens.
        self._searching = params.min_tokens == 0 or not params.stop_strings
        stop = params.stop_strings if self._searching else ()
        self._detokenizer = self._detokenize(stop, self.continues_prompt)

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def timeline(self) -> RequestTimeline:
        return self.record.timeline

    @property
    def counts(self) -> RequestCounts:
        return self.record.counts

    @property
    def finished(self) -> bool:
        return self.record.has_ended

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.record.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token id that ended the text; None at the end of the sequence."""
        if self.stop_string is not None or self.finish_reason is not FinishReason.STOP:
            return self.stop_string
        last = self.token_ids[-1]
        ended_sequence = (
            last in self.tokenizer.eos_token_ids and not self.sampling_params.ignore_eos
        )
        return None if ended_sequence else last

    def take(self, update: RequestUpdate) -> bool:
        """Apply the result of a step.

        Returns:
            Whether a stop string was found. The front end then ends the request with
            `FinishReason.STOP`, and later tokens are ignored.
        """
        ended = update.ended
        self.num_prefilled = update.num_prefilled
        if update.prompt_logprobs is not None:
            # An engine that continues another engine's request may report some entries again.
            first, entries = update.prompt_logprobs
            self.prompt_logprobs[first - 1 : first - 1 + len(entries)] = entries
        searched = self.stop_string is None
        if searched and update.token_ids:
            self.take_tokens(update, ended is not None and ended.finish_reason is FinishReason.STOP)
        if ended is not None:
            self._end(ended)
        else:
            self.counts.num_cached_tokens = update.num_cached
            self.counts.num_output_tokens = len(self.token_ids)
            self.record.advance()
        return searched and self.stop_string is not None and ended is None

    def take_tokens(self, update: RequestUpdate, stopped: bool) -> None:
        """Add tokens and text up to a stop string's end; `stopped` if the last is a stop token."""
        for index, token_id in enumerate(update.token_ids, start=1):
            self.token_ids.append(token_id)
            is_stop_token = stopped and index == len(update.token_ids)
            # A stop token is not part of the text, unless it was requested.
            if not is_stop_token or self.sampling_params.include_stop_str_in_output:
                self.text += self._detokenizer.append(token_id)
            self.text_ends.append(len(self.text) + self._detokenizer.num_held)
            if self._detokenizer.stopped:
                self.stop_string = self._detokenizer.stop_string
                break
            if not self._searching and len(self.token_ids) >= self.sampling_params.min_tokens:
                self._begin_search()
        self.logprobs.extend(update.logprobs[: len(self.token_ids) - len(self.logprobs)])

    def _end(self, record: RequestRecord) -> None:
        self.text += self._detokenizer.flush()
        record.timeline.token_times = self.timeline.token_times
        record.counts.num_output_tokens = len(self.token_ids)
        record.counts.sampling_params = self.sampling_params
        if self.stop_string is not None:
            record.finish_reason = FinishReason.STOP
        self.record = record

    @property
    def has_news(self) -> bool:
        """Whether the next update would contain anything new."""
        return (
            len(self.text) > self._num_chars_given
            or len(self.token_ids) > self.num_tokens_given
            or self.num_prefilled > self._num_prefilled_given
        )

    def next_update(self) -> StreamUpdate:
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
        prompt_logprobs = [None, *map(self._by_token, self.prompt_logprobs)]
        return RequestOutput(
            self.prompt,
            self.prompt_token_ids,
            [completion],
            self.finished,
            replace(self.record, counts=self.counts.copy()),
            None if self.sampling_params.prompt_logprobs is None else prompt_logprobs,
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
        """Search for stop strings from here on, once no part of a character is held back."""
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
