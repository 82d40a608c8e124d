"""EmbeddingGemma (Vera et al., 2025): Gemma 3 with bidirectional attention, as an encoder.

A window extends half of its width to either side. The mean of the last layer's rows passes through
linear layers, whose matrices are in subfolders, and is scaled to a vector of length 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinphase.backends.encoder_protocol import Array, EncoderBackend
from twinphase.blueprint import Blueprint
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.architectures import gemma3
from twinphase.models.config import FIX, Config
from twinphase.models.tensors import check_tensors, model_tensors
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.safetensors import read_arrays, read_folder_config

DENSE_TENSORS = ("dense_2.weight", "dense_3.weight")
IDENTITY = "torch.nn.modules.linear.Identity"


def read_bidirectional(checkpoint: Checkpoint) -> Blueprint:
    """Read the blueprint of a model, and check its tensors.

    Raises:
        UnsupportedModelError: a feature is not implemented, or a tensor would be ignored; the
            message names it.
        CheckpointError: a hyper-parameter or tensor is missing or wrong; the message names it.
    """
    config = Config.of(checkpoint)
    blueprint = gemma3.describe(config)
    for field in ("attn_logit_softcapping", "attention_bias"):
        if config.fields.get(field):
            raise UnsupportedModelError(
                f"{config.name} has {field}.", "Use a model such as EmbeddingGemma without it."
            )
    check_tensors(checkpoint, dict(model_tensors(blueprint)), DENSE_TENSORS)
    return blueprint


class BidirectionalDecoder:
    """Weights on a backend, and the forward pass of several texts.

    Attributes:
        size: size of a vector.
    """

    def __init__(
        self, checkpoint: Checkpoint, blueprint: Blueprint, backend: EncoderBackend
    ) -> None:
        """Load every tensor; `blueprint` is from `read_bidirectional`."""
        self.blueprint = blueprint
        self._backend = backend
        self._embedding = backend.table(checkpoint, "token_embd.weight")
        self._weights: dict[str, Array] = {
            name: backend.matrix(checkpoint, name)
            if len(shape) == 2
            else backend.vector(checkpoint, name, blueprint.norm_offset)
            for name, shape in model_tensors(blueprint)
            if name != "token_embd.weight"
        }
        self._dense = _dense_layers(checkpoint, backend)
        self.size = blueprint.hidden_size
        for weight in self._dense:
            if weight.shape[1] != self.size:
                raise CheckpointError(
                    f"A dense layer of {checkpoint.path.name} takes {weight.shape[1]} numbers, not "
                    f"{self.size}.",
                    FIX,
                )
            self.size = weight.shape[0]

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: str, starts: Sequence[int] = ()
    ) -> list[Array]:
        """The vector of each text, float32 [size], of length 1; pairs cannot be scored.

        Each text has from 1 to the blueprint's `context_length` tokens.
        """
        backend = self._backend
        lengths = [len(text) for text in texts]
        padding = [0] * (-sum(lengths) % backend.row_multiple)
        token_ids = [token_id for text in texts for token_id in text] + padding
        positions = [at for length in lengths for at in range(length)] + padding
        x = backend.rows(self._embedding, token_ids)  # The shape is [rows, hidden_size].
        x = backend.scale(x, self.blueprint.embedding_scale)
        for index in range(self.blueprint.num_layers):
            x = self._layer(x, index, positions, lengths)
        vectors = backend.pool(self._norm(x, "output_norm"), pooling, lengths)
        if not self._dense:
            return vectors
        # Linear layers without biases do not change the direction of a scaled row.
        x = backend.stack(vectors)
        for weight in self._dense:
            x = backend.linear(x, weight, None)
        return backend.pool(x, "cls", [1] * len(vectors))

    def _layer(
        self, x: Array, index: int, positions: Sequence[int], lengths: Sequence[int]
    ) -> Array:
        backend = self._backend
        blueprint = self.blueprint
        prefix = f"blk.{index}."
        rope = blueprint.ropes[index]
        window = blueprint.windows[index]
        assert rope is not None, "every layer of Gemma 3 rotates"
        h = self._norm(x, f"{prefix}attn_norm")
        q, k, v = (self._linear(h, f"{prefix}attn_{name}") for name in "qkv")
        q = backend.rotate(self._norm(q, f"{prefix}attn_q_norm"), rope, positions)
        k = backend.rotate(self._norm(k, f"{prefix}attn_k_norm"), rope, positions)
        h = backend.attention(
            q,
            k,
            v,
            blueprint.num_heads,
            lengths,
            scale=blueprint.scale,
            reach=None if window is None else window // 2,
        )
        h = self._linear(h, f"{prefix}attn_output")
        x = backend.add(x, self._norm(h, f"{prefix}post_attention_norm"))
        h = self._norm(x, f"{prefix}{blueprint.ffn_norm}")
        gate, up = (self._linear(h, f"{prefix}ffn_{name}") for name in ("gate", "up"))
        h = self._linear(backend.gelu_mul(gate, up), f"{prefix}ffn_down")
        return backend.add(x, self._norm(h, f"{prefix}post_ffw_norm"))

    def _linear(self, x: Array, name: str) -> Array:
        return self._backend.linear(x, self._weights[f"{name}.weight"], None)

    def _norm(self, x: Array, name: str) -> Array:
        """RMSNorm of each row, or of each head, depending on the weight's width."""
        return self._backend.rms_norm(x, self._weights[f"{name}.weight"], self.blueprint.norm_eps)


def _dense_layers(checkpoint: Checkpoint, backend: EncoderBackend) -> list[Array]:
    """The matrices after pooling, [outputs, inputs], in sentence-transformers' order."""
    if checkpoint.config is None:
        names = [name for name in DENSE_TENSORS if name in checkpoint.tensors]
        return [backend.matrix(checkpoint, name) for name in names]
    found = []
    for folder in sorted(checkpoint.path.glob("[0-9]_Dense")):
        settings = read_folder_config(folder)
        function = settings.get("activation_function", IDENTITY)
        if function != IDENTITY or settings.get("bias"):
            raise UnsupportedModelError(
                f"{folder} has a bias, or the activation {str(function)[:80]!r}.",
                "Use a model whose dense layers have neither.",
            )
        arrays = read_arrays(folder)
        if arrays.keys() != {"linear.weight"} or arrays["linear.weight"].ndim != 2:
            raise CheckpointError(f"{folder} has other tensors than one matrix.", FIX)
        found.append(arrays["linear.weight"])
    return found
