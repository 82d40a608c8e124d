"""Messages between the front end and the engine's loop, in one process or between two.

Plain values only, so that a message is the same object in one process and a few bytes of
MessagePack between two; no pickle.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from twinphase import errors
from twinphase.batch import StepTimes, TokenLogprobs
from twinphase.config import EngineConfig
from twinphase.errors import TwinphaseError
from twinphase.explain.explanation import Explanation
from twinphase.outcome import FinishReason, PrefixMiss
from twinphase.phases.hardware import Ceilings
from twinphase.phases.record import RequestRecord
from twinphase.phases.work import ModelShape
from twinphase.request import SamplingParams
from twinphase.scheduler.pace import Pace


# To the engine.
class Load(msgspec.Struct, tag=True, frozen=True):
    """The first message to a process: load this model.

    To a process elsewhere it also says which `version` it comes from, and the `fingerprint` of the
    model's files.
    """

    model: str
    config: EngineConfig
    version: str = ""
    fingerprint: str = ""


class PushTo(msgspec.Struct, frozen=True):
    """The destination of a request's KV blocks, which are sent as they are computed.

    Attributes:
        addresses: addresses of the other worker, the nearest first.
        lease: seconds after the request's end during which the sender waits for answers.
    """

    addresses: list[str]
    lease: float = 5.0


class Add(msgspec.Struct, tag=True, frozen=True):
    """Queue a request; answered by `Accepted` or `Refused`.

    Attributes:
        record: the engine continues it, and sends it back in the last `RequestUpdate`.
        sampling_params: for this engine; a cluster may ask it for less than the whole answer.
        prediction_token_ids: the answer that the user expects.
        output_token_ids: output of an answer that another engine began; this engine continues it
            bit for bit.
        push_to: another engine that needs the prompt's KV blocks; answered by `Pushed` as well.
        recompute: discard the cached prefix and compute the whole prompt.
    """

    record: RequestRecord
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    prediction_token_ids: list[int] = []
    output_token_ids: list[int] = []
    push_to: PushTo | None = None
    recompute: bool = False

    @property
    def request_id(self) -> str:
        return self.record.request_id


class End(msgspec.Struct, tag=True, frozen=True):
    """End a request: at a stop string, or because its client left. Unknown ids are ignored."""

    request_id: str
    reason: FinishReason


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Explain a request; answered by `Inspected` with the same number.

    Attributes:
        record: record of a request that has ended; None for one that the engine has.
    """

    number: int
    request_id: str
    record: RequestRecord | None = None


class Embed(msgspec.Struct, tag=True, frozen=True):
    """Turn texts into vectors; answered by `Embedded` or `Refused` with the same number.

    Attributes:
        texts: token ids of each text, or of each pair if the model scores pairs.
        tenant, weight: tenants share the engine's time by their weights.
        starts: position in each pair at which its second text begins.
    """

    number: int
    texts: list[list[int]]
    tenant: str = ""
    weight: float = 1.0
    starts: list[int] = []


class WatchBlocks(msgspec.Struct, tag=True, frozen=True):
    """Report changes of the prefix cache; the first `BlocksChanged` lists all cached blocks."""


class WatchSteps(msgspec.Struct, tag=True, frozen=True):
    """Report each step (`StepView`) and the holders of KV blocks, or stop reporting.

    The first `BlocksHeld` has all blocks that are held or cached.
    """

    on: bool


class HandOver(msgspec.Struct, tag=True, frozen=True):
    """Send the prefix cache's blocks to another engine; answered by `Pushed` with the id ""."""

    to: PushTo


class LimitPrefill(msgspec.Struct, tag=True, frozen=True):
    """Limit the prefill tokens per step from the next step on; None removes the limit.

    A request that arrives during a step waits for that step to end.
    """

    num_tokens: int | None


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Pong` with the same time, at once, even during a step."""

    sent: float


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the loop after the step it is in."""


# From the engine.
class Loading(msgspec.Struct, tag=True, frozen=True):
    """How far loading has come; `total` is 0 where nothing can be counted."""

    stage: str
    done: float = 0
    total: int = 0


class RankFacts(msgspec.Struct, frozen=True):
    """One of the processes that compute a model together.

    Attributes:
        threads: number of compute threads.
        nodes: the NUMA nodes it is bound to; none where there is no choice.
        weight_bytes, kv_bytes: its share of the tensors, as they are stored, and of the KV cache.
    """

    threads: int | None
    nodes: list[int]
    weight_bytes: int
    kv_bytes: int


class EngineFacts(msgspec.Struct, tag=True, frozen=True):
    """The engine is loaded and takes requests; these are its facts.

    Attributes:
        config: the resolved configuration.
        shape: sizes of a model that generates.
        ceilings: measured ceilings of this machine, if they are known.
        warm_up_tokens: length of the prompt that the engine computed alone before it was ready; 0
            if there was none.
        ttft, tpot: measured with that prompt, seconds.
        embedding_size: size of the vectors of a model that embeds; 1 for one that scores pairs, 0
            for one that generates.
        matryoshka_sizes: sizes that its vectors may be cut to; an empty list allows any size, and
            None allows only their own.
        pace: the gap that running streams keep, and its cost; None where the engine was not warmed
            up.
        chunk_tokens: prompt tokens that a step beside one decode has room for.
        prices: prices of the cost model.
        model: fingerprint of the model's files.
        kv_addresses: where other engines can send KV blocks (`PushTo`), the nearest first.
        kv_fingerprint: identifies everything that decides the bits of a KV block; blocks with
            another fingerprint cannot be used here.
        role: role that a worker was started with; "" if its server decides.
        pid: id of a worker's process on its machine.
        ranks: ranks of an engine that is several processes (`--tensor-parallel-size`).
        threads, isa: number of compute threads, and their instruction-set path; None and "" if the
            backend has none.
    """

    config: EngineConfig
    shape: ModelShape | None
    ceilings: Ceilings | None
    warm_up_tokens: int
    ttft: float | None
    tpot: float | None
    embedding_size: int = 0
    matryoshka_sizes: list[int] | None = None
    pace: Pace | None = None
    chunk_tokens: int | None = None
    prices: tuple[float, ...] = ()
    model: str = ""
    kv_fingerprint: str = ""
    kv_addresses: list[str] = []
    role: Literal["", "both", "prefill", "decode"] = ""
    pid: int | None = None
    ranks: list[RankFacts] = []
    threads: int | None = None
    isa: str = ""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The error of a refused request (by id), question (by number) or model (None)."""

    about: str | int | None
    kind: str
    cause: str
    fix: str

    def error(self) -> TwinphaseError:
        kind = getattr(errors, self.kind, TwinphaseError)
        error: TwinphaseError = kind(self.cause, self.fix)
        return error


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The request is queued."""

    request_id: str


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """The engine will end: send it nothing new, and `Stop` when its requests have finished."""


class Inspected(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Inspect`; both are None for a request that the engine does not know."""

    number: int
    record: RequestRecord | None
    explanation: Explanation | None


class BlocksChanged(msgspec.Struct, tag=True, frozen=True):
    """Blocks that the prefix cache stored and evicted; sent after `WatchBlocks` only.

    Attributes:
        number: number of this event. If it is not one more than the last number, an event was
            lost. With `whole`, it is the number of the next event.
        stored, evicted: chain hashes; none is in both.
        whole: `stored` has all blocks that can be found, and replaces all earlier events.
    """

    number: int
    stored: list[bytes]
    evicted: list[bytes] = []
    whole: bool = False


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Ping`; `clock` is the engine's own, seconds."""

    sent: float
    clock: float


class Pushed(msgspec.Struct, tag=True, frozen=True):
    """A request with `Add.push_to` has finished, and its blocks have arrived or will not come.

    Attributes:
        num_blocks: full blocks of the prompt; `num_stored` of them the other worker has.
        num_early: blocks that arrived before the request had finished, so that they cost no time.
        num_bytes: bytes sent.
        seconds: time from the request's end to the last answer.
        problem: why the other blocks did not arrive, if it is known.
    """

    request_id: str
    num_blocks: int
    num_stored: int
    num_early: int
    num_bytes: int
    seconds: float
    problem: str = ""


class Embedded(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Embed`: a vector for each text, float32, little endian.

    For a pair it is the score alone, before any activation.
    """

    number: int
    vectors: list[bytes]


class RequestUpdate(msgspec.Struct, array_like=True, frozen=True):
    """The result of a step for one request.

    Attributes:
        token_ids: new output tokens.
        num_prefilled: prompt tokens in the KV cache, cached ones included.
        num_cached: prompt tokens that the prefix cache held.
        ended: the request's record, if the request has ended.
        prompt_logprobs: index of a prompt token, and the log probabilities from that token on.
    """

    request_id: str
    token_ids: list[int]
    num_prefilled: int
    num_cached: int
    logprobs: list[TokenLogprobs] = []
    ended: RequestRecord | None = None
    prompt_logprobs: tuple[int, list[TokenLogprobs]] | None = None


class StepStats(msgspec.Struct, array_like=True, frozen=True):
    """One step, and the state of the engine after it.

    Attributes:
        start, end: seconds.
        prefill_seconds, decode_seconds: the step, divided by the cost model.
        kv_cache_usage: fraction of the KV cache's blocks that requests hold.
        prefix_queries, prefix_hits: prompt tokens looked up since the engine started, and found.
        num_preemptions: preemptions since the engine started.
        work: predicted seconds of the step by tenant.
        num_drafts: requests of the step that had guesses at their next tokens; `num_draft_tokens`
            were computed.
        accepted: how many of these requests had a right guess at each position.
        num_draft_failures: times that a source of guesses failed since the engine started.
        blocks_received: KV blocks that other engines sent since the engine started, by outcome.
        times: times that were measured within the step.
        itl_slo_seconds: the gap between tokens that the scheduler keeps; None where it keeps none.
        chunk_tokens: prompt tokens that a step beside one decode has room for now.
        state_usage: fraction of the slots for recurrent states that requests hold.
        num_snapshots: recurrent states that prefixes can be continued from.
        prices: prices of the cost model, after steps with prefill; empty after others.
    """

    start: float
    end: float
    prefill_seconds: float
    decode_seconds: float
    prefill_tokens: int
    decode_tokens: int
    prefill_flops: int
    decode_flops: int
    prefill_bytes: int
    decode_bytes: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    work: dict[str, float] = {}
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted: list[int] = []
    num_draft_failures: int = 0
    blocks_received: dict[str, int] = {}
    times: StepTimes = msgspec.field(default_factory=StepTimes)
    itl_slo_seconds: float | None = None
    chunk_tokens: int | None = None
    state_usage: float = 0.0
    num_snapshots: int = 0
    prices: tuple[float, ...] = ()


class StepView(msgspec.Struct, array_like=True, frozen=True):
    """The content of a step by request; sent after `WatchSteps` only.

    Attributes:
        index: number of the step, as in the ledger.
        predicted: seconds that the cost model predicted.
        bookkeeping: seconds from the end of the step until its records were complete.
        held_back: as `Batch.held_back`; "" if no request waits.
        running, waiting: number of requests after the step.
        prefills: request, prompt tokens, predicted seconds of a step with this chunk alone, and
            new output tokens (0 or 1).
        decodes: request, new output tokens, guessed tokens.
        preempted: requests whose blocks were taken away for it.
        started: admitted requests, each with the resource that the first in line lacked for most
            of its wait.
        misses: why the prefix cache did not hold more of their prompts.
        worker: the engine, where there are several.
    """

    index: int
    predicted: float
    bookkeeping: float
    held_back: str
    running: int
    waiting: int
    prefills: list[tuple[str, int, float, int]]
    decodes: list[tuple[str, int, int]]
    preempted: list[str] = []
    started: dict[str, str] = {}
    misses: dict[str, PrefixMiss] = {}
    worker: str = ""


class BlocksHeld(msgspec.Struct, tag=True, frozen=True):
    """Changes of the KV cache; sent after `WatchSteps` only.

    Attributes:
        lanes: request, the number of blocks that it keeps of those last reported, and the new
            blocks after these.
        cached, freed: blocks without a holder, with and without content that is kept.
        num_held, num_shared, num_cached, num_free: numbers of blocks after these changes.
        whole: all blocks are reported, and all others are free.
        worker: the engine, where there are several.
    """

    lanes: list[tuple[str, int, list[int]]]
    cached: list[int]
    freed: list[int]
    num_held: int
    num_shared: int
    num_cached: int
    num_free: int
    whole: bool = False
    worker: str = ""


class Moved(msgspec.Struct, tag=True, frozen=True):
    """A router has sent a request to a worker, or has its KV blocks sent; after `WatchSteps` only.

    Attributes:
        moment: seconds.
        worker: the worker that has the request now, or gets its blocks.
        reason: the reason for choosing that worker.
        blocks: after a transfer, the numbers of blocks that arrived and of the prompt's full ones.
    """

    request_id: str
    moment: float
    worker: str
    reason: str = ""
    is_transfer: bool = False
    blocks: tuple[int, int] | None = None


class StepUpdates(msgspec.Struct, tag=True, frozen=True):
    """The results of a step; without `stats`, of a request that ended between two steps."""

    updates: list[RequestUpdate]
    stats: StepStats | None = None
    view: StepView | None = None


ToEngine = (
    Load
    | Add
    | Embed
    | End
    | HandOver
    | Inspect
    | LimitPrefill
    | Ping
    | Stop
    | WatchBlocks
    | WatchSteps
)
FromEngine = (
    Loading
    | EngineFacts
    | Refused
    | Accepted
    | Embedded
    | Inspected
    | StepUpdates
    | Pong
    | BlocksChanged
    | BlocksHeld
    | Moved
    | Pushed
    | Leaving
)
