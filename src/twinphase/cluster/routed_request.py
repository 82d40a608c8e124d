"""A request in the router: its record, its worker, and the answer's tokens so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from time import perf_counter
from typing import NamedTuple

from msgspec.structs import replace

from twinphase.batch import TokenLogprobs
from twinphase.cache.prefix_cache import PrefixCache
from twinphase.cluster.fleet import Placement
from twinphase.cluster.timelines import joined
from twinphase.engine.process.messages import Add, EngineFacts, Moved, PushTo, RequestUpdate
from twinphase.errors import TwinphaseError
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord, RequestState
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import Request, RequestCounts, SamplingParams

MAX_CONSECUTIVE_FAILED_WORKERS = 3


class FirstToken(NamedTuple):
    """The first token of an answer, as computed by the prefill worker and sent to the client."""

    worker: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclass
class RoutedRequest:
    """A request and the worker that has it.

    Attributes:
        add: the front end's message.
        record: the request's record; its timeline ends where the present worker's part begins.
        worker: the worker that has the request; in the state TRANSFERRING, the prefill worker.
        decode_worker: the worker that continues after the first token, once it has the KV blocks;
            "" if there is none.
        token_ids: tokens of the answer so far.
        num_prefilled: prompt tokens, as reported to the front end.
        is_accepted: whether the front end was notified that the request is queued.
        end_reason: why the front end ended the request; None if it did not.
        num_tokens_when_sent: length of the answer when the present worker got the request.
        first_token: the prefill worker's first token, until the decode worker has computed it too.
        mismatch: whether the decode worker computed another first token, and is aborting the
            request.
        recompute: whether the decode worker must ignore the received blocks and prefill the prompt
            itself.
        num_failed_workers: number of workers in a row that died before they computed a token of the
            request.
    """

    add: Add
    record: RequestRecord
    placement: Placement | None = None
    worker: str = ""
    decode_worker: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    is_accepted: bool = False
    end_reason: FinishReason | None = None
    num_tokens_when_sent: int = 0
    first_token: FirstToken | None = None
    mismatch: bool = False
    recompute: bool = False
    num_failed_workers: int = 0

    @classmethod
    def of(cls, add: Add) -> RoutedRequest:
        return cls(add, add.record, token_ids=list(add.output_token_ids))

    @property
    def is_transferring(self) -> bool:
        return self.record.state is RequestState.TRANSFERRING

    @property
    def routing_reason(self) -> str:
        return self.placement.decision.reason if self.placement else ""

    def can_split(self, prefill: EngineFacts, decode: EngineFacts) -> bool:
        """Whether one worker can prefill for the other, which uses its blocks or needs none.

        A request that is too long for the decode worker is not split, so that it is refused before
        the client gets a token.
        """
        if self.token_ids:
            return False
        usable = prefill.kv_fingerprint == decode.kv_fingerprint and bool(decode.kv_addresses)
        return self._has_one_token(decode) or (usable and self._fits(decode))

    def _fits(self, decode: EngineFacts) -> bool:
        config = decode.config
        length = len(self.add.prompt_token_ids) + (self.add.sampling_params.max_tokens or 1)
        # The KV of the last token is never computed.
        room = (config.num_kv_blocks or length) * config.block_size
        return length <= (config.max_model_len or length) and length - 1 <= room

    def _has_one_token(self, decode: EngineFacts) -> bool:
        """Whether the answer has at most one token, which the prefill worker computes."""
        room = (decode.config.max_model_len or 0) - len(self.add.prompt_token_ids)
        return room <= 1 or self.add.sampling_params.max_tokens == 1

    def message(self, now: float) -> Add:
        """The message to the worker: continue after the tokens so far, or check the first token."""
        params = self.add.sampling_params
        output = list(self.token_ids)
        if self.first_token is not None:
            output = []
            # Blocks do not store the prompt's log probabilities, so these would need a full
            # prefill.
            params = replace_fields(params, prompt_logprobs=None)
        record = replace_fields(
            self.record,
            counts=RequestCounts(self.record.request_id),
            timeline=RequestTimeline(now),
            state=RequestState.QUEUED,
        )
        return replace(
            self.add,
            record=record,
            sampling_params=params,
            output_token_ids=output,
            recompute=self.recompute,
        )

    def split(self, message: Add, decode_worker: str, decode: EngineFacts) -> Add:
        """The message to the prefill worker: compute one token, and push KV if more follow."""
        if self._has_one_token(decode):
            return message
        self.decode_worker = decode_worker
        params = message.sampling_params
        only_first = replace_fields(
            params, max_tokens=len(self.token_ids) + 1, min_tokens=min(params.min_tokens, 1)
        )
        return replace(message, sampling_params=only_first, push_to=PushTo(decode.kv_addresses))

    def mark_until_now(self, reason: str, kind: IntervalKind = IntervalKind.ROUTE) -> float:
        """Attribute the time since the last interval; return the present time in seconds."""
        now = max(perf_counter(), self.record.timeline.end)
        self.record.timeline.mark(kind, now, reason=reason)
        return now

    def end_transfer(self, result: str) -> float:
        """The transfer to the decode worker has ended; return the present time in seconds."""
        now = self.mark_until_now(f"{self.decode_worker}: {result}", IntervalKind.TRANSFER)
        self.record.move_to(RequestState.QUEUED)
        self.decode_worker = ""
        return now

    def moved(self, blocks: tuple[int, int] | None = None) -> Moved:
        """The report that the request was sent to its worker; `blocks` as in `Moved`."""
        name = self.record.request_id
        return Moved(name, perf_counter(), self.worker, self.routing_reason, blocks=blocks)

    def transfer_began(self) -> Moved:
        moment = self.record.timeline.end
        return Moved(self.record.request_id, moment, self.decode_worker, is_transfer=True)

    def lose_worker(self, worker: str) -> None:
        """Queue the request for another worker, because its worker died."""
        self.decode_worker = ""
        self.mismatch = False
        self.recompute = False
        self.record.move_to(RequestState.QUEUED)
        self.mark_until_now(f"{worker}, which died with {len(self.token_ids)} tokens")
        has_new_token = len(self.token_ids) > self.num_tokens_when_sent
        self.num_failed_workers = 0 if has_new_token else self.num_failed_workers + 1

    def check_retry_limit(self) -> None:
        """Refuse to continue a request that may have caused the deaths of its workers."""
        if self.num_failed_workers >= MAX_CONSECUTIVE_FAILED_WORKERS:
            raise TwinphaseError(
                f"{self.num_failed_workers} workers died one after the other when they had the "
                "request.",
                "Change it: it may be what kills them.",
            )

    def whole_timeline(self, worker: RequestTimeline) -> RequestTimeline:
        """The request's timeline including the present worker's part."""
        return joined(self.record.timeline, worker, perf_counter(), self.routing_reason)

    def check_first_token(self, update: RequestUpdate, *, compare_logprobs: bool) -> bool:
        """Compare the decode worker's first token with the one that the client already has.

        Returns:
            False from a mismatch until the decode worker has aborted the request.
        """
        expected = self.first_token
        if expected is None or self.is_transferring:
            return True
        if update.token_ids and not self.mismatch:
            logprobs = update.logprobs[:1] if compare_logprobs else expected.logprobs
            self.mismatch = (update.token_ids[:1], logprobs) != expected[1:]
        elif update.ended is not None and update.ended.finish_reason is FinishReason.ERROR:
            # The received blocks may be the cause.
            self.mismatch = self.mismatch or not self.recompute
        return not self.mismatch or self.end_reason is not None

    def recompute_message(self, reason: str) -> Add:
        """The decode worker's message after its abort: compute the request without the blocks."""
        self.recompute = True
        self.mismatch = False
        return self.message(self.mark_until_now(reason))

    def take(self, update: RequestUpdate) -> RequestUpdate:
        """Convert a worker's update to the one that a single engine would have sent."""
        if self.first_token is not None and not self.is_transferring and update.token_ids:
            self.first_token = None
            update = replace(update, token_ids=update.token_ids[1:], logprobs=update.logprobs[1:])
        update = self._prefilled(update) or update
        self.token_ids += update.token_ids
        counts = self.record.counts
        counts.num_output_tokens = len(self.token_ids)
        if not self.is_transferring:
            self.record.advance()
        self.num_prefilled = max(self.num_prefilled, update.num_prefilled)
        counts.num_cached_tokens = max(counts.num_cached_tokens, update.num_cached)
        ended = update.ended
        if ended is not None:
            ended.timeline = self.whole_timeline(ended.timeline)
            ended.counts.num_cached_tokens = counts.num_cached_tokens
        return replace(
            update, num_prefilled=self.num_prefilled, num_cached=counts.num_cached_tokens
        )

    def _prefilled(self, update: RequestUpdate) -> RequestUpdate | None:
        """The prefill worker's last update without the end, which the decode worker will report."""
        ended = update.ended
        if not self.decode_worker or self.end_reason is not None or ended is None:
            return None
        if ended.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            return None
        self.record.timeline = self.whole_timeline(ended.timeline)
        self.record.move_to(RequestState.PREFILLING)
        self.record.move_to(RequestState.TRANSFERRING)
        if ended.finish_reason is FinishReason.STOP or not update.token_ids:
            return replace(update, token_ids=[], logprobs=[], ended=None)
        self.first_token = FirstToken(self.worker, update.token_ids[:1], update.logprobs[:1])
        return replace(
            update,
            token_ids=self.first_token.token_ids,
            logprobs=self.first_token.logprobs,
            ended=None,
        )

    def end(self, reason: FinishReason) -> RequestUpdate:
        """The last update of a request that no worker has."""
        self.mark_until_now(self.routing_reason)
        self.record.end(reason)
        counts = self.record.counts
        counts.num_output_tokens = len(self.token_ids)
        return RequestUpdate(
            self.record.request_id,
            [],
            self.num_prefilled,
            counts.num_cached_tokens,
            ended=self.record,
        )


class RequestTable(dict[str, RoutedRequest]):
    """A router's unfinished requests, by id."""

    def at(self, worker: str) -> list[RoutedRequest]:
        """Requests that a worker has, except those that it has prefilled for another worker."""
        return [
            request
            for request in self.values()
            if request.worker == worker and not request.is_transferring
        ]

    def num_per_worker(self) -> Counter[str]:
        """The number of requests of each worker, as `at` counts them."""
        return Counter(one.worker for one in self.values() if not one.is_transferring)


def chain_of(hashes: PrefixCache | None, token_ids: list[int], salt: str | None) -> list[bytes]:
    """Hashes of the full blocks, as every worker's prefix cache has them."""
    if hashes is None:
        return []
    request = Request("", token_ids, SamplingParams(temperature=0.0), 0.0, cache_salt=salt)
    blocks = range(len(token_ids) // hashes.block_size)
    try:
        return [hashes.block_hash(request, index) for index in blocks]
    except OverflowError:  # The engine refuses a token id that is too large.
        return []
