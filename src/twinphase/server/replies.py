"""Replies in OpenAI's shapes, streamed and whole, both made of the same deltas; usage and timings with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from twinphase.batch import TokenLogprobs
from twinphase.phases.work import ModelShape
from twinphase.server.answers import Choice, Delta
from twinphase.server.jobs import Job
from twinphase.server.observe import spec_decode_metrics, timings
from twinphase.server.tool_calls import ToolCallDelta
from twinphase.tokenizer.detokenizer import Detokenizer
from twinphase.tokenizer.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # as vLLM: JSON has no infinity
encode = msgspec.json.Encoder().encode  # to JSON


def event(data: Any) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def usage(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of a reply; each prompt counts once, however many answers it has."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    counts = [choice.stream.transcript.counts for choice in choices]
    cached = sum(choice.stream.transcript.counts.num_cached_tokens for choice in choices[:: job.n])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": sum(one.num_accepted_prediction_tokens for one in counts),
            "rejected_prediction_tokens": sum(one.num_rejected_prediction_tokens for one in counts),
        },
    }


def ignored(fields: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """The header that names fields of a request which change nothing here."""
    return [(b"x-ignored-fields", ", ".join(fields).encode())] if fields else []


class Replies:
    """What chats and completions have in common; `chunk_object` and `body_object` are OpenAI's words for the reply.

    Other dialects override `chunk`, `end`, `body` and `failure`.
    """

    chunk_object = body_object = ""
    stream_type = b"text/event-stream; charset=utf-8"

    def __init__(
        self,
        job: Job,
        choices: Sequence[Choice],
        shape: ModelShape | None = None,
        spec_metrics: str = "none",
    ) -> None:
        """`shape` is the model's, for the report of prompt parts; `spec_metrics` as in `ServerConfig`."""
        self.job = job
        self.choices = choices
        self._shape = shape
        self._spec_metrics = spec_metrics
        self.tokenizer = choices[0].stream.transcript.tokenizer
        self._head = self.head()
        self._read: set[int] = set()  # answers whose prompt was told to be read
        self._plain = encode(self._head)[
            :-1
        ]  # of a chunk that brings nothing but text, the most common kind

    def head(self) -> dict[str, Any]:
        """What every part of the reply begins with."""
        job = self.job
        kind = self.chunk_object
        told = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        return {**told, "system_fingerprint": job.fingerprint}

    def chunk(self, delta: Delta) -> bytes:
        """The event of a delta; empty for one that brings nothing."""
        if self.job.return_progress and delta.choice.index not in self._read:
            return self._progress(delta) + self._chunk(delta)
        return self._chunk(delta)

    def _chunk(self, delta: Delta) -> bytes:
        if delta.num_prefilled is not None or delta.is_empty:
            return b""
        choice = self.chunk_choice(delta)
        if self.job.return_token_ids:
            choice["token_ids"] = delta.token_ids
        extra: dict[str, Any] = {"choices": [choice]}
        if delta.finished:
            choice["stop_reason"] = delta.choice.stop_reason
            extra |= self._told(delta.choice)
            if self.job.return_token_ids:
                choice["prompt_token_ids"] = self.job.prompt_of(delta.choice.index).token_ids
        if self.job.include_usage:
            extra["usage"] = usage(self.job, self.choices) if self.job.continuous_usage else None
        return b"data: " + self._plain + b"," + encode(extra)[1:] + b"\n\n"

    def names(self) -> list[tuple[bytes, bytes]]:
        """Headers that name the request, and what of it was not read."""
        return [(b"x-request-id", self.job.id.encode()), *ignored(self.job.unread)]

    def failure(self, problem: bytes) -> bytes:
        """The end of a stream that failed; `problem` is the body that the error would have had."""
        return b"data: " + problem + b"\n\n" + DONE

    def end(self) -> bytes:
        if not self.job.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage(self.job, self.choices)}) + DONE

    def body(self) -> dict[str, Any]:
        """The whole reply, when all answers have finished."""
        choices = []
        for index, choice in enumerate(self.shown()):
            shown = {**self.body_choice(choice), "index": index}
            shown["stop_reason"] = choice.stop_reason
            if self.job.return_token_ids:
                shown["token_ids"] = choice.token_ids
                shown["prompt_token_ids"] = self.job.prompt_of(choice.index).token_ids
            if len(self.choices) > 1:
                shown |= self._told(choice)
            choices.append(shown)
        last = max(self.choices, key=lambda choice: choice.stream.transcript.timeline.end)
        return {
            **self._head,
            "object": self.body_object,
            "choices": choices,
            "usage": usage(self.job, self.choices),
            **self._told(last),
        }

    def shown(self) -> Sequence[Choice]:
        """The answers that are told, in their order."""
        return self.choices

    def token_text(self, token_id: int) -> str:
        """A token as log probabilities name it."""
        return (
            f"token_id:{token_id}"
            if self.job.return_tokens_as_token_ids
            else _token_text(self.tokenizer, token_id)
        )

    def _told(self, choice: Choice) -> dict[str, Any]:
        """Where the time of an answer went, and what became of its drafted tokens."""
        counts = choice.stream.transcript.counts
        return {
            "timings": timings(choice, self._shape),
            **spec_decode_metrics(counts, self._spec_metrics),
        }

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def body_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _progress(self, delta: Delta) -> bytes:
        choice = delta.choice
        processed = delta.num_prefilled
        prompt = self.job.prompt_of(choice.index)
        transcript = choice.stream.transcript
        if processed is None:  # the step that read the prompt's end brought the first token
            self._read.add(choice.index)
            processed = len(prompt.token_ids)
        progress = {
            "total": len(prompt.token_ids),
            "cache": transcript.counts.num_cached_tokens,
            "processed": processed,
            "time_ms": round(1e3 * (choice.stream.last_update - prompt.arrival), 3),
        }
        return event(
            {**self._head, "choices": [], "prompt_progress": {"index": choice.index, **progress}}
        )


class ChatReplies(Replies):
    """Replies of /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def body(self) -> dict[str, Any]:
        """See `Replies`; log probabilities of the prompt, which all answers share, stand beside them, as vLLM's do."""
        prompt = (
            {"prompt_token_ids": self.job.prompts[0].token_ids} if self.job.return_token_ids else {}
        )
        return super().body() | {"prompt_logprobs": self.choices[0].prompt_logprobs, **prompt}

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if delta.content or (delta.first and not delta.reasoning):
            message["content"] = delta.content
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            message["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        choice: dict[str, Any] = {"index": delta.choice.index, "delta": message, "logprobs": None}
        if delta.logprobs:
            choice["logprobs"] = {"content": [self._logprob(entry) for entry in delta.logprobs]}
        choice["finish_reason"] = delta.choice.finish_reason if delta.finished else None
        return choice

    def body_choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning and self.job.reader.keep_reasoning:
            message["reasoning_content"] = choice.reasoning
        calls = choice.tool_calls
        if calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        asked = self.job.params.logprobs is not None
        logprobs = (
            {"content": [self._logprob(entry) for entry in choice.logprobs]} if asked else None
        )
        reason = choice.finish_reason
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

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

    def __init__(self, job: Job, choices: Sequence[Choice], *known: Any) -> None:
        """`known` as in `Replies`."""
        super().__init__(job, choices, *known)
        self._told_tokens: dict[int, _ToldTokens] = {}  # by answer
        self._asked = self.job.params.logprobs is not None and not self.job.hides_logprobs

    def shown(self) -> Sequence[Choice]:
        """See `Replies`: of each prompt's answers those with the highest log probability per token, as OpenAI's."""
        job = self.job
        if job.num_shown in (None, job.n):
            return self.choices
        groups = [
            self.choices[first : first + job.n] for first in range(0, len(self.choices), job.n)
        ]
        return [
            choice for group in groups for choice in sorted(group, key=_surprise)[: job.num_shown]
        ]

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        index = delta.choice.index
        logprobs = self._logprobs(delta.choice, delta.logprobs)
        finish_reason = delta.choice.finish_reason if delta.finished else None
        return {
            "index": index,
            "text": delta.content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def body_choice(self, choice: Choice) -> dict[str, Any]:
        self._told_tokens.pop(choice.index, None)
        logprobs = self._logprobs(choice, choice.logprobs) or (
            _ToldTokens.EMPTY if self._asked else None
        )
        reason = choice.finish_reason
        shown = {
            "index": choice.index,
            "text": choice.content,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return shown | {"prompt_logprobs": choice.prompt_logprobs}

    def _logprobs(
        self, choice: Choice, entries: Sequence[TokenLogprobs]
    ) -> dict[str, list[Any]] | None:
        """Those of the next tokens, behind the prompt's where it is echoed; None where there are none."""
        if not self._asked:
            return None
        told = self._told_tokens.get(choice.index)
        first: list[tuple[int, TokenLogprobs | None]] = []
        if told is None:
            told = self._told_tokens[choice.index] = _ToldTokens(
                self.tokenizer, self.job, self.token_text
            )
            if self.job.echo:
                first = [(self.job.prompt_of(choice.index).token_ids[0], None)]
                first += [
                    (entry.token_id, entry) for entry in choice.stream.transcript.prompt_logprobs
                ]
        return told.next([*first, *((entry.token_id, entry) for entry in entries)])


class _ToldTokens:
    """The tokens of one answer whose log probabilities were told, and the characters that they are."""

    EMPTY: ClassVar[dict[str, list[Any]]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }

    def __init__(self, tokenizer: Tokenizer, job: Job, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._most = job.params.logprobs or 0
        self._offset = 0
        self._text = Detokenizer(
            tokenizer, keep_special=job.reader.markers, continuation=not job.echo
        )

    def next(
        self, entries: Sequence[tuple[int, TokenLogprobs | None]]
    ) -> dict[str, list[Any]] | None:
        """The next tokens in OpenAI's shape; nothing is known of the first of a text.

        None without tokens.
        """
        if not entries:
            return None
        shown: dict[str, list[Any]] = {name: [] for name in self.EMPTY}
        for token_id, entry in entries:
            shown["tokens"].append(self._token_text(token_id))
            shown["text_offset"].append(self._offset)
            self._offset += len(self._text.append(token_id))
            shown["token_logprobs"].append(entry and max(entry.logprob, LOWEST_LOGPROB))
            shown["top_logprobs"].append(entry and self._top(entry))
        return shown

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in [(entry.token_id, entry.logprob), *entry.top[: self._most]]:
            text = self._token_text(token_id)  # parts of characters all look alike
            top[text] = max(logprob, top.get(text, LOWEST_LOGPROB))
        return top


def _surprise(choice: Choice) -> float:
    """Nats per token of an answer."""
    return -sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False, continuation=True)


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
