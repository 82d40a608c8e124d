"""Models that embed texts: encoders, and decoders by their last normalized hidden state.

Nothing is sampled and nothing waits for a next token, so there is no scheduler: texts are computed
one after the other, a decoder's in prefill chunks, and the same text gives the same bits
independent of the texts before it. Not for generating (`loading.py`), nor for HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import StepInputs
from twinphase.backends.encoder import NumpyEncoder, pooled
from twinphase.blueprint import Blueprint
from twinphase.config import EngineConfig
from twinphase.engine.frontends.checks import Prompt, check_token_ids, embeds
from twinphase.engine.frontends.text import ModelText
from twinphase.engine.loading.loading import LoadedEngine, allocate_kv_cache, make_backend
from twinphase.engine.ranks.backend import load_on_ranks
from twinphase.errors import ContextLengthError, InvalidRequestError
from twinphase.models.bert import Bert, is_encoder, read_bert_shape
from twinphase.models.loader import open_model, read_blueprint
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.hub import resolve_model

F32 = NDArray[np.float32]

# Settings of steps, of tokens that follow one another, or of kernels: an embedding has none of
# these.
NOT_FOR_EMBEDDINGS = ("itl_slo_ms", "trace_file", "num_kv_blocks")
NOT_FOR_ENCODERS = ("kv_cache_dtype", "threads", "tensor_parallel_size", "isa", "device", "dtype")


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a text, of length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A text and its vector, in vLLM's shape."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


class _Model(Protocol):
    """One text at a time."""

    def embed(self, token_ids: Sequence[int], pooling: str) -> F32: ...


class LoadedEmbedder:
    """A model that embeds, and its tokenizer. Used by one thread at a time.

    Attributes:
        config: as resolved for this model.
        size: of a vector.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        compile_progress: Callable[[float, int, str], None] | None = None,
        load_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Load an open model for which `embeds` is true; callbacks as `LoadedEngine`."""
        self.checkpoint = checkpoint
        self.text = ModelText(checkpoint)
        _check_settings(config, checkpoint)
        self._model: _Model
        if is_encoder(checkpoint):
            shape = read_bert_shape(checkpoint)
            config = config.resolve(shape.max_positions)

            self._model = Bert(checkpoint, shape, NumpyEncoder())
            own = shape.pooling
            self.size = shape.hidden_size
            self.vocab_size = shape.vocab_size
        else:
            blueprint = read_blueprint(checkpoint, config.max_model_len)
            config = config.resolve(blueprint.context_length)
            self._model = _HiddenStates(
                checkpoint, blueprint, config, compile_progress, load_progress
            )
            own = "last"
            self.size = blueprint.hidden_size
            self.vocab_size = blueprint.vocab_size
        self.config = replace(config, task="embed", pooling=config.pooling or own)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, checked as `check` does."""
        token_ids = self.text.encode(prompt, self.config.max_model_len)[1]
        self.check(token_ids)
        return token_ids

    def check(self, token_ids: Sequence[int]) -> None:
        """Refuse what cannot be computed.

        Raises:
            InvalidRequestError: no tokens, or one that is not in the vocabulary.
            ContextLengthError: too many.
        """
        limit = self.config.max_model_len or 0
        if not token_ids:
            raise InvalidRequestError("The text has no tokens.", "Give at least one.")
        if len(token_ids) > limit:
            raise ContextLengthError(
                f"The text has {len(token_ids)} tokens; the model takes {limit}.",
                f"Shorten it by {len(token_ids) - limit} tokens, or embed it in parts.",
            )
        check_token_ids(token_ids, "the text", self.vocab_size)

    def embed(self, token_ids: Sequence[int]) -> F32:
        """The vector of one text, float32 [size], of length 1. Raises what `check` does."""
        self.check(token_ids)
        return self._model.embed(token_ids, self.config.pooling or "mean")


class _HiddenStates:
    """A decoder without its head: the head's input rows are the tokens' embeddings."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        blueprint: Blueprint,
        config: EngineConfig,
        compile_progress: Callable[[float, int, str], None] | None,
        load_progress: Callable[[int, int], None],
    ) -> None:
        """`config` is resolved; its KV cache holds one sequence of the longest length."""
        assert config.max_model_len is not None, "the configuration is resolved"
        num_blocks = -(-config.max_model_len // config.block_size)
        config = replace(config, task="embed", max_num_seqs=1, num_kv_blocks=num_blocks)
        backend = make_backend(config, compile_progress)
        self._model, self._backend = load_on_ranks(
            checkpoint, blueprint, config, backend, load_progress
        )
        self._chunk = config.max_num_batched_tokens
        self._block_size = config.block_size
        allocate_kv_cache(self._backend, self._model.blueprint, config)

    def embed(self, token_ids: Sequence[int], pooling: str) -> F32:
        rows = [
            self._rows(token_ids, start, pooling) for start in range(0, len(token_ids), self._chunk)
        ]
        return pooled(np.concatenate(rows), pooling)

    def _rows(self, token_ids: Sequence[int], start: int, pooling: str) -> F32:
        """Hidden states of one prefill chunk that `pooling` needs, float32 [rows, hidden_size]."""
        end = min(start + self._chunk, len(token_ids))
        wanted = {
            "mean": range(start, end),
            "cls": range(1),
            "last": range(len(token_ids) - 1, len(token_ids)),
        }[pooling]
        positions = np.arange(start, end, dtype=np.int32)
        inputs = StepInputs(
            token_ids=np.array(token_ids[start:end], np.int32),
            positions=positions,
            slot_mapping=positions.astype(np.int64),
            query_start=np.array([0, end - start], np.int32),
            block_tables=np.arange(-(-end // self._block_size), dtype=np.int32)[None],
            num_decodes=0,
            logit_rows=np.array([at - start for at in wanted if start <= at < end], np.int32),
        )
        return self._backend.execute(self._model.hidden, inputs).copy()


def load(
    model: str | Path,
    config: EngineConfig,
    *,
    compile_progress: Callable[[float, int, str], None] | None = None,
    load_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedEngine | LoadedEmbedder:
    """Load a model for what it is made for, or for the `task` that `config` names.

    Raises:
        TwinphaseError: as `LLM`.
    """
    checkpoint = open_model(resolve_model(str(model)), quantization=config.quantization)
    if embeds(checkpoint, config):
        return LoadedEmbedder(checkpoint, config, compile_progress, load_progress)
    return LoadedEngine(
        checkpoint, config, compile_progress=compile_progress, load_progress=load_progress
    )


def _check_settings(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Refuse what would change nothing."""
    plain = EngineConfig()
    encoder = is_encoder(checkpoint)
    for name in (*NOT_FOR_EMBEDDINGS, *(NOT_FOR_ENCODERS if encoder else ())):
        value = getattr(config, name)
        if value != getattr(plain, name):
            fix = (
                "Set OPENBLAS_NUM_THREADS instead: NumPy computes encoders."
                if name == "threads"
                else "Leave it out."
            )
            kind = "An encoder" if name in NOT_FOR_ENCODERS else "An embedding"
            raise InvalidRequestError(f"{name} is {value!r}. {kind} has no use for it.", fix)
