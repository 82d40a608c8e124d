"""What one step computes: `Batch(decodes, prefills)` in, `StepOutput` out.

The only messages between the control plane (scheduler, cache) and the data plane (executor,
backend).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from twinphase.constraint import Constraint
from twinphase.request import SamplingParams


class Phase(enum.Enum):
    """The half of a request that a step works on.

    It belongs to the scheduled request, not to the batch.
    """

    PREFILL = "prefill"
    DECODE = "decode"


class StepWork(NamedTuple):
    """What a step computes, in the counts that its time depends on.

    Work of parts adds up by `plus`.

    The `windowed` counts are those of layers whose tokens attend to a window only; 0 where no
    layer has one.

    Attributes:
        rows: tokens computed.
        prefill_contexts: sum over the prefills' rows of the tokens each attends to.
        decode_contexts: the same over the decodes' rows.
        logits: rows whose logits are wanted.
        sequences: scheduled requests.
        kv_tokens: sum over the requests of the tokens whose keys and values are read or written.
        windowed_prefill_contexts, windowed_decode_contexts, windowed_kv_tokens: the same three
        within a window.
        draft_contexts: those of `decode_contexts` that are drafted rows', for which the KV is read
            anyway.
    """

    rows: int = 0
    prefill_contexts: int = 0
    decode_contexts: int = 0
    logits: int = 0
    sequences: int = 0
    kv_tokens: int = 0
    windowed_prefill_contexts: int = 0
    windowed_decode_contexts: int = 0
    windowed_kv_tokens: int = 0
    draft_contexts: int = 0

    def plus(self, other: StepWork) -> StepWork:
        return StepWork(*map(sum, zip(self, other, strict=True)))

    @classmethod
    def of_chunk(
        cls, start: int, num_tokens: int, num_logits: int, window: int | None = None
    ) -> StepWork:
        """A prefill chunk at positions `start`, +1, ...; `window` is that of the model's layers."""
        contexts, kv_tokens, windowed_contexts, windowed_kv_tokens = _attended(
            start, num_tokens, window
        )
        return cls(
            rows=num_tokens,
            prefill_contexts=contexts,
            logits=int(num_logits),
            sequences=1,
            kv_tokens=kv_tokens,
            windowed_prefill_contexts=windowed_contexts,
            windowed_kv_tokens=windowed_kv_tokens,
        )

    @classmethod
    def of_decodes(cls, count: int, context: float, window: int | None = None) -> StepWork:
        """A step of `count` sequences whose rows attend to `context` tokens each, a mean."""
        tokens = round(count * context)
        near = round(count * min(context, window)) if window else 0
        return cls(
            rows=count,
            decode_contexts=tokens,
            logits=count,
            sequences=count,
            kv_tokens=tokens,
            windowed_decode_contexts=near,
            windowed_kv_tokens=near,
        )


def _attended(start: int, count: int, window: int | None) -> tuple[int, int, int, int]:
    """Contexts and KV tokens of rows at positions `start`, +1, ...: in all, and within a window.

    The row at position p attends to p + 1 tokens, or to the window's number if that is less. All
    rows together attend to the tokens from the first row's first to the last row itself.
    """
    if not count:
        return 0, 0, 0, 0
    stop = start + count
    contexts = count * start + count * (count + 1) // 2
    if not window:
        return contexts, stop, 0, 0
    rising = max(0, min(stop, window) - start)  # These rows still attend to all tokens.
    near = rising * start + rising * (rising + 1) // 2 + (count - rising) * window
    return contexts, stop, near, min(stop, window + count - 1)


class StateStep(NamedTuple):
    """Where a step finds and leaves a state: `request.StateSlots` before it.

    A step of up to `log_room` rows leaves them in the source, where the next one finds them. A
    larger one writes the state after all rows but drafts to the target, and the drafts' rows.
    """

    source: int
    target: int
    pending: int
    log_room: int


# One is made per request and step: `frozen` would take three times as long.
@dataclass(slots=True)
class ScheduledRequest:
    """A request's share of a step: compute `token_ids` at positions `num_computed_tokens`, +1, ...

    `samples` is true when the last known token is among them, so that its logits give a new token.
    The last `num_drafts` of them are guesses at what follows the last known token: the logits of
    each row tell whether the next guess is right (`speculation/verify.py`), and what a wrong one
    left in the KV cache is overwritten.
    """

    request_id: str
    phase: Phase
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    samples: bool
    sampling_params: SamplingParams
    # Penalties use both lists.
    prompt_token_ids: list[int] = field(repr=False, default_factory=list)
    output_token_ids: list[int] = field(repr=False, default_factory=list)
    # Number of tokens computed before a preemption, which are now recomputed.
    most_computed_tokens: int = 0
    constraint: Constraint | None = field(repr=False, default=None)
    num_cached_tokens: int = 0  # Number of cached prompt tokens.
    num_drafts: int = 0
    tenant: str = ""
    state: StateStep | None = None  # State slots, in a model with recurrent layers.
    # Slots where the state is left, by the position that it then stands at.
    snapshots: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_final(self) -> int:
        """Tokens that are no drafts."""
        return len(self.token_ids) - self.num_drafts

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def logs_state(self) -> bool:
        """Whether the step leaves its rows beside the state, and not the state after them."""
        return self.state is not None and len(self.token_ids) <= self.state.log_room

    @property
    def scored(self) -> range:
        """Positions whose logits score the prompt token that follows; each is scored only once."""
        if self.sampling_params.prompt_logprobs is None or self.output_token_ids:
            return range(0)
        start = max(self.num_computed_tokens, self.most_computed_tokens)
        return range(
            start,
            min(self.num_computed_tokens + len(self.token_ids), len(self.prompt_token_ids) - 1),
        )

    @property
    def num_logits(self) -> int:
        """Rows that need logits: those of `scored`, of the last known token, and of the drafts."""
        return len(self.scored) + (1 + self.num_drafts if self.samples else 0)

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens whose KV is in the cache after this step."""
        return min(self.num_computed_tokens + len(self.token_ids), len(self.prompt_token_ids))


@dataclass(frozen=True)
class Batch:
    """One step's work. Decodes come first in every flattened array.

    Attributes:
        preempted: ids of the requests whose blocks were taken away for this step.
        held_back: what kept the first waiting request from being admitted: "seats"
            (`max_num_seqs`), "states" (slots for recurrent states), "blocks" (KV cache), "budget"
            (tokens of this step, or the SLO),
            "prefix" (most of its prompt is being computed in this step, for another); None when
            no request waits.
        window: tokens that a row attends to at most in those layers of the model that have a
            window; None is no window.
    """

    decodes: list[ScheduledRequest]
    prefills: list[ScheduledRequest]
    preempted: tuple[str, ...] = ()
    held_back: str | None = None
    window: int | None = None

    @property
    def scheduled(self) -> list[ScheduledRequest]:
        """Decodes, then prefills: the order of the flattened rows."""
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return self.work.rows

    def of_tenant(self, tenant: str) -> Batch:
        """The part of the step that is one tenant's."""
        decodes, prefills = (
            [one for one in half if one.tenant == tenant] for half in (self.decodes, self.prefills)
        )
        return Batch(decodes, prefills, window=self.window)

    @cached_property
    def decode_work(self) -> StepWork:
        rows = 0
        drafted = 0
        sums = (0, 0, 0, 0)
        for share in self.decodes:
            rows += len(share.token_ids)
            if share.num_drafts:
                drafted += _attended(share.num_computed_tokens + 1, share.num_drafts, None)[0]
            own = _attended(share.num_computed_tokens, len(share.token_ids), self.window)
            sums = (sums[0] + own[0], sums[1] + own[1], sums[2] + own[2], sums[3] + own[3])
        return StepWork(
            rows=rows,
            decode_contexts=sums[0],
            logits=rows,
            sequences=len(self.decodes),
            kv_tokens=sums[1],
            windowed_decode_contexts=sums[2],
            windowed_kv_tokens=sums[3],
            draft_contexts=drafted,
        )

    @cached_property
    def prefill_work(self) -> StepWork:
        total = StepWork()
        for share in self.prefills:
            chunk = share.num_computed_tokens, len(share.token_ids), share.num_logits
            total = total.plus(StepWork.of_chunk(*chunk, self.window))
        return total

    @cached_property
    def work(self) -> StepWork:
        return self.decode_work.plus(self.prefill_work) if self.prefills else self.decode_work


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probability of a sampled token, and of the most likely ones at its position."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: list[tuple[int, float]]


@dataclass
class StepTimes:
    """Seconds measured within one step, or summed over several; parts may overlap.

    The executor and the recorder fill it in; records, totals and messages carry it whole.

    Attributes:
        executed: in the executor; the rest of the step is scheduling and bookkeeping.
        building: turning the batch into input arrays, part of `executed`.
        sampling: choosing tokens, part of `executed`.
        drafting: proposing draft tokens, before the executor.
        cpu_wait: a thread of the engine could run and had no processor; 0 where not known.
        device: computed by a device with a clock of its own; 0 where there is none.
        rank_wait: the first of several ranks waited for the others.
    """

    executed: float = 0.0
    building: float = 0.0
    sampling: float = 0.0
    drafting: float = 0.0
    cpu_wait: float = 0.0
    device: float = 0.0
    rank_wait: float = 0.0

    def add_times(self, other: StepTimes) -> None:
        # Done twice per request and step: a loop over names would take five times as long.
        self.executed += other.executed
        self.building += other.building
        self.sampling += other.sampling
        self.drafting += other.drafting
        self.cpu_wait += other.cpu_wait
        self.device += other.device
        self.rank_wait += other.rank_wait


@dataclass
class StepOutput:
    """What a step produced.

    Attributes:
        token_ids: new tokens by request, one more than its drafts that were accepted. A request of
            the batch that should have sampled and has no tokens failed.
        prompt_logprobs: first index and entries of consecutive prompt tokens, by request.
        errors: why a request failed, in one line.
        computed_singly: the executor failed on the batch, and each request was computed alone.
    """

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)
    computed_singly: bool = False

    def num_accepted(self, share: ScheduledRequest) -> int:
        """Accepted drafts of a share: every new token but the last one was a draft."""
        return min(share.num_drafts, max(0, len(self.token_ids.get(share.request_id, ())) - 1))
