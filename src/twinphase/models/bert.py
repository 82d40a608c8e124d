"""BERT, the encoder of most small embedding models: every token sees every other.

Learned positions and token types are added to the words; each half of a layer is followed by
LayerNorm (Devlin et al., 2018). The last layer's rows are pooled to one vector of length 1. Not for
decoders, whose embeddings are their last hidden state (`decoder.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twinphase.backends.encoder_protocol import Array, EncoderBackend
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.config import FIX, Config
from twinphase.models.tensors import check_tensors
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.safetensors_header import strict_json

# The model type of config.json, and GGUF's name.
HF = {"bert": "bert"}
GELU = ("gelu", "gelu_python")
# llama.cpp's enum llama_pooling_type, and sentence-transformers' flags in 1_Pooling/config.json.
# 0 means that the model leaves the choice to its user.
GGUF_POOLING = {0: "mean", 1: "mean", 2: "cls", 3: "last"}
FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class BertShape:
    """What differs between BERT models.

    Attributes:
        max_positions: rows of the position table, which is the longest text in tokens.
        token_types: rows of the table; all tokens of a text are of type 0.
        pooling: "mean", "cls" or "last", as the model was trained.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    token_types: int
    norm_eps: float
    pooling: str


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Whether the model is one of this file."""
    return checkpoint.architecture in HF.values()


def read_bert_shape(checkpoint: Checkpoint) -> BertShape:
    """What the model is made of, once its tensors are known to be right.

    Raises:
        UnsupportedModelError: a feature that is not implemented, or a tensor that would be ignored;
            it is named.
        CheckpointError: a hyper-parameter or tensor is missing or wrong; it is named.
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
    types = checkpoint.tensors.get("token_types.weight")
    shape = BertShape(
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=config.integer("num_attention_heads"),
        ffn_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        token_types=types.shape[0] if types is not None and len(types.shape) == 2 else 2,
        norm_eps=config.real("layer_norm_eps", 1e-12),
        pooling=_pooling(checkpoint, config),
    )
    if shape.hidden_size % shape.num_heads:
        raise CheckpointError(
            f"{config.name}: {shape.hidden_size} does not divide by {shape.num_heads} heads.", FIX
        )
    check_tensors(checkpoint, dict(_tensors(shape)))
    return shape


def _pooling(checkpoint: Checkpoint, config: Config) -> str:
    """As the file or sentence-transformers' folder says; mean, where nothing does."""
    if checkpoint.config is None:
        number = config.fields.get("pooling_type", 1)
        if number not in GGUF_POOLING:
            raise UnsupportedModelError(
                f"{config.name} has pooling_type {number!r}.", "Use mean, cls or last pooling."
            )
        return GGUF_POOLING[number]
    path = checkpoint.path / "1_Pooling" / "config.json"
    if not path.is_file():
        return "mean"
    settings = strict_json(path.read_bytes(), str(path), FIX)
    flags = [
        name
        for name, value in settings.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    if len(flags) != 1 or flags[0] not in FLAGS:
        raise UnsupportedModelError(
            f"{config.name} pools by {', '.join(flags)[:200] or 'nothing'}.",
            "Use a model with mean, cls or last pooling.",
        )
    return FLAGS[flags[0]]


def _tensors(shape: BertShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(GGUF's name, row-major shape) of every tensor."""
    hidden = shape.hidden_size
    ffn = shape.ffn_size
    yield "token_embd.weight", (shape.vocab_size, hidden)
    yield "position_embd.weight", (shape.max_positions, hidden)
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


class Bert:
    """Weights on a backend, and the forward pass of several texts."""

    def __init__(self, checkpoint: Checkpoint, shape: BertShape, backend: EncoderBackend) -> None:
        """Load every tensor; `shape` is that of `read_bert_shape`."""
        self.shape = shape
        self._backend = backend
        self._weights: dict[str, Array] = {
            name: backend.matrix(checkpoint, name)
            if len(size) == 2
            else backend.vector(checkpoint, name)
            for name, size in _tensors(shape)
        }

    def embed(self, texts: Sequence[Sequence[int]], pooling: str) -> list[Array]:
        """The vector of each text, float32 [hidden_size], of length 1.

        Each has at least one token, and at most `max_positions`.
        """
        backend = self._backend
        weights = self._weights
        lengths = [len(text) for text in texts]
        padding = [0] * (-sum(lengths) % backend.row_multiple)
        token_ids = [token_id for text in texts for token_id in text] + padding
        positions = [at for length in lengths for at in range(length)] + padding
        x = backend.rows(weights["token_embd.weight"], token_ids)  # [rows, hidden_size]
        x = backend.add(x, backend.rows(weights["token_types.weight"], [0]))
        x = backend.add(x, backend.rows(weights["position_embd.weight"], positions))
        x = self._norm(x, "token_embd_norm")
        for i in range(self.shape.num_layers):
            x = self._layer(x, f"blk.{i}.", lengths)
        return backend.pool(x, pooling, lengths)

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
