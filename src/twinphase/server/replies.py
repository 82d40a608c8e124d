"""Replies in OpenAI's shapes, streamed and complete, with usage and timings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from twinphase.batch import TokenLogprobs
from twinphase.server.answers import Choice, Delta
from twinphase.server.jobs import Job
from twinphase.server.live.eta import seconds_left
from twinphase.server.observe import spec_decode_metrics, timings
from twinphase.server.openai_types import CompletionRequest, StreamOptions
from twinphase.server.service import Service
from twinphase.server.tool_calls import ToolCallDelta, call_of
from twinphase.tokenizer.detokenizer import Detokenizer

DONE = b"data: [DONE]\n\n"
# vLLM uses this value because JSON has no infinity.
LOWEST_LOGPROB = -9999.0
encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def usage(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    """The number of tokens of a reply; each prompt counts once, for any number of answers."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    counts = [choice.record.counts for choice in choices]
    cached = sum(first.num_cached_tokens for first in counts[:: job.n])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": sum(
                each.num_accepted_prediction_tokens for each in counts
            ),
            "rejected_prediction_tokens": sum(
                each.num_rejected_prediction_tokens for each in counts
            ),
        },
    }


def ignored(fields: Sequence[str]) -> dict[str, str]:
    """The header that names the request's fields that have no effect."""
    return {"x-ignored-fields": ", ".join(fields)} if fields else {}


class Replies:
    """The parts that chats and completions have in common.

    `chunk_object` and `body_object` are OpenAI's object types. Other dialects override `chunk`,
    `end`, `body` and `failure`.
    """

    chunk_object = body_object = ""
    stream_type = "text/event-stream"

    def __init__(self, job: Job, choices: Sequence[Choice], service: Service) -> None:
        self.job = job
        self.choices = choices
        self._service = service
        self.tokenizer = choices[0].stream.transcript.tokenizer
        self._prefilled: set[int] = set()  # Answers whose prompt was reported as complete.

    def head(self) -> dict[str, Any]:
        """The fields at the start of every part of the reply."""
        job = self.job
        return {
            "id": job.id,
            "object": self.chunk_object,
            "created": job.created,
            "model": job.model,
            "system_fingerprint": job.fingerprint,
        }

    def chunk(self, delta: Delta) -> bytes:
        """The event of a delta; empty if there is nothing to send."""
        job = self.job
        choice = delta.choice
        progress = self.progress(delta)
        events = event({**self.head(), "choices": [], **progress}) if progress else b""
        if delta.num_prefilled is not None or delta.is_empty:
            return events
        shown = {"index": choice.index, **self.chunk_choice(delta), "finish_reason": None}
        chunk = {**self.head(), "choices": [shown]}
        if job.body.return_token_ids:
            shown["token_ids"] = delta.token_ids
        if delta.finished:
            shown |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            chunk |= self._reports(choice)
            if job.body.return_token_ids:
                shown["prompt_token_ids"] = choice.prompt.token_ids
        if self._options.include_usage:
            continuous = self._options.continuous_usage_stats
            chunk["usage"] = usage(job, self.choices) if continuous else None
        return events + event(chunk)

    @property
    def _options(self) -> StreamOptions:
        return self.job.body.stream_options or StreamOptions()

    def headers(self) -> dict[str, str]:
        """Headers with the request's id, and with its fields that have no effect."""
        return {"x-request-id": self.job.id, **ignored(self.job.unread)}

    def failure(self, problem: bytes) -> bytes:
        """The end of a stream that failed; `problem` is the error's body outside of streams."""
        return b"data: " + problem + b"\n\n" + DONE

    def end(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        return event({**self.head(), "choices": [], "usage": usage(self.job, self.choices)}) + DONE

    def body(self) -> dict[str, Any]:
        """The complete reply, once all answers have finished."""
        choices = []
        for index, choice in enumerate(self.listed()):
            shown = {**self.body_choice(choice), "index": index}
            shown |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            if self.job.body.return_token_ids:
                shown["token_ids"] = choice.token_ids
                shown["prompt_token_ids"] = choice.prompt.token_ids
            if len(self.choices) > 1:
                shown |= self._reports(choice)
            choices.append(shown)
        last = max(self.choices, key=lambda choice: choice.record.timeline.end)
        return {
            **self.head(),
            "object": self.body_object,
            "choices": choices,
            "usage": usage(self.job, self.choices),
            **self._reports(last),
        }

    def listed(self) -> Sequence[Choice]:
        """The answers in the complete reply, in order."""
        return self.choices

    def token_text(self, token_id: int) -> str:
        """A token as log probabilities name it."""
        if self.job.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], skip_special_tokens=False, continuation=True)

    def _reports(self, choice: Choice) -> dict[str, Any]:
        """The timings of an answer, and its number of accepted draft tokens."""
        facts = self._service.facts
        level = self._service.config.per_request_spec_decode_metrics
        choice.timings = timings(choice, facts.shape if facts else None)
        return {
            "timings": choice.timings,
            **spec_decode_metrics(choice.record.counts, level),
        }

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def body_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def progress(self, delta: Delta) -> dict[str, Any]:
        """The progress of the prompt as in llama.cpp, if the client requests it.

        The additional field `eta_ms` estimates the time until the whole prompt is computed; None if
        the engine's step times are unknown.
        """
        choice = delta.choice
        if not self.job.body.return_progress or choice.index in self._prefilled:
            return {}
        total = processed = len(choice.prompt.token_ids)
        # The step that computed the prompt's end also made the first token.
        if delta.num_prefilled is None:
            self._prefilled.add(choice.index)
        else:
            processed = delta.num_prefilled
        cached = choice.record.counts.num_cached_tokens
        now = choice.stream.last_update
        begun = choice.stream.prefill_began
        costs = self._service.cost_model()
        eta = 0.0 if processed == total else None
        if eta is None and costs is not None and begun is not None:
            eta = seconds_left(costs, cached, processed, total, now - begun)
        progress = {
            "index": choice.index,
            "total": total,
            "cache": cached,
            "processed": processed,
            "time_ms": round(1e3 * (now - choice.prompt.arrival), 3),
            "eta_ms": None if eta is None else round(1e3 * eta, 3),
        }
        return {"prompt_progress": progress}


class ChatReplies(Replies):
    """Replies of /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def body(self) -> dict[str, Any]:
        body = super().body()
        # All answers share the prompt, so its fields are beside them, as in vLLM.
        if self.job.body.return_token_ids:
            body["prompt_token_ids"] = self.job.prompts[0].token_ids
        return body | {"prompt_logprobs": self.choices[0].prompt_logprobs}

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if delta.content or (delta.first and not delta.reasoning):
            message["content"] = delta.content
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            message["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        logprobs = self._logprobs(delta.logprobs)
        return {"delta": message, "logprobs": {"content": logprobs} if logprobs else None}

    def body_choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning and self.job.reader.keep_reasoning:
            message["reasoning_content"] = choice.reasoning
        calls = choice.tool_calls
        if calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [call_of(call.id, call.name, call.arguments) for call in calls]
        asked = self.job.params.logprobs is not None
        logprobs = {"content": self._logprobs(choice.logprobs)} if asked else None
        return {"message": message, "logprobs": logprobs}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [self._logprob(entry) for entry in entries]

    def _logprob(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.token_text(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }


class CompletionReplies(Replies):
    """Replies of /v1/completions."""

    chunk_object = body_object = "text_completion"

    def __init__(self, *known: Any) -> None:
        """`known` as in `Replies`."""
        super().__init__(*known)
        # Number of tokens with log probabilities that were sent, by answer.
        self._num_sent: Counter[int] = Counter()
        # Number of characters of echoed prompts, by answer.
        self._prompt_lengths: dict[int, int] = {}

    def listed(self) -> Sequence[Choice]:
        """The answers per prompt with the highest log probability per token, as in OpenAI's API."""
        n = self.job.n
        num_listed = self.job.body.n or 1
        if num_listed == n:
            return self.choices
        groups = [self.choices[first : first + n] for first in range(0, len(self.choices), n)]
        return [choice for group in groups for choice in sorted(group, key=_surprise)[:num_listed]]

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        index = delta.choice.index
        num_sent = self._num_sent[index]
        logprobs = self._columns(delta.choice, delta.logprobs, num_sent, begins=delta.first)
        self._num_sent[index] += len(delta.logprobs)
        return {
            "text": delta.content,
            "logprobs": logprobs if logprobs and logprobs["tokens"] else None,
        }

    def body_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "text": choice.content,
            "logprobs": self._columns(choice, choice.logprobs, num_sent=0, begins=True),
            "prompt_logprobs": choice.prompt_logprobs,
        }

    def _columns(
        self, choice: Choice, entries: Sequence[TokenLogprobs], num_sent: int, begins: bool
    ) -> dict[str, list[Any]] | None:
        """Log probabilities of the tokens after `num_sent`, in OpenAI's shape.

        `begins`: whether an echoed prompt's log probabilities come first.
        """
        body = self.job.body
        if not isinstance(body, CompletionRequest) or body.logprobs is None:
            return None
        columns: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }

        def add(token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
            columns["tokens"].append(self.token_text(token_id))
            columns["token_logprobs"].append(entry and max(entry.logprob, LOWEST_LOGPROB))
            columns["top_logprobs"].append(entry and self._top(entry))
            columns["text_offset"].append(offset)

        transcript = choice.stream.transcript
        if begins:
            length = 0
            text = Detokenizer(self.tokenizer)
            prompt = choice.prompt.token_ids if self.job.echo else []
            # The first token of a text has no log probability.
            known = [None, *transcript.prompt_logprobs]
            for token_id, prompt_entry in zip(prompt, known, strict=False):
                add(token_id, prompt_entry, length)
                length += len(text.append(token_id))
            self._prompt_lengths[choice.index] = length
        ends = transcript.text_ends
        starts = ends[num_sent - 1 :] if num_sent else [0, *ends]
        for entry, start in zip(entries, starts, strict=False):
            add(entry.token_id, entry, self._prompt_lengths[choice.index] + start)
        return columns

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        most = self.job.params.logprobs or 0
        for token_id, logprob in [(entry.token_id, entry.logprob), *entry.top[:most]]:
            text = self.token_text(token_id)  # Incomplete characters all have the same text.
            top[text] = max(logprob, top.get(text, LOWEST_LOGPROB))
        return top


def _surprise(choice: Choice) -> float:
    """Negative log probability per token of an answer, in nats."""
    return -sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **call_of(call.id, call.name or "", call.arguments)}
