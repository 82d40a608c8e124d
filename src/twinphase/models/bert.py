"""BERT, the encoder of most small embedding models, with bidirectional attention.

Learned positions and token types are added to the word embeddings; LayerNorm follows each half of a
layer (Devlin et al., 2018). The last layer's rows are pooled to one vector of length 1, or, in a
cross-encoder, a head computes a score from the first row of a pair of texts (Nogueira and Cho,
2019). Embeddings by decoders are their last hidden state (`decoder.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from twinphase.backends.encoder_protocol import Array, EncoderBackend
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.config import FIX, Config
from twinphase.models.tasks import HEAD, is_raw_score, own_pooling
from twinphase.models.tensors import check_tensors
from twinphase.weights.checkpoint import Checkpoint

# The model types of config.json, and GGUF's name.
HF = {"bert": "bert", "roberta": "bert", "xlm-roberta": "bert"}
GELU = ("gelu", "gelu_python")


@dataclass(frozen=True)
class BertShape:
    """The differences between BERT models.

    Attributes:
        context_length: maximum tokens of a text.
        first_position: row of the position table for a text's first token; earlier rows are
            RoBERTa's padding, which a GGUF file omits.
        token_types: rows of the type table; the second text of a pair has type 1 if it exists, all
            other text has type 0.
        pooling: "mean", "cls" or "last", as the model was trained; "rank" for a cross-encoder.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    context_length: int
    first_position: int
    token_types: int
    norm_eps: float
    pooling: str


def read_bert_shape(checkpoint: Checkpoint) -> BertShape:
    """Read the shape of a model, and check its tensors.

    Raises:
        UnsupportedModelError: a feature is not implemented, or a tensor would be ignored; the
            message names it.
        CheckpointError: a hyper-parameter or tensor is missing or wrong; the message names it.
    """
    config = Config.of(checkpoint)
    fields = config.fields
    for field, known in {"hidden_act": GELU, "position_embedding_type": ("absolute",)}.items():
        if fields.get(field, known[0]) not in known:
            raise UnsupportedModelError(
                f"{config.name} has {field} {str(fields[field])[:80]!r}.",
                f"Use a model with {known[0]}.",
            )
    if fields.get("is_decoder") or checkpoint.metadata.get("bert.attention.causal"):
        raise UnsupportedModelError(
            f"{config.name} is a BERT that was made a decoder.", "Use an encoder."
        )
    pooling = own_pooling(checkpoint) or "mean"
    if pooling == "rank":
        _check_head(checkpoint, config)
    types = checkpoint.tensors.get("token_types.weight")
    padded = fields.get("model_type") in ("roberta", "xlm-roberta")
    first_position = config.integer("pad_token_id", 1, least=0) + 1 if padded else 0
    shape = BertShape(
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=config.integer("num_attention_heads"),
        ffn_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        context_length=config.integer("max_position_embeddings", least=first_position + 1)
        - first_position,
        first_position=first_position,
        token_types=types.shape[0] if types is not None and len(types.shape) == 2 else 2,
        norm_eps=config.real("layer_norm_eps", 1e-12),
        pooling=pooling,
    )
    if shape.hidden_size % shape.num_heads:
        raise CheckpointError(
            f"{config.name}: {shape.hidden_size} does not divide by {shape.num_heads} heads.", FIX
        )
    check_tensors(checkpoint, dict(_tensors(shape)))
    return shape


def _check_head(checkpoint: Checkpoint, config: Config) -> None:
    """Refuse a head that does not compute exactly one score."""
    is_raw_score(checkpoint)
    if HEAD not in checkpoint.tensors:
        raise UnsupportedModelError(
            f"{config.name} has pooling_type 4 (rank), but no head ({HEAD}).", FIX
        )
    labels = checkpoint.tensors[HEAD].shape[0]
    if labels != 1:
        raise UnsupportedModelError(
            f"{config.name} has a head of {labels} labels: it classifies texts.",
            "Use a reranker, whose head has one label.",
        )
    if "cls.weight" not in checkpoint.tensors:
        raise UnsupportedModelError(
            f"{config.name} lacks the first half of its head (cls.weight), which llama.cpp's "
            "converter leaves out for BERT.",
            "Use the model's Hugging Face folder.",
        )


def _tensors(shape: BertShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(GGUF's name, row-major shape) of every tensor."""
    hidden = shape.hidden_size
    ffn = shape.ffn_size
    yield "token_embd.weight", (shape.vocab_size, hidden)
    yield "position_embd.weight", (shape.first_position + shape.context_length, hidden)
    yield "token_types.weight", (shape.token_types, hidden)
    norms = ["token_embd_norm"]
    for i in range(shape.num_layers):
        square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (hidden, hidden))
        for name, size in {**square, "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}.items():
            yield f"blk.{i}.{name}.weight", size
            yield f"blk.{i}.{name}.bias", size[:1]
        norms += [f"blk.{i}.attn_output_norm", f"blk.{i}.layer_output_norm"]
    for name in norms:
        yield f"{name}.weight", (hidden,)
        yield f"{name}.bias", (hidden,)
    if shape.pooling == "rank":
        for name, width in {"cls": hidden, "cls.output": 1}.items():
            yield f"{name}.weight", (width, hidden)
            yield f"{name}.bias", (width,)


class Bert:
    """Weights on a backend, and the forward pass of several texts.

    Attributes:
        size: size of a vector; 1 for a score.
    """

    def __init__(self, checkpoint: Checkpoint, shape: BertShape, backend: EncoderBackend) -> None:
        """Load every tensor; `shape` is from `read_bert_shape`."""
        self.shape = shape
        self.size = 1 if shape.pooling == "rank" else shape.hidden_size
        self._backend = backend
        self._weights: dict[str, Array] = {
            name: backend.vector(checkpoint, name)
            if len(size) == 1
            else backend.matrix(checkpoint, name)
            if name.startswith(("blk.", "cls"))
            else backend.table(checkpoint, name)
            for name, size in _tensors(shape)
        }

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: str, starts: Sequence[int] = ()
    ) -> list[Array]:
        """The vector of each text, float32 [hidden_size], of length 1; for "rank", pairs' scores.

        A score is float32 [1], before any activation; `starts` are the starts of the pairs' second
        texts. Each text has from 1 to `context_length` tokens.
        """
        backend = self._backend
        weights = self._weights
        lengths = [len(text) for text in texts]
        padding = self._padding(sum(lengths))
        types = [0]  # Token types of all rows.
        if starts and self.shape.token_types > 1:
            types = [
                int(at >= start)
                for start, length in zip(starts, lengths, strict=True)
                for at in range(length)
            ] + padding
        token_ids = [token_id for text in texts for token_id in text] + padding
        first = self.shape.first_position
        positions = [first + at for length in lengths for at in range(length)] + padding
        # The shape is [rows, hidden_size].
        x = backend.rows(weights["token_embd.weight"], token_ids)
        x = backend.add(x, backend.rows(weights["token_types.weight"], types))
        x = backend.add(x, backend.rows(weights["position_embd.weight"], positions))
        x = self._norm(x, "token_embd_norm")
        for i in range(self.shape.num_layers):
            x = self._layer(x, f"blk.{i}.", lengths)
        return self._scores(x, lengths) if pooling == "rank" else backend.pool(x, pooling, lengths)

    def _scores(self, x: Array, lengths: Sequence[int]) -> list[Array]:
        """Apply the head to each text's first row: a linear layer, tanh, and a linear layer."""
        backend = self._backend
        firsts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        x = backend.rows(x, firsts + self._padding(len(firsts)))
        x = self._linear(backend.tanh(self._linear(x, "cls")), "cls.output")
        return [x[number] for number in range(len(lengths))]

    def _padding(self, num_rows: int) -> list[int]:
        """Padding rows or indices, up to a multiple of the backend's `row_multiple`."""
        return [0] * (-num_rows % self._backend.row_multiple)

    def _layer(self, x: Array, prefix: str, lengths: Sequence[int]) -> Array:
        backend = self._backend
        q, k, v = (self._linear(x, f"{prefix}attn_{name}") for name in "qkv")
        h = backend.attention(q, k, v, self.shape.num_heads, lengths)
        h = self._linear(h, f"{prefix}attn_output")
        x = self._norm(backend.add(h, x), f"{prefix}attn_output_norm")
        h = self._linear(backend.gelu(self._linear(x, f"{prefix}ffn_up")), f"{prefix}ffn_down")
        return self._norm(backend.add(h, x), f"{prefix}layer_output_norm")

    def _linear(self, x: Array, name: str) -> Array:
        return self._backend.linear(x, *self._pair(name))

    def _norm(self, x: Array, name: str) -> Array:
        return self._backend.layer_norm(x, *self._pair(name), self.shape.norm_eps)

    def _pair(self, name: str) -> tuple[Array, Array]:
        return self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
