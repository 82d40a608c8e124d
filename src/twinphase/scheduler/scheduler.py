"""Decides which tokens the next step computes, and commits the tokens that it produced.

Its decisions depend only on its state, the cost model and its calls: no thread, no I/O, no clock,
no arrays. A log of the calls therefore replays to the same decisions (`engine/trace.py`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput, StepWork
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.cache.state_cache import StateCache
from twinphase.config import EngineConfig
from twinphase.errors import CacheCapacityError, InvalidRequestError
from twinphase.outcome import FinishReason, RequestStatus
from twinphase.request import STATE_LOG_ROWS, Request
from twinphase.scheduler.chunk import ChunkBudget, StepCost
from twinphase.scheduler.decode import fit_drafts, schedule_decodes, with_drafts
from twinphase.scheduler.fairness import FairQueue, work_by_tenant
from twinphase.scheduler.pace import DECODE_CONTEXT_TOKENS, Pace
from twinphase.scheduler.phase import give_tokens, phase_of
from twinphase.scheduler.policy import policy_key
from twinphase.scheduler.prefill import schedule_prefills, worth_waiting_for

# Expected length of an answer before any has finished.
INITIAL_OUTPUT_TOKENS = 128.0
# Share of step time that recomputing after fairness preemptions may take.
MAX_RECOMPUTE_SHARE = 0.03
# Longest wait of a tenant for a first seat, where there is no SLO.
FIRST_SEAT_WAIT_SECONDS = 0.05
# Resources that a waiting request gets only when another request gives them up.
SCARCE = ("seats", "states", "blocks")
# Weight of each finished answer in the mean output length.
OUTPUT_LEARNING_RATE = 0.1


class Scheduler:
    """Waiting and running requests, and the KV cache's bookkeeping.

    Attributes:
        config: the engine's configuration.
        kv_cache: the blocks.
        fair: requests without blocks, new or preempted, by tenant, and the order of tenants.
        running: requests that hold blocks; during a step, in the order of `fair`.
        pace: the gap between tokens that chunks leave to running requests.
        max_prefill_tokens: cap on the prefill tokens of a step; None is only the token budget.
        seconds: predicted seconds of all steps so far, which are the scheduler's clock.
        step_work: predicted seconds of the last step by tenant.
        num_preemptions: number of preemptions so far.
        num_recomputed_tokens: number of tokens computed again after a preemption so far.
        usual_output: moving average of the tokens per finished answer.
    """

    def __init__(
        self,
        config: EngineConfig,
        times: StepCost,
        *,
        eos_token_ids: Collection[int] = (),
        fingerprint: str = "",
        explains_misses: bool = True,
    ) -> None:
        """Start without requests.

        Args:
            config: the resolved configuration.
            times: predicts step times, for the SLO.
            eos_token_ids: tokens that end an answer.
            fingerprint: identifies the model and the KV format.
            explains_misses: whether requests learn why the prefix cache missed.
        """
        if config.max_model_len is None or config.num_kv_blocks is None:
            raise ValueError("the configuration is not resolved")
        self.config = config
        self.kv_cache = KVCacheManager(
            config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            fingerprint=fingerprint.encode(),
            states=StateCache(config.num_state_slots, config.state_interval or config.block_size)
            if config.num_state_slots
            else None,
            explains_misses=explains_misses,
        )
        self.max_model_len = config.max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pace = Pace(config.slo_seconds)
        self.max_prefill_tokens: int | None = None
        self.fair = FairQueue(policy_key(config.scheduling_policy))
        self.running: list[Request] = []
        self.num_preemptions = self.num_recomputed_tokens = 0
        self.seconds = 0.0
        self.step_work = dict[str, float]()
        self._times = times
        self._key = self.fair.key
        self._seat_wanted_since: float | None = None
        self._wanted = ""  # What the first waiting request lacked in the last step, or nothing.
        self._next_seat_taken = 0.0  # The earliest time, by `seconds`.
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self.usual_output = INITIAL_OUTPUT_TOKENS

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that fit in a step with one decode, under the present pace and limits."""
        decode = StepWork.of_decodes(1, DECODE_CONTEXT_TOKENS, self._times.window)
        most = max(1, self.config.max_num_batched_tokens - 1)
        most = min(most, self.max_prefill_tokens or most)
        budget = ChunkBudget(most, decode, self._times, self.pace, self.kv_cache.block_size)
        return budget.take(0, max(most, self.max_model_len))

    @property
    def takes_drafts(self) -> bool:
        """Whether the next step should verify drafts: not while the pace limits prefill.

        In such a step a drafted row takes the place of a prompt token, and costs as much; beside
        decodes alone it costs little, since the step waits for the weights.
        """
        if self.pace.slo_seconds is None:
            return True
        is_next = bool(self.fair.lines) and self._wanted not in SCARCE
        return not is_next and all(phase_of(one) is Phase.DECODE for one in self.running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CacheCapacityError: the request would not fit even if the KV cache were empty.
            InvalidRequestError: the id is in use, or a priority is given where the policy has none.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"Request id {request.request_id!r} is in use.",
                "Use another, or wait until that request has finished.",
            )
        if request.priority and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"Request {request.request_id} has priority {request.priority}, but "
                "scheduling_policy is "
                f"{self.config.scheduling_policy!r}.",
                "Start the engine with scheduling_policy='priority', or leave the priority at 0.",
            )
        # The last sampled token is never computed, so it needs no room.
        needed = self.kv_cache.blocks_for(self.max_tokens_total(request) - 1)
        blocks = self.kv_cache.pool.num_blocks
        if needed > blocks or self.kv_cache.blocks_for(len(request.prompt_token_ids)) > blocks:
            raise CacheCapacityError(
                f"Request {request.request_id} needs up to "
                f"{max(needed, self.kv_cache.blocks_for(request.num_tokens))} "
                f"KV cache blocks of {self.kv_cache.block_size} tokens; the whole cache has "
                f"{blocks}.",
                "Raise num_kv_blocks, shorten the prompt, or lower max_tokens.",
            )
        request.order = self._num_added
        self._num_added = self._num_added + 1
        self._requests[request.request_id] = request
        self.fair.add(request)
        # Other requests that use the evicted blocks must recompute them too.
        if request.fresh:
            wrong = self.kv_cache.forget(request)
            for other in [other for other in self.running if not wrong.isdisjoint(other.block_ids)]:
                self._preempt(other)

    def schedule(self, drafts: Mapping[str, Sequence[int]] = MappingProxyType({})) -> Batch:
        """The next step's work: decodes, then prefill chunks of running and admitted requests.

        `drafts` are guesses of the next tokens, by request. A request that does
        not decode in this step gets none of its own verified; for the others see
        `scheduler/decode.py`.
        """
        preempted: list[str] = []

        def preempt(request: Request) -> None:
            self._preempt(request)
            preempted.append(request.request_id)

        self.fair.begin_step(self.running)
        if self.fair.is_shared:
            self.running.sort(key=self._key)
            self._make_room(preempt)
        seats_taken = len(preempted)
        decodes = schedule_decodes(self.running, self.kv_cache, preempt)
        tokens = max(0, self.config.max_num_batched_tokens - len(decodes))
        # Requests that decode for the first time must not lengthen the gap of the others.
        earlier = [one for one in decodes if one.num_computed_tokens > len(one.prompt_token_ids)]
        usual = Batch(earlier or decodes, [], window=self._times.window).decode_work
        if drafts:  # Drafts take at most half of the rest, so that prompts make progress.
            decodes = with_drafts(decodes, drafts, tokens // 2, self._longest_draft)
            tokens -= sum(share.num_drafts for share in decodes)
        budget = ChunkBudget(
            tokens if self.max_prefill_tokens is None else min(tokens, self.max_prefill_tokens),
            Batch(decodes, [], window=self._times.window).decode_work,
            self._times,
            self.pace,
            self.kv_cache.block_size,
            self.fair.has_several,
            usual=usual,
        )
        prefills: list[ScheduledRequest] = []
        computing: set[bytes] = set()
        held_back = "blocks" if len(preempted) > seats_taken else ""

        def let_in(before: Request | None = None) -> None:
            nonlocal held_back
            while not held_back and (first := self.fair.first()) is not None:
                if before is not None and self._key(before) < self._key(first):
                    return
                held_back = self._admit(first, decodes, prefills, budget, computing)

        schedule_prefills(self.running, self.kv_cache, budget, prefills, let_in, computing)
        let_in()
        fit_drafts(decodes, self.get, self.kv_cache)
        self._note_wait(held_back)
        if not self.fair.lines:
            held_back = ""
        return Batch(decodes, prefills, tuple(preempted), held_back or None, self._times.window)

    def commit(self, batch: Batch, output: StepOutput) -> list[Request]:
        """Advance the batch's requests by what was computed; returns those that finished.

        A request that should have sampled but has no tokens in `output` could not be sampled; it
        finishes with `FinishReason.ERROR`. Requests that were aborted since `schedule` are passed
        over.
        """
        finished = []
        self._charge(batch)
        for share in batch.scheduled:
            request = self._requests.get(share.request_id)
            if request is None:
                continue
            before = request.num_computed_tokens
            reason = (
                self._append(request, output.token_ids.get(share.request_id, []))
                if share.samples
                else None
            )
            # Rows after the first wrong draft computed tokens that are not the request's.
            accepted = output.num_accepted(share)
            wrong = share.num_drafts - accepted
            request.num_computed_tokens += len(share.token_ids) - wrong
            if share.num_drafts:
                request.counts.num_draft_tokens += share.num_drafts
                request.counts.num_accepted_draft_tokens += accepted
                request.counts.draft_steps.append((share.num_drafts, accepted))
            if request.counts.num_preemptions:
                again = max(
                    0, min(request.num_computed_tokens, request.most_computed_tokens) - before
                )
                request.counts.num_recomputed_tokens += again
                self.num_recomputed_tokens += again
            # A failed request's blocks may be incomplete.
            if share.request_id not in output.errors:
                self.kv_cache.keep_computed(request, before, accepted, logged=share.logs_state)
            if wrong:
                self.kv_cache.give_back(request)
            if share.request_id in output.errors:
                reason = FinishReason.ERROR
                request.counts.error = output.errors[share.request_id]
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
        return finished

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request now, between steps; ignore unknown and finished ones."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def max_tokens_total(self, request: Request) -> int:
        """Prompt plus output tokens it may have; by default what context and cache can hold."""
        max_tokens = request.sampling_params.max_tokens
        if max_tokens is not None:
            return min(len(request.prompt_token_ids) + max_tokens, self.max_model_len)
        return min(self.max_model_len, self.kv_cache.pool.num_blocks * self.kv_cache.block_size + 1)

    def _longest_draft(self, share: ScheduledRequest) -> int:
        """Drafted tokens that a request could still use: its last token is sampled after them."""
        request = self._requests[share.request_id]
        longest = self.max_tokens_total(request) - request.num_tokens - 1
        return longest if request.state is None else min(longest, STATE_LOG_ROWS)

    def check_integrity(self) -> None:
        """Prove that no block is lost and that lists and statuses agree (AssertionError if not)."""
        self.kv_cache.check_integrity(self._requests.values())
        lines = self.fair.lines
        for tenant in {request.tenant for request in self._requests.values()}:
            own = [request for request in self.running if request.tenant == tenant]
            if any(ones != sorted(ones, key=self._key) for ones in (own, lines.get(tenant, []))):
                raise AssertionError("requests are out of order")
            if self.fair.seats[tenant] != len(own):
                raise AssertionError("a seat is lost")
        waiting = self.fair.waiting
        if sorted(r.request_id for r in (*waiting, *self.running)) != sorted(self._requests):
            raise AssertionError("a request is lost")
        if any(r.block_ids or r.num_computed_tokens for r in waiting):
            raise AssertionError("a waiting request holds blocks")

    def _admit(
        self,
        request: Request,
        decodes: list[ScheduledRequest],
        prefills: list[ScheduledRequest],
        budget: ChunkBudget,
        computing: set[bytes],
    ) -> str:
        """Admit a waiting request with its first tokens; returns "", or the resource it lacks."""
        if len(self.running) >= self.config.max_num_seqs:
            return "seats"
        if budget.num_tokens == 0:
            return "budget"
        prefix = self.kv_cache.find_prefix(request)
        needed = self.kv_cache.free_blocks_needed(request, request.num_tokens, prefix)
        if self.running and needed + self._growth(request) > self.kv_cache.pool.num_available:
            return "blocks"
        if not self.kv_cache.has_state_slots(prefix):
            return "states"
        computed = len(prefix) * self.kv_cache.block_size
        if worth_waiting_for(request, computed, self.kv_cache, computing):
            return "prefix"
        chunk = budget.take(computed, request.num_tokens - computed, scored=request.scores_prompt)
        if not chunk:
            return "budget"
        self.kv_cache.start(request, prefix)
        self.kv_cache.plan_snapshots(request, chunk)
        computing.update(self.kv_cache.blocks_of_chunk(request, chunk))
        self.fair.remove(request)
        self.fair.seats[request.tenant] += 1
        insort(self.running, request, key=self._key)
        request.status = RequestStatus.RUNNING
        share = give_tokens(request, chunk)
        # A preempted request that finds all but its last token cached decodes at once.
        (decodes if share.phase is Phase.DECODE else prefills).append(share)
        return ""

    def _growth(self, request: Request) -> int:
        """Blocks that `request` and those running are expected to take before they finish.

        Answers are expected to be as long as recent ones, and to grow by a block at least. Without
        room to grow, an admitted request would preempt another, or be the first preempted.
        """
        total = 0
        for grower in (*self.running, request):
            expected = round(self.usual_output) - len(grower.output_token_ids)
            more = min(
                max(expected, self.kv_cache.block_size),
                self.max_tokens_total(grower) - grower.num_tokens,
            )
            held = len(grower.block_ids) or self.kv_cache.blocks_for(grower.num_tokens)
            total += max(0, self.kv_cache.blocks_for(grower.num_tokens + more) - held)
        return total

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it queues at its old place and recomputes its tokens."""
        request.most_computed_tokens = max(
            request.most_computed_tokens, request.num_computed_tokens
        )
        request.counts.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(request)
        self.fair.seats[request.tenant] -= 1
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        self.fair.add(request)

    def _note_wait(self, held_back: str) -> None:
        """Record since when a tenant without a running request has waited for one of SCARCE."""
        first = self.fair.first() if self.fair.is_shared and held_back in SCARCE else None
        self._wanted = held_back
        if first is None or self.fair.seats[first.tenant]:
            self._seat_wanted_since = None
        elif self._seat_wanted_since is None:
            self._seat_wanted_since = self.seconds

    def _make_room(self, preempt: Callable[[Request], None]) -> None:
        """If a tenant has waited too long for its first seat, take one from the largest holder.

        It goes to the tenant's newest request, if the tenant holds more than its share and keeps
        one. This is limited to a small share of the time spent on recomputing the lost tokens.
        """
        since = self._seat_wanted_since
        if since is None or self.seconds < max(
            since + (self.pace.slo_seconds or FIRST_SEAT_WAIT_SECONDS), self._next_seat_taken
        ):
            return
        excess = {
            request.tenant: self.fair.excess(request.tenant, len(self.running))
            for request in self.running
        }
        most = max(excess, key=lambda tenant: excess[tenant], default="")
        if excess.get(most, 0.0) > 0:
            victim = [request for request in self.running if request.tenant == most][-1]
            lost = victim.num_computed_tokens
            if self._wanted != "blocks":
                lost = self.kv_cache.lost_tokens(victim)  # The other tokens are found in the cache.
            again = self._times.seconds(StepWork.of_chunk(0, lost, False, self._times.window))
            self._next_seat_taken = self.seconds + again / MAX_RECOMPUTE_SHARE
            preempt(victim)

    def _charge(self, batch: Batch) -> None:
        self.step_work = work_by_tenant(batch, self._times)
        self.seconds += self._times.seconds(batch.work)
        for tenant, seconds in self.step_work.items():
            self.fair.charge(tenant, seconds)

    def _append(self, request: Request, token_ids: list[int]) -> FinishReason | None:
        """Append sampled tokens up to the one that ends the request; returns the finish reason."""
        if not token_ids:
            return FinishReason.ERROR
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            request.counts.num_output_tokens = len(request.output_token_ids)
            if request.sampling_params.ends_at(
                token_id, len(request.output_token_ids), self.eos_token_ids
            ):
                return FinishReason.STOP
            if request.num_tokens >= self.max_tokens_total(request):
                return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.fair.seats[request.tenant] -= 1
        else:
            self.fair.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.usual_output += OUTPUT_LEARNING_RATE * (
                len(request.output_token_ids) - self.usual_output
            )
        self.kv_cache.free(request)
