"""The proposer `draft_model`: a smaller model of the same vocabulary writes ahead, one step per token of all requests.

It follows each request as a `Request` of its own, whose output ends with the drafts: so the
engine's bookkeeping of blocks and prefixes serves it as it is, on blocks of its own. What it
computed behind a wrong draft lies beyond `num_computed_tokens`. It draws with the request's own
random numbers of the same positions, so that it agrees more often than a greedy draft would. Not
for loading the model (`engine/loading/drafting.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from types import MappingProxyType

from twinphase.batch import Batch, ScheduledRequest, StepOutput, StepWork
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.phases.cost import CostModel
from twinphase.request import Request
from twinphase.scheduler.chunk import ChunkBudget
from twinphase.scheduler.pace import Pace
from twinphase.scheduler.phase import give_tokens

# tokens to catch up with, for each that the output may still have, from which drafts come too late
# to pay
LATE = 8
FEW_ROWS = (
    4  # of a sequence, up to which attention takes them as decode's; more are a chunk of prefill
)


@dataclass(eq=False)
class _Sequence:
    """A request as the draft model sees it.

    Attributes:
        own: prompt and output of the request, then drafts; its blocks are those of the draft model.
        known: output tokens that are the request's.
        kept: computed tokens whose full blocks can be found by now.
        wanted: drafts to make in this step.
    """

    own: Request
    known: int = 0
    kept: int = 0
    wanted: int = 0

    @property
    def missing(self) -> int:
        """Tokens to compute before the next draft."""
        return self.own.num_tokens - self.own.num_computed_tokens

    @property
    def drafts(self) -> list[int]:
        return self.own.output_token_ids[self.known :]


class DraftModel:
    """A `Drafter` that runs a model."""

    def __init__(
        self,
        execute: Callable[[Batch], StepOutput],
        kv_cache: KVCacheManager,
        times: CostModel,
        *,
        num_speculative_tokens: int,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        eos_token_ids: Iterable[int],
        slo_seconds: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Draft up to `num_speculative_tokens` tokens at a time.

        Args:
            execute: computes a step of the draft model and samples, as the engine's executor does.
            kv_cache: its blocks, from now on this object's.
            times: learns what its steps take.
            num_speculative_tokens: most drafts of a request in a step.
            vocab_size: tokens that it knows; a request with others is not drafted for.
            max_model_len: positions that it was loaded for.
            max_num_batched_tokens: most rows of a step.
            eos_token_ids: tokens that end an output, by the target.
            slo_seconds: longest gap between two tokens as it is now; half of it may go to catching
                up.
            clock: seconds.
        """
        self.kv_cache = kv_cache
        self.times = times
        self.num_speculative_tokens = num_speculative_tokens
        self._execute = execute
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_rows = max_num_batched_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._slo_seconds = slo_seconds
        self._sequences: dict[str, _Sequence] = {}

    def draft(
        self, requests: Sequence[Request], limits: Mapping[str, int] = MappingProxyType({})
    ) -> Mapping[str, Sequence[int]]:
        """See `Drafter`; `limits` are the most drafts of a request, where that is less than usual.

        A request of which much is not computed yet, such as its prompt, is caught up with first, in
        chunks.
        """
        following = [self._follow(request, limits.get(request.request_id)) for request in requests]
        sequences = {one.own.request_id: one for one in following if one is not None}
        batch = self._first_step([*sequences.values()])
        while batch.scheduled:
            start = self._clock()
            output = self._execute(batch)
            self.times.observe(batch.work, self._clock() - start)
            going = [
                sequences[share.request_id]
                for share in batch.scheduled
                if self._take(sequences, share, output)
            ]
            batch = Batch([give_tokens(sequence.own, 1) for sequence in going], [])
        return {name: sequence.drafts for name, sequence in sequences.items() if sequence.drafts}

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Whoever lost its blocks in the target may wait for long: here, others may have them too."""
        for name in batch.preempted:
            self._release(name)

    def forget(self, request: Request) -> None:
        """What is computed of it can still be found, for whoever continues it."""
        self._release(request.request_id)

    def behind(self, request: Request) -> int:
        """Tokens to compute before it can draft for the request, but for those that the prefix cache may have."""
        sequence = self._sequences.get(request.request_id)
        return request.num_tokens - (
            min(sequence.own.num_computed_tokens, sequence.kept) if sequence else 0
        )

    def check_integrity(self) -> None:
        """Prove that no block leaked (AssertionError if one did)."""
        self.kv_cache.check_integrity(sequence.own for sequence in self._sequences.values())

    def _follow(self, request: Request, limit: int | None) -> _Sequence | None:
        """The request's sequence with its new tokens in and wrong drafts out; None if no draft is to be made."""
        wanted = self._wanted(request, limit)
        sequence = self._sequences.get(request.request_id) or (
            self._begin(request) if wanted > 0 else None
        )
        if sequence is None or wanted <= 0:
            return None
        own = sequence.own
        known = sequence.known
        new = request.output_token_ids[known:]
        right = sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(sequence.drafts, new, strict=False)
            )
        )
        computed = len(own.prompt_token_ids) + known + right
        own.num_computed_tokens = min(own.num_computed_tokens, computed, request.num_tokens - 1)
        own.output_token_ids[known:] = new
        self.kv_cache.keep_computed(own, sequence.kept)
        sequence.known = known + len(new)
        sequence.kept = own.num_computed_tokens
        sequence.wanted = wanted
        # The last draft is not computed.
        if not self._knows(new) or not self.kv_cache.grow(own, own.num_tokens + wanted - 1):
            self._release(request.request_id)
            return None
        return sequence

    def _begin(self, request: Request) -> _Sequence | None:
        """Start to follow a request, from what the prefix cache has of it; None without room, or too near its end."""
        params = replace(request.sampling_params, logprobs=None, prompt_logprobs=None)
        own = Request(
            request.request_id,
            request.prompt_token_ids,
            params,
            request.arrival_time,
            cache_salt=request.cache_salt,
            output_token_ids=list(request.output_token_ids),
            constraint=request.constraint,
        )
        prefix = self.kv_cache.find_prefix(own)
        needed = self.kv_cache.free_blocks_needed(own, own.num_tokens, prefix)
        if params.max_tokens is not None:
            left = params.max_tokens - len(own.output_token_ids)
            if own.num_tokens - len(prefix) * self.kv_cache.block_size > LATE * left:
                return None
        if needed > self.kv_cache.pool.num_available or not self._knows(
            own.token_ids(0, own.num_tokens)
        ):
            return None
        self.kv_cache.start(own, prefix)
        sequence = _Sequence(own, known=len(own.output_token_ids), kept=own.num_computed_tokens)
        self._sequences[own.request_id] = sequence
        return sequence

    def _knows(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or max(token_ids) < self._vocab_size

    def _wanted(self, request: Request, limit: int | None) -> int:
        """Drafts that the request can use: behind the last of them it samples one more."""
        wanted = (
            self.num_speculative_tokens
            if limit is None
            else min(limit, self.num_speculative_tokens)
        )
        most = request.sampling_params.max_tokens
        if most is not None:
            wanted = min(wanted, most - len(request.output_token_ids) - 1)
        return min(wanted, self._max_model_len - request.num_tokens)

    def _first_step(self, sequences: list[_Sequence]) -> Batch:
        """Everything not computed yet, those with the least of it first, as far as a step's rows and the SLO go."""
        decodes: list[ScheduledRequest] = []
        prefills: list[ScheduledRequest] = []
        rows = self._max_rows
        context = sum(sequence.own.num_tokens for sequence in sequences) / max(1, len(sequences))
        work = StepWork.of_decodes(
            len(sequences), context
        )  # they decode in the same step of the engine
        slo = self._slo_seconds()
        budget = None
        for sequence in sorted(sequences, key=lambda one: one.missing):
            own = sequence.own
            count = sequence.missing
            if count <= FEW_ROWS:
                if count <= rows:
                    decodes.append(give_tokens(own, count))
                    rows -= count
                continue
            budget = budget or ChunkBudget(
                rows, work, self.times, Pace(slo and slo / 2), self.kv_cache.block_size
            )
            chunk = budget.take(own.num_computed_tokens, count)
            if chunk:
                prefills.append(give_tokens(own, chunk))
        return Batch(decodes, prefills)

    def _take(
        self, sequences: Mapping[str, _Sequence], share: ScheduledRequest, output: StepOutput
    ) -> bool:
        """Put what a step made behind the sequence; whether it goes on."""
        sequence = sequences[share.request_id]
        own = sequence.own
        own.num_computed_tokens += len(share.token_ids)
        token_ids = output.token_ids.get(share.request_id, [])
        own.output_token_ids += token_ids
        if not token_ids or len(sequence.drafts) >= sequence.wanted:
            return False
        return not own.sampling_params.ends_at(
            token_ids[-1], len(own.output_token_ids), self._eos_token_ids
        )

    def _release(self, name: str) -> None:
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            self.kv_cache.free(sequence.own)
