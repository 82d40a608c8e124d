"""The `Backend` protocol: the operations a model is written in, and the plain inputs of one step.

Arrays that operations take and return are opaque to models; each backend has its own kind (NumPy
arrays in `reference`, handles of captured buffers in `cpu`). Not for scheduling: a backend computes
the step it is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.group import Group
from twinphase.backends.states import RecurrentOperations
from twinphase.blueprint import Blueprint, Experts, KVShape, Rope, Span
from twinphase.weights.checkpoint import Checkpoint

Array = Any  # opaque to models
Edits = tuple[
    NDArray[np.int64], NDArray[np.float32]
]  # places in the flattened logits, and what happens there


@dataclass(frozen=True)
class Units:
    """Which arithmetic unit does what: "int8", "float32" or "bfloat16"."""

    linear: str
    scores: str  # queries by keys
    values: str  # probabilities by values; as many FLOP as the scores

    def flops(self, linear: int, attention: int) -> dict[str, int]:
        """FLOP by unit of linear layers and of attention, half of whose FLOP are the scores'."""
        scores = attention // 2
        return dict(
            Counter({self.linear: linear})
            + Counter({self.scores: scores})
            + Counter({self.values: attention - scores})
        )


@dataclass(frozen=True)
class MeasuredRates:
    """Best rates seen, operations and bytes per second; None where the processor has no such unit.

    A multiplication and an addition are two operations. `bandwidth` is ((working set in bytes,
    bytes/s), ...). `provisional` means that others took the cores meanwhile, or that the rounds did
    not agree: a rate may be too low.
    """

    bandwidth: tuple[tuple[int, float], ...]
    int8_ops: float | None
    float32_flops: float
    bfloat16_flops: float | None
    provisional: bool
    float16_flops: float | None = None


class Device(Protocol):
    """One device as one backend uses it.

    Attributes:
        name: of the backend.
        threads: compute threads.
        isa: instruction-set path that runs; "" where there is no choice of any.
        best_isa: the one that would run if none were forced; None where there is no choice.
        prompt_isa: one that computes long prompts faster, and lone answers more slowly, on weights
            that it multiplies in bfloat16 (`units`); None where there is none.
        ceilings: what its ceilings are kept as; "" where they cannot be measured, and MFU and MBU
            are unknown.
    """

    name: str
    threads: int
    isa: str
    best_isa: str | None
    prompt_isa: str | None
    ceilings: str

    def units(self, weights: Set[tuple[str, int]]) -> Units:
        """The unit of each operation, by types and dimensions (3 for experts) of the weights."""

    def kv_head_bytes(self, head_dim: int, dtype: str) -> float:
        """Bytes of one token's key and value per KV head and layer, with a `kv_cache_dtype`."""

    def free_memory(self) -> int | None:
        """Bytes of its own memory that could be taken now; None where it computes in the host's."""

    def measure(self) -> MeasuredRates:
        """Measure the best rates that the device reaches now; takes some seconds."""


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the paged KV cache, and of the states of recurrent layers.

    A block holds `block_size` tokens of every layer that caches keys and values.

    Layers of one shape lie together, in groups; all groups have the same blocks.

    Attributes:
        layers: keys and values of each layer that caches them.
        num_state_slots: each holds a sequence's state in every recurrent layer (`states.py`); 0 for
            a model without such layers.
        state_log_rows: rows that a slot has room for beside the state.
    """

    layers: tuple[KVShape, ...]
    num_blocks: int
    block_size: int = 16
    num_state_slots: int = 0
    state_log_rows: int = 0

    @classmethod
    def of(cls, blueprint: Blueprint, num_blocks: int, block_size: int = 16) -> KVCacheSpec:
        """The KV cache of a model, without states."""
        return cls(blueprint.kv_shapes, num_blocks, block_size)

    @property
    def num_layers(self) -> int:
        """Layers that cache keys and values."""
        return len(self.layers)

    @property
    def groups(self) -> dict[KVShape, int]:
        """How many layers there are of each shape."""
        return dict(Counter(self.layers))

    @property
    def shape(self) -> KVShape:
        """The one shape, for backends that compute no other models."""
        (shape,) = self.groups
        return shape

    def place(self, layer: int) -> tuple[KVShape, int]:
        """A layer's shape, and its number among those of this shape."""
        shape = self.layers[layer]
        return shape, self.layers[:layer].count(shape)


@dataclass(frozen=True)
class StepInputs:
    """One step, flattened: the rows of all decodes, then the rows of all prefills.

    Attributes:
        token_ids: int32 [num_tokens].
        positions: int32 [num_tokens], absolute position of each row in its sequence.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset where the row's KV goes.
        query_start: int32 [num_seqs + 1], first row of each sequence.
        block_tables: int32 [num_seqs, max_blocks], block ids of each sequence, padded with 0.
        num_decodes: sequences that decode; they come first. A decode has one row, or 1 + k rows
            where k drafts are verified: rows `query_start[s]` .. `query_start[s + 1] - 1` belong
            together, at consecutive positions of one sequence, and share its row of `block_tables`.
            Row i attends to `context_lens[s] - k + i` tokens.
        logit_rows: int32 [num_logits], rows that need logits.
        states: int32 [num_seqs, 4] for a model with recurrent layers: the slot with a sequence's
            state, the slot where its new state goes, how many rows of the first slot's log are
            right, and how many of the step's rows the new state takes up; the others go into its
            log. With 0, both slots are one, whose log grows. No slot is the target of one sequence
            and the source or target of another.
        snapshots: int32 [num_snapshots, 2], rows and slots: the state after a row, which is no
            draft, goes into a slot too.
        hidden: float32 [num_tokens, hidden_size], what `given_rows` gives; None if nothing asks.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    query_start: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    num_decodes: int
    logit_rows: NDArray[np.int32]
    states: NDArray[np.int32] | None = None
    snapshots: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 2), np.int32))
    hidden: NDArray[np.float32] | None = None
    context_lens: NDArray[np.int32] = field(init=False)  # [num_seqs], tokens in KV after this step

    def __post_init__(self) -> None:
        last = self.query_start[1:] - 1
        object.__setattr__(self, "context_lens", self.positions[last] + 1)

    @property
    def num_tokens(self) -> int:
        """Rows of this step."""
        return len(self.token_ids)


@dataclass(frozen=True)
class SamplingPlan:
    """What to sample from a step's logits [rows, vocab_size], and which log probabilities to give.

    Attributes:
        edits: for each operation of `sampling/logit_edits.py`, flat indices into the logits,
            each at most once, and the operands.
        masks: int64 [masked rows], and uint8 [masked rows, ceil(vocab_size / 8)]: a bit for each
            token that may be drawn, the lowest first; applied after the edits.
        temperature: float32 [rows]; 0 takes the largest logit, the lowest id of equal ones.
        min_p, top_p, uniform: float64 [rows]; without effect are 0 and 1, and `uniform` in [0, 1)
            decides a draw.
        top_k: int64 [rows]; 0 is no limit.
        scored: int64 [rows], the token to report the log probability for; -1 is the drawn one, -2
            none.
        num_top: how many of the most likely tokens to return for rows with `scored`.
    """

    edits: tuple[Edits, ...]
    masks: tuple[NDArray[np.int64], NDArray[np.uint8]]
    temperature: NDArray[np.float32]
    min_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    uniform: NDArray[np.float64]
    scored: NDArray[np.int64]
    num_top: int


@dataclass(frozen=True)
class SampledRows:
    """Result of a `SamplingPlan`, one entry per row.

    Attributes:
        token_ids: int64 [rows]; -1 where the largest logit was not finite, before or after the
            edits.
        logprobs, ranks: float64 and int64 [rows], of the scored tokens: natural log, and how many
            are as likely.
        top_ids, top_logprobs: int64 and float64 [rows, num_top], by falling likelihood, equal ones
            by rising id.
        forward_seconds, sampling_seconds: what the device took for the step before, and for this.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]
    forward_seconds: float = 0.0
    sampling_seconds: float = 0.0


class RowSampler(Protocol):
    """Samples the rows of a step that is computed.

    A backend without a `DeviceSampler` may have one as `row_sampler`, for the logits that it
    returned last; otherwise NumPy samples from them.
    """

    def sample(self, plan: SamplingPlan) -> SampledRows:
        """Sample from the last step's logits, as `sampling/` does on the host."""


class DeviceSampler(RowSampler, Protocol):
    """Computes a step and samples its tokens on the device: only token ids come to the host."""

    def capture(
        self,
        forward: Forward,
        max_num_seqs: int,
        max_model_len: int,
        progress: Callable[[float, int, str], None] | None,
    ) -> None:
        """Make decode steps ready to be replayed, where possible.

        Called once, after the KV cache is allocated and before the first step; `progress` is called
        with (done, total, name).
        """

    def launch(self, forward: Forward, inputs: StepInputs) -> None:
        """Begin to run `forward` on `inputs`; may return before it is done."""


class Operations(RecurrentOperations, Protocol):
    """The operations of a model's forward pass. Row counts are those of the current step."""

    def keep(self, x: Array) -> None:
        """Leave these rows readable after the step (`kept`); changes no bit of anything else."""

    def embed(self, table: Array, scale: float = 1.0) -> Array:
        """Embedding rows of the step's tokens times `scale`, [num_tokens, hidden_size]."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019), same shape."""

    def linear(
        self,
        x: Array,
        weight: Array,
        *,
        residual: Array | None = None,
        first: int = 0,
        bias: Array | None = None,
    ) -> Array:
        """x @ weight.T, plus columns of `residual` from `first` on, or `bias`; [rows, outputs]."""

    def gather(self, x: Array, span: Span | None) -> Array:
        """The columns of all ranks side by side: x [rows, span.size] to [rows, span.total].

        Without a span, one rank has all columns, and x is returned as it is.
        """

    def add(self, x: Array, h: Array, scale: float = 1.0) -> Array:
        """x + scale * h; may overwrite x."""

    def add_norm(
        self,
        x: Array,
        h: Array,
        weight: Array,
        eps: float,
        *,
        scale: float = 1.0,
        factor: Array | None = None,
    ) -> Array:
        """(x + scale * rms_norm(h, weight)) * factor, where a half of a layer ends.

        May overwrite x. A weight narrower than the rows normalizes each part of a row as wide as
        itself. `factor` is a vector of one number.
        """

    def rope_kv_write(
        self,
        qkv: Array,
        rope: Array | None,
        layer: int,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
    ) -> Array:
        """Normalize and rotate queries and keys, write the cache; returns the queries.

        `qkv` is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], however its matrices were
        stored; with a gate on attention's result, each head's queries are followed by its gate.
        Where the columns of values are missing, keys are values before they are normalized; where
        those of keys are missing too, nothing is written. The norms' weights are as the blueprint's
        `qk_norm` says; without a `rope` nothing is rotated. `layer` counts the layers that cache
        keys and values.
        """

    def attention(
        self, q: Array, layer: int, window: int | None = None, sinks: Array | None = None
    ) -> Array:
        """Causal attention of the step's rows over the cache, [num_tokens, num_heads * head_dim].

        A row at position p attends to the positions from p - window + 1 on. `sinks` are logits
        [num_heads] that take part in the softmax (Xiao et al., 2023). Scale and softcap are the
        blueprint's.
        """

    def gate_mul(self, gate_up: Array, up: Array | None = None, first: int = 0) -> Array:
        """activation(gate) * up of [rows, 2 * ffn] = (gate, up); [rows, ffn].

        With `up` the first array is the gate alone, and up are columns of `up` from `first` on.
        """

    def gated_linear(self, x: Array, weight: Array, *, bias: Array | None = None) -> Array:
        """`gate_mul` of the linear layer of gate and up; [rows, ffn]."""

    def moe(
        self,
        x: Array,
        router: Array,
        gate_up: Array,
        down: Array,
        experts: Experts,
        *,
        router_bias: Array | None = None,
        choice_bias: Array | None = None,
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> Array:
        """The weighted sum of each row's chosen experts, in the order of their rank; shaped as x.

        The `experts.used` largest of the router's logits are chosen, the smaller number of two
        equal ones; with `experts.scores` "sigmoid" the largest of their sigmoids, each plus its
        `choice_bias` [experts] where there is one. Sums that weights are divided by are then 1e-6
        larger, as in LFM2.
        """

    def logit_rows(self, x: Array) -> Array:
        """The rows of x [num_tokens, width] that need logits, [num_logits, width].

        Queries that come from these rows attend as the rows themselves would.
        """

    def cap_logits(self, logits: Array, scale: float, softcap: float | None) -> Array:
        """The logits times `scale`, then softcap * tanh(logits / softcap) when there is one."""


class Forward(Protocol):
    """A model's forward pass: calls the backend's operations and returns the logits' array."""

    def __call__(self, backend: Operations) -> Array:
        """Compute the current step on `backend`."""


class WeightLoader(Protocol):
    """Takes a model's weights from the checkpoint, in its own precision, and lays them out."""

    def prepare(
        self,
        checkpoint: Checkpoint,
        blueprint: Blueprint,
        forward_on: Callable[[WeightLoader], Forward],
    ) -> None:
        """Get ready for this model; called once, before any weight.

        `forward_on` loads the model on another loader and returns its forward pass: a backend can
        record the model's first step, and compile the kernels that it runs.

        Raises:
            UnsupportedModelError: the model's shape or tensor types cannot be computed here.
        """

    def matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Array:
        """A linear layer's weights; names are stacked along the outputs, [outputs, inputs]."""

    def exact_matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Array:
        """As `matrix`, for small layers whose inputs must not be rounded to the weights' type."""

    def experts(self, checkpoint: Checkpoint, names: Sequence[str]) -> Array:
        """The same layer of every expert; names are stacked, [experts, outputs, inputs]."""

    def vector(self, checkpoint: Checkpoint, names: Sequence[str], plus: float = 0.0) -> Array:
        """Float32 values of tensors, such as norms or the biases of stacked matrices, `plus` added.

        A tensor with rows, such as the biases of experts, keeps them: [experts, sum of widths].
        """

    def embedding(self, checkpoint: Checkpoint, name: str) -> Array:
        """The token embedding, [vocab_size, hidden_size]."""

    def rope(self, rope: Rope, max_positions: int) -> Array:
        """Rotation tables for positions below `max_positions`."""


class Backend(WeightLoader, Protocol):
    """How the operations are computed on one device. Row counts are those of the current step.

    A backend may call `forward` once, record the operations, and replay the record for every later
    step; so a model calls the same operations in every step, and looks at no value.
    """

    name: str
    group: Group | None  # of the ranks that compute a model together; set before `prepare`
    block_multiple: int  # the block size of the KV cache is a multiple of this
    kv_cache_dtypes: tuple[str, ...]  # what `EngineConfig.kv_cache_dtype` may be

    @property
    def device_sampler(self) -> DeviceSampler | None:
        """Samples tokens on the device; None if `execute` brings the logits to the host."""

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        """Make the KV cache; called once, after the weights and before the first step."""

    def kv_bytes_per_token(
        self, dtype: str | None = None, layers: Sequence[KVShape] | None = None
    ) -> int:
        """Bytes of one token over all layers, in the allocated cache or one of another `dtype`.

        `layers` stand for those of the allocated cache.
        """

    @property
    def kv_fingerprint(self) -> str:
        """Everything besides tokens that the bits of a block depend on; see `kv_frames`."""

    # Between two steps: blocks in a form that another backend with the same fingerprint can use.
    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """A frame for each block: the fingerprint, then its keys and values of every layer."""

    def write_blocks(self, block_ids: Sequence[int], frames: Sequence[bytes | memoryview]) -> None:
        """Put what `read_blocks` gave into these blocks; nothing is written if a frame is refused.

        Raises:
            KVFrameError: a frame of another fingerprint, or of another length.
        """

    def frame_parts(self) -> list[tuple[int, int, int]]:
        """The bits of a frame, for ranks with some KV heads.

        Of each part: the number of its group of layers (`KVCacheSpec.groups`), rows, and bytes of a
        head in a row.
        """

    def has_finite_numbers(self, frame: bytes | bytearray | memoryview) -> bool:
        """Whether a frame of this fingerprint and length has no NaN or infinity; from any thread.

        Either would outlive its block: attention multiplies what lies after a sequence's end in
        its last block by 0.
        """

    # One step.
    def execute(self, forward: Forward, inputs: StepInputs) -> NDArray[np.float32]:
        """Run `forward`; float32 logits [num_logits, vocab_size], valid until the next call."""

    def kept(self) -> list[NDArray[np.float32]]:
        """Rows kept in the last step, float32 [rows, width]; valid until the next one."""
