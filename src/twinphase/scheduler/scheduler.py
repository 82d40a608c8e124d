"""Which tokens the next step computes, and what follows from the tokens it produced.

A pure function of its state: no thread, no I/O, no clock, no arrays. First come, first served. A request is admitted
only when the KV blocks of its whole life are sure to be there, so that nothing running ever has to be preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from twinphase.batch import Batch, StepOutput
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.errors import CacheFullError
from twinphase.request import FinishReason, Request, RequestStatus
from twinphase.scheduler.decode import schedule_decodes
from twinphase.scheduler.prefill import schedule_prefills

__all__ = ["Scheduler"]


class Scheduler:
    """Waiting and running requests, and the KV cache's bookkeeping."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Collection[int],
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
    ) -> None:
        """Start without requests.

        Args:
            kv_cache: the blocks to give out; owned by this scheduler from now on.
            max_model_len: prompt and output tokens a request may have together.
            eos_token_ids: tokens that end a sequence.
            max_num_batched_tokens: token budget of a step.
            max_num_seqs: requests running at once.
        """
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._keeps_kv: set[str] = set()  # unfinished requests whose KV the next turn may want
        self._kept: Request | None = None  # the finished request whose blocks are still held for that

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._requests)

    def add(self, request: Request, *, keep_kv: bool = False) -> None:
        """Queue a request.

        Args:
            request: new, with an id that is not in use.
            keep_kv: the request is a turn of a conversation: it takes over what it can of the KV that the last such
                request left, and leaves its own when it finishes. At most one finished request's KV is kept, and only
                until someone needs the blocks.

        Raises:
            CacheFullError: the request would not fit even if the KV cache were empty.
            ValueError: the id is in use.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        needed, pool = self._lifetime_blocks(request), self.kv_cache.pool
        if needed > pool.num_blocks:
            raise CacheFullError(
                f"Request {request.request_id} needs up to {needed} KV cache blocks of {self.kv_cache.block_size} "
                f"tokens; the cache has {pool.num_blocks}.",
                "Raise num_kv_blocks, shorten the prompt, or lower max_tokens.",
            )
        self._requests[request.request_id] = request
        if keep_kv:
            self._keeps_kv.add(request.request_id)
        self.waiting.append(request)

    def schedule(self) -> Batch:
        """The next step's work: decodes first, then prefill chunks up to the token budget."""
        self._admit()
        decodes = schedule_decodes(self.running, self.kv_cache, self.max_num_batched_tokens)
        prefills = schedule_prefills(self.running, self.kv_cache, self.max_num_batched_tokens - len(decodes))
        return Batch(decodes, prefills)

    def commit(self, batch: Batch, output: StepOutput) -> list[Request]:
        """Advance the batch's requests by what was computed; returns those that finished.

        A request that should have sampled but has no tokens in `output` could not be sampled; it finishes with
        `FinishReason.ERROR`. Requests that were aborted since `schedule` are passed over.
        """
        finished = []
        for share in batch.scheduled:
            request = self._requests.get(share.request_id)
            if request is None:
                continue
            request.num_computed_tokens += share.num_scheduled_tokens
            if not share.samples:
                continue
            reason = self._append(request, output.token_ids.get(share.request_id, []))
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
        return finished

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request now, between steps; one that has finished already, or was never there, is left alone."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def abort(self, request_id: str) -> None:
        """End a request at its user's wish."""
        self.finish(request_id, FinishReason.ABORT)

    def check_integrity(self) -> None:
        """Prove that every KV block is free or has exactly one owner (AssertionError otherwise)."""
        self.kv_cache.check_integrity([*self.waiting, *self.running, *([self._kept] if self._kept else [])])

    def _lifetime_blocks(self, request: Request) -> int:
        """Blocks for the longest this request can become; the last sampled token is never computed."""
        return self.kv_cache.blocks_for(self._max_tokens_total(request) - 1)

    def _max_tokens_total(self, request: Request) -> int:
        max_tokens = request.sampling_params.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(len(request.prompt_token_ids) + max_tokens, self.max_model_len)

    def _admit(self) -> None:
        """Move waiting requests to running while seats and blocks last, strictly in order of arrival."""
        reserved = sum(self._lifetime_blocks(r) - len(r.block_ids) for r in self.running)
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            held = len(self._kept.block_ids) if self._kept else 0
            needed = self._lifetime_blocks(request)
            available = self.kv_cache.pool.num_free - reserved
            if needed > available + held:
                return
            if self._kept and request.request_id in self._keeps_kv:
                self.kv_cache.hand_over(self._kept, request)
                self._kept = None
            elif needed > available:
                self._drop_kept()
            reserved += needed - len(request.block_ids)
            self.running.append(self.waiting.popleft())
            request.status = RequestStatus.RUNNING

    def _append(self, request: Request, token_ids: list[int]) -> FinishReason | None:
        """Append sampled tokens up to the one that ends the request; returns why it ended, if it did."""
        if not token_ids:
            return FinishReason.ERROR
        params = request.sampling_params
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            if len(request.output_token_ids) >= params.min_tokens and (
                (token_id in self.eos_token_ids and not params.ignore_eos) or token_id in (params.stop_token_ids or ())
            ):
                return FinishReason.STOP
            if request.num_tokens >= self._max_tokens_total(request):
                return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        del self._requests[request.request_id]
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        keeps = request.request_id in self._keeps_kv
        self._keeps_kv.discard(request.request_id)
        if keeps and reason is not FinishReason.ERROR and request.block_ids:
            self._drop_kept()
            self._kept = request
        else:
            self.kv_cache.free(request)

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self.kv_cache.free(self._kept)
            self._kept = None
