"""What a decoder is made of: all differences between architectures, as plain data.

`models/architectures` fills a blueprint from a checkpoint's hyper-parameters; `models/decoder.py`
computes it, backends prepare for it, and every count of parameters, FLOP and bytes is derived from
it. Not for weights, nor for a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

QkNorm = Literal["none", "head", "width"]
Activation = Literal["silu", "gelu", "relu", "swiglu_oai"]
StateNorm = Literal["after_gate", "before_gate", "none"]
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021), with its scaling already worked out.

    Attributes:
        frequencies: radians per position, one for each rotated pair of a head's dimensions.
        interleaved: True rotates the pairs (2i, 2i+1), as GGUF stores Llama; False the pairs (i, i
            + pairs).
        magnitude: multiplies cosines and sines (YaRN's and LongRoPE's attention factor).
        temperature, temperature_length: rotated queries, not keys, are multiplied by
            1 + temperature * ln(1 + floor(position / temperature_length)), as in Llama 4.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False
    magnitude: float = 1.0
    temperature: float = 0.0
    temperature_length: int = 1

    @property
    def dim(self) -> int:
        """Rotated dimensions, the first of a head."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class KVShape:
    """Keys and values of a token in one layer."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer (Shazeer et al., 2017).

    Attributes:
        count: experts of a layer.
        used: experts that a token goes through.
        ffn_size: width of one expert.
        renormalize: whether the weights of the chosen are divided by their sum; if not, they are
            the scores.
        bias: whether router and experts have biases.
        scores: function of the router's logits: the softmax over all experts, or the sigmoid of
            each.
        choice_bias: whether a bias is added to each expert's score for the choice alone, not to its
            weight (DeepSeek-AI, 2024, arXiv:2412.19437); only with sigmoids.
        scale: multiplies the weights; only with sigmoids.
        shared_size: width of an expert that every token goes through; 0 is none.
        shared_gate: whether its result is multiplied by the sigmoid of a gate.
        fused_shared: whether the checkpoint stores its gate and up matrices as one.
        fused_gate_up: whether the checkpoint stores the gate and up matrices of experts as one.
    """

    count: int
    used: int
    ffn_size: int
    renormalize: bool
    bias: bool = False
    scores: Scores = "softmax"
    choice_bias: bool = False
    scale: float = 1.0
    shared_size: int = 0
    shared_gate: bool = True
    fused_shared: bool = False
    fused_gate_up: bool = False


@dataclass(frozen=True)
class ShortConv:
    """The gated short convolution of LFM2 in place of attention: out = C * conv(B * x).

    The state of a sequence is the last `taps` - 1 rows of B * x.

    Attributes:
        taps: positions that a row's convolution sees, its own included.
        channels: width of the convolution.
    """

    taps: int
    channels: int
    matrix_floats = log_floats = 0

    def history_rows(self, log_rows: int) -> int:
        """Inputs of the convolution that are kept: of `taps` - 1 positions, and of logged rows."""
        return self.taps - 1 + log_rows

    def state_floats(self, log_rows: int) -> int:
        """Numbers of a sequence's state in one layer."""
        return self.history_rows(log_rows) * self.channels


@dataclass(frozen=True, kw_only=True)
class MatrixStates:
    """A recurrence whose state is a matrix [key_dim, value_dim] of each value head.

    Its rows of keys, queries and values go through a convolution and SiLU first, so the last `taps`
    - 1 inputs of it belong to a sequence's state too.

    Attributes:
        taps: positions that a row's convolution sees, its own included.
        key_heads, key_dim: number and dimensions of the heads of queries and keys.
        value_heads, value_dim: number and dimensions of the heads of values; several may share a
            key head.
        log_decay: whether decays are stored as log(-A); else as A.
        tiled: whether value head h reads key head h % key_heads; else those that share one lie side
            by side.
    """

    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    log_decay: bool
    tiled: bool = False

    @property
    def num_keys(self) -> int:
        """Width of the keys, and of the queries."""
        return self.key_heads * self.key_dim

    @property
    def num_values(self) -> int:
        """Width of the values, and of the result."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.num_keys + self.num_values

    @property
    def matrix_floats(self) -> int:
        """Numbers of all heads' matrices."""
        return self.key_dim * self.num_values

    @property
    def log_floats(self) -> int:
        """What a logged row does to the matrices: of each head, key, change and decay."""
        return self.value_heads * (self.key_dim + self.value_dim + 1)

    def history_rows(self, log_rows: int) -> int:
        """Inputs of the convolution that are kept: of `taps` - 1 positions, and of logged rows."""
        return self.taps - 1 + log_rows

    def state_floats(self, log_rows: int) -> int:
        """Numbers of a sequence's state in one layer."""
        history = self.history_rows(log_rows) * self.channels
        return history + log_rows * self.log_floats + self.matrix_floats


@dataclass(frozen=True, kw_only=True)
class DeltaNet(MatrixStates):
    """A gated delta rule in place of attention (Yang et al., 2024, arXiv:2412.06464).

    As in Qwen3.5, whose value heads are tiled in GGUF files.
    """


@dataclass(frozen=True, kw_only=True)
class Mamba2(MatrixStates):
    """A selective state space in place of attention (Dao and Gu, 2024, arXiv:2405.21060).

    Its heads are value heads, its groups key heads; B and C are keys and queries.

    Attributes:
        norm: whether each group of its result is normalized, and whether the gate comes before.
    """

    norm: StateNorm = "after_gate"


@dataclass(frozen=True)
class Multipliers:
    """Factors of a model that was trained under muP (Yang et al., 2022, arXiv:2203.03466).

    Those of a file are moved to where they cost nothing: a factor of a linear layer's result is one
    of its input, and so one of the weights of the norm before it.

    Attributes:
        attn_norm, ffn_norm: multipliers of the norm weights before each half.
        values, keys, queries: multipliers of the weights of a state space's convolution.
        steps: multiplier of the projection to a state space's steps.
        attention, states, ffn: multipliers of the outputs of attention, a recurrence and the
            feed-forward layer.
    """

    attn_norm: float = 1.0
    ffn_norm: float = 1.0
    values: float = 1.0
    keys: float = 1.0
    queries: float = 1.0
    steps: float = 1.0
    attention: float = 1.0
    states: float = 1.0
    ffn: float = 1.0


@dataclass(frozen=True)
class Span:
    """The columns that one rank computes of `total`: `size` of them from `first` on.

    `firsts` are the first columns of all ranks, each a multiple of `multiple`. Columns that do not
    lie side by side come as `runs` of equal size, `step` apart; `firsts` is then empty. Ranks may
    have the same columns.
    """

    first: int
    size: int
    total: int
    multiple: int
    firsts: tuple[int, ...]
    runs: int = 1
    step: int = 0

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """Of each run: its place among this rank's columns, its place among all, its size."""
        size = self.size // self.runs
        return [(run * size, self.first + run * self.step, size) for run in range(self.runs)]


# Fields of `Share`.
SharedColumns = Literal["heads", "keys", "states", "ffn", "experts", "hidden", "vocab"]


@dataclass(frozen=True)
class Share:
    """What one rank of several (tensor parallelism) computes of a model.

    Attributes:
        rank, ranks: index of this rank, and number of ranks.
        whole: the blueprint of the model.
        heads: of each layer, columns of attention's result, those of this rank's query heads.
        keys: columns of keys, of layers that have `num_kv_heads`.
        states: columns of a recurrence's result; None where no layer is recurrent.
        ffn: of each layer, columns between the two halves of the feed-forward layer.
        experts: columns between the two halves of every expert.
        hidden: columns of what each half of a layer adds.
        vocab: columns of the logits.
    """

    rank: int
    ranks: int
    whole: Blueprint = field(repr=False)
    heads: tuple[Span, ...]
    keys: Span
    states: Span | None
    ffn: tuple[Span, ...]
    experts: Span | None
    hidden: Span
    vocab: Span


@dataclass(frozen=True)
class Blueprint:
    """A decoder. The defaults are Llama's (Touvron et al., 2023).

    Attributes:
        architecture: GGUF's name of the architecture.
        ffn_size: width of the feed-forward layer; of one expert, where all layers have experts.
        context_length: tokens of the longest sequence that the model was made for.
        norm_eps: epsilon of every RMSNorm.
        ropes: RoPE of each layer; None for a layer without RoPE.
        windows: of each layer, how many tokens a token attends to at most, itself included; None is
            all.
        tied: whether the output head is the embedding.
        norm_before, norm_after: whether each half of a layer has an RMSNorm on its input, and on
            its output.
        norm_offset: added to the stored weights of every RMSNorm (1 where they are stored as w of 1
            + w).
        ffn_norm: GGUF's name of the norm before the feed-forward half; GPT-OSS's is named after its
            place after attention.
        qk_norm: an RMSNorm of queries and keys before they are rotated: of each head, or over the
            whole width.
        qkv_bias, output_bias: whether the projections into and out of attention have biases.
        fused_qkv, fused_gate_up: whether the checkpoint stores these matrices as one.
        activation: of the gate: SiLU, GELU (tanh), ReLU, or the clamped SwiGLU of GPT-OSS.
        ffn_gate: whether the feed-forward layer has a gate; if not, the matrix up serves as gate,
            too.
        ffn_layers: layers with a feed-forward layer; None for all.
        embedding_scale, residual_scale, logit_scale: multiply the embedding, what each half adds,
            and the logits.
        attention_scale: multiplies the products of queries and keys; None is 1 / sqrt(head_dim).
        attention_softcap, logit_softcap: c in c * tanh(x / c), of scores and of logits; None is
            none.
        sinks: whether each head has a learned logit that takes part in the softmax and has no
            value.
        experts: None for a dense model.
        dense_layers: how many of the first layers have a feed-forward layer in place of experts.
        recurrence: what some layers have in place of attention, or beside it; None where no layer
            has one.
        recurrent_layers: their numbers, ascending; they keep a state per sequence.
        attention_layers: those that attend; None for all that are not recurrent.
        attention_gate: whether attention's result is multiplied by the sigmoid of a gate, which the
            query matrix has after each head's queries.
        draft_layers: layers after the last one that predict further tokens (`models/mtp.py`).
        output_norm: GGUF's name of the norm before the head.
        full_kv: KV heads of layers without a window, where they differ from those of the others.
        keys_as_values: whether layers without a window have the key projection as values, too.
        value_norm: whether values are normalized by head, without weights.
        shared_kv_layers: the last layers, which attend to keys and values of earlier ones.
        ffn_sizes: width of the feed-forward layer of each layer, where they differ.
        layer_embedding_size: width of the embedding that each layer adds; 0 for none.
        layer_scales: whether each layer's result is multiplied by a number of its own.
        multipliers: multipliers of a model trained with muP.
        share: what this rank computes of the model, where there are several; heads are then those
            of this rank.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    tied: bool
    norm_before: bool = True
    norm_after: bool = False
    norm_offset: float = 0.0
    ffn_norm: str = "ffn_norm"
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    activation: Activation = "silu"
    ffn_gate: bool = True
    ffn_layers: tuple[int, ...] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    experts: Experts | None = None
    dense_layers: int = 0
    recurrence: ShortConv | DeltaNet | Mamba2 | None = None
    recurrent_layers: tuple[int, ...] = ()
    attention_layers: tuple[int, ...] | None = None
    attention_gate: bool = False
    draft_layers: int = 0
    output_norm: str = "output_norm"
    full_kv: KVShape | None = None
    keys_as_values: bool = False
    value_norm: bool = False
    shared_kv_layers: int = 0
    ffn_sizes: tuple[int, ...] = ()
    layer_embedding_size: int = 0
    layer_scales: bool = False
    multipliers: Multipliers = Multipliers()
    share: Share | None = None

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def whole(self) -> Blueprint:
        """The whole model's blueprint; this one may be a rank's share."""
        return self.share.whole if self.share else self

    @property
    def norm_spans(self) -> tuple[Span | None, Span | None]:
        """A rank's columns of the query and key rows that are normalized over their whole width."""
        if self.qk_norm != "width":
            return None, None
        return self.span("heads"), self.span("keys")

    def span(self, part: SharedColumns, layer: int = 0) -> Span | None:
        """The columns that this rank computes of a part; None where it computes all of them."""
        span: Span | tuple[Span, ...] | None = getattr(self.share, part, None)
        return span[layer] if isinstance(span, tuple) else span

    def experts_of(self, layer: int) -> Experts | None:
        """The mixture in place of a layer's feed-forward layer; None where it has none."""
        return self.experts if layer >= self.dense_layers else None

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        if self.attention_layers is None:
            return layer not in self.recurrent_layers
        return layer in self.attention_layers

    def mixes(self, layer: int) -> bool:
        """Whether a layer has attention or a recurrence."""
        return self.attends(layer) or layer in self.recurrent_layers

    def has_ffn(self, layer: int) -> bool:
        """Whether a layer has a feed-forward layer, or experts in its place."""
        return self.ffn_layers is None or layer in self.ffn_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention."""
        return sum(map(self.attends, range(self.num_layers)))

    @property
    def num_kv_layers(self) -> int:
        """Layers whose keys and values are cached."""
        return self.num_attention_layers - self.shared_kv_layers

    @property
    def last_writer(self) -> int:
        """The last layer that writes KV or a state: rows are independent after it."""
        owners = range(self.num_layers - self.shared_kv_layers)
        return max(filter(self.mixes, owners))

    @cached_property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Keys and values of each layer that caches them, in order."""
        layers = range(self.num_layers - self.shared_kv_layers)
        return tuple(self.kv_shape(i) for i in layers if self.attends(i))

    @property
    def unlike_layers(self) -> bool:
        """Whether layers differ in more than windows and rotation, as Gemma 4's do."""
        return bool(self.full_kv or self.shared_kv_layers or self.layer_embedding_size)

    def kv_bytes(self, head_bytes: Callable[[int], float]) -> float:
        """Bytes of a token in the cache; `head_bytes` are those of a KV head of some size."""
        return sum(shape.num_heads * head_bytes(shape.head_dim) for shape in self.kv_shapes)

    def kv_shape(self, layer: int) -> KVShape:
        """The keys and values that a layer attends to."""
        if self.full_kv and self.windows[layer] is None:
            return self.full_kv
        return KVShape(self.num_kv_heads, self.head_dim)

    def has_values(self, layer: int) -> bool:
        """Whether a layer projects its values apart from its keys."""
        return not (self.keys_as_values and self.windows[layer] is None)

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: the last of its kind, or itself."""
        owners = self.num_layers - self.shared_kv_layers
        if layer < owners:
            return layer
        return max(i for i in range(owners) if self.windows[i] == self.windows[layer])

    def ffn_width(self, layer: int) -> int:
        """Width of a layer's feed-forward layer."""
        return self.ffn_sizes[layer] if self.ffn_sizes else self.ffn_size

    def state_bytes(self, log_rows: int = 0) -> int:
        """Bytes of a sequence's state in all recurrent layers, and of the rows of its log."""
        floats = self.recurrence.state_floats(log_rows) if self.recurrence else 0
        return 4 * len(self.recurrent_layers) * floats

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads
