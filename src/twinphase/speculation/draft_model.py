"""The draft model: a smaller model of the same vocabulary, one step per token of all requests.

Each request has a copy, a `Request` whose output ends with the drafts, so that the engine's code
for KV blocks and prefixes also manages the draft model's blocks. The KV of rejected drafts lies
beyond `num_computed_tokens`. Drafts are sampled with the request's random numbers for the same
positions, so they are accepted more often than greedy drafts. `engine/loading/drafting.py` loads
the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from twinphase.batch import Batch, ScheduledRequest, StepOutput, StepWork
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.constraint import common_prefix_length
from twinphase.phases.cost import CostModel
from twinphase.request import Request
from twinphase.scheduler.chunk import ChunkBudget
from twinphase.scheduler.pace import Pace
from twinphase.scheduler.phase import give_tokens

# With more uncomputed tokens than this per remaining output token, drafts come too late to pay.
MAX_CATCH_UP_RATIO = 8
# A sequence with more rows than this in a step is scheduled as a prefill chunk.
MAX_DECODE_ROWS = 4


@dataclass(eq=False)
class _Sequence:
    """The draft model's state of a request.

    Attributes:
        own: the request's prompt, output and drafts, with blocks of the draft model.
        known: number of output tokens that are not drafts.
        kept: number of computed tokens in full blocks of the prefix cache.
        wanted: number of drafts to make in this step.
    """

    own: Request
    known: int = 0
    kept: int = 0
    wanted: int = 0

    @property
    def missing(self) -> int:
        """Number of tokens to compute before the next draft."""
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
            execute: computes a step of the draft model and samples, like the engine's executor.
            kv_cache: KV blocks of the draft model, which only this object uses.
            times: cost model, which learns the draft model's step times.
            num_speculative_tokens: largest number of drafts per request and step.
            vocab_size: size of the draft model's vocabulary; a request with other tokens gets no
                drafts.
            max_model_len: context length of the draft model.
            max_num_batched_tokens: largest number of rows in a step.
            eos_token_ids: the target's tokens that end an output.
            slo_seconds: the current inter-token SLO; prefill of the draft model may take half of
                it.
            clock: returns seconds.
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
        """Draft tokens by request id, at most `limits` per request where given.

        A request with many uncomputed tokens, such as a new prompt, is prefilled in chunks first.
        """
        updated = [self._update(request, limits.get(request.request_id)) for request in requests]
        sequences = {sequence.own.request_id: sequence for sequence in updated if sequence}
        batch = self._first_step([*sequences.values()])
        while batch.scheduled:
            start = self._clock()
            output = self._execute(batch)
            self.times.observe(batch.work, self._clock() - start)
            unfinished = [
                sequences[share.request_id]
                for share in batch.scheduled
                if self._take(sequences, share, output)
            ]
            batch = Batch([give_tokens(sequence.own, 1) for sequence in unfinished], [])
        return {name: sequence.drafts for name, sequence in sequences.items() if sequence.drafts}

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Free the blocks of preempted requests, which may queue for long."""
        for name in batch.preempted:
            self._release(name)

    def forget(self, request: Request) -> None:
        """Free the request's blocks; they stay in the prefix cache for a continuation."""
        self._release(request.request_id)

    def num_missing(self, request: Request) -> int:
        """Number of tokens to compute before a draft, without hits in the prefix cache."""
        sequence = self._sequences.get(request.request_id)
        computed = min(sequence.own.num_computed_tokens, sequence.kept) if sequence else 0
        return request.num_tokens - computed

    def check_integrity(self) -> None:
        """Assert that no block leaked."""
        self.kv_cache.check_integrity(sequence.own for sequence in self._sequences.values())

    def _update(self, request: Request, limit: int | None) -> _Sequence | None:
        """Add new tokens to the request's sequence and remove rejected drafts; None if no draft."""
        wanted = self._wanted(request, limit)
        if wanted <= 0:
            return None
        sequence = self._sequences.get(request.request_id) or self._begin(request)
        if sequence is None:
            return None
        own = sequence.own
        known = sequence.known
        new = request.output_token_ids[known:]
        accepted = common_prefix_length(sequence.drafts, new)
        computed = len(own.prompt_token_ids) + known + accepted
        own.num_computed_tokens = min(own.num_computed_tokens, computed, request.num_tokens - 1)
        own.output_token_ids[known:] = new
        self.kv_cache.keep_computed(own, sequence.kept)
        sequence.known = known + len(new)
        sequence.kept = own.num_computed_tokens
        sequence.wanted = wanted
        # The KV of the last draft is not computed.
        if not self._knows(new) or not self.kv_cache.grow(own, own.num_tokens + wanted - 1):
            self._release(request.request_id)
            return None
        return sequence

    def _begin(self, request: Request) -> _Sequence | None:
        """Start a request's sequence at its cached prefix; None without room or near its end."""
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
            if own.num_tokens - len(prefix) * self.kv_cache.block_size > MAX_CATCH_UP_RATIO * left:
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
        """Number of drafts that the request can use: the target samples one more token."""
        bounds = [self.num_speculative_tokens, self._max_model_len - request.num_tokens]
        if limit is not None:
            bounds.append(limit)
        if (max_tokens := request.sampling_params.max_tokens) is not None:
            bounds.append(max_tokens - len(request.output_token_ids) - 1)
        return min(bounds)

    def _first_step(self, sequences: list[_Sequence]) -> Batch:
        """A batch of uncomputed tokens, shortest first, within a step's rows and the SLO."""
        decodes: list[ScheduledRequest] = []
        prefills: list[ScheduledRequest] = []
        rows = self._max_rows
        context = sum(sequence.own.num_tokens for sequence in sequences) / max(1, len(sequences))
        # The sequences decode in the same engine step.
        work = StepWork.of_decodes(len(sequences), context)
        slo = self._slo_seconds()
        budget = None
        for sequence in sorted(sequences, key=lambda sequence: sequence.missing):
            own = sequence.own
            count = sequence.missing
            if count <= MAX_DECODE_ROWS:
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
        """Append a step's output to the sequence; return whether it needs another step."""
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
