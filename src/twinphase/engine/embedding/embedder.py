"""Models that embed texts or score pairs: encoders, and decoders without their head.

There is no decode phase, so there is no scheduler. Short texts are computed together, and a decoder
computes long ones in prefill chunks. A text's result has the same bits in any pass. `loading.py`
loads models that generate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import StepInputs
from twinphase.backends.encoder import NumpyEncoder, pooled
from twinphase.blueprint import Blueprint
from twinphase.config import POOLINGS, EngineConfig
from twinphase.engine.frontends.checks import Prompt, check_token_ids, task_of
from twinphase.engine.frontends.text import ModelText
from twinphase.engine.loading.loading import LoadedEngine, allocate_kv_cache, make_backend
from twinphase.engine.ranks.backend import load_on_ranks
from twinphase.errors import CheckpointError, ContextLengthError, InvalidRequestError
from twinphase.models.encoders import load_encoder, read_encoder
from twinphase.models.loader import open_model, read_blueprint
from twinphase.models.tasks import HEAD, RerankPrompt, is_encoder, own_pooling, rerank_prompt
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.hub import resolve_model
from twinphase.weights.quant import dequantize

F32 = NDArray[np.float32]

# These settings concern steps, decode or its kernels, which do not exist for embeddings.
NOT_FOR_EMBEDDINGS = ("itl_slo_ms", "trace_file", "num_kv_blocks")
# An encoder's pass has at most this number of tokens: other texts wait for its end, and more rows
# are hardly faster per token.
ENCODER_PASS_TOKENS = 256
MAX_PASS_TEXTS = 128
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
    """Computes the vectors of the texts of one pass, or the scores of its pairs."""

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: str, starts: Sequence[int] = ()
    ) -> list[F32]: ...


class LoadedEmbedder:
    """A model that embeds or scores, and its tokenizer; one thread at a time may use it.

    Attributes:
        config: configuration as resolved for this model.
        task: "embed" or "score".
        size: size of a vector; 1 if pairs are scored.
        pass_tokens: maximum tokens per pass; a longer text is computed alone.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        compile_progress: Callable[[float, int, str], None] | None = None,
        load_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Load an open model that does not generate; the callbacks are those of `LoadedEngine`."""
        self.checkpoint = checkpoint
        self.task = task_of(checkpoint, config)
        self.text = ModelText(checkpoint)
        _check_settings(config, checkpoint)
        self._model: _Model
        if is_encoder(checkpoint):
            shape = read_encoder(checkpoint)
            config = config.resolve(shape.context_length)
            encoder = load_encoder(checkpoint, shape, NumpyEncoder())
            self._model = encoder
            self.pass_tokens = ENCODER_PASS_TOKENS
            own = own_pooling(checkpoint) or "mean"
            self.size = encoder.size
            self.vocab_size = shape.vocab_size
        else:
            blueprint = read_blueprint(checkpoint, config.max_model_len)
            config = config.resolve(blueprint.context_length)
            hidden = _HiddenStates(checkpoint, blueprint, config, compile_progress, load_progress)
            self._model = hidden
            # The bits of NumPy's products depend on the number of rows, so each text is computed
            # alone.
            together = config.backend != "reference"
            self.pass_tokens = config.max_num_batched_tokens if together else 1
            made_for = own_pooling(checkpoint)
            own = made_for if made_for in POOLINGS else "last"
            prompt = rerank_prompt(checkpoint)
            if self.task == "score" and prompt is not None:
                own = "rank"
                hidden.head = _yes_minus_no(checkpoint, self.text.tokenizer, prompt)
            self.size = blueprint.hidden_size if self.task == "embed" else 1
            self.vocab_size = blueprint.vocab_size
        self._pooling = config.pooling or own
        pooling = self._pooling if self.task == "embed" else None
        self.config = replace(config, task=self.task, pooling=pooling)

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode a text to token ids, checked as `check` does."""
        token_ids = self.text.encode(prompt, self.config.max_model_len)[1]
        self.check(token_ids)
        return token_ids

    def check(self, token_ids: Sequence[int]) -> None:
        """Refuse a text that the model cannot compute.

        Raises:
            InvalidRequestError: there are no tokens, or one is not in the vocabulary.
            ContextLengthError: there are too many tokens.
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

    def embed(self, texts: Sequence[Sequence[int]], starts: Sequence[int] = ()) -> list[F32]:
        """The vectors of texts, float32 [size] each, of length 1; or the scores of pairs.

        A score is float32 [1], before any activation. `starts`: where the second text of each pair
        begins. Raises what `check` does.
        """
        for text in texts:
            self.check(text)
        # Texts of similar lengths are the fastest together.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: dict[int, F32] = {}
        for numbers in passes(order, [len(text) for text in texts], self.pass_tokens):
            found = self._model.embed(
                [texts[number] for number in numbers],
                self._pooling,
                [starts[number] for number in numbers] if starts else (),
            )
            vectors.update(zip(numbers, found, strict=True))
        return [vectors[number] for number in range(len(texts))]


def passes(order: Sequence[int], lengths: Sequence[int], num_tokens: int) -> Iterator[list[int]]:
    """Divide texts into passes of at most `num_tokens` tokens, or of one longer text."""
    numbers: list[int] = []
    room = num_tokens
    for number in order:
        if numbers and (lengths[number] > room or len(numbers) == MAX_PASS_TEXTS):
            yield numbers
            numbers = []
            room = num_tokens
        numbers.append(number)
        room -= lengths[number]
    if numbers:
        yield numbers


class _HiddenStates:
    """A decoder without its head; the hidden states of the tokens are the result.

    Attributes:
        head: weights whose product with the last token's hidden state is the score of a pair.
    """

    head: Sequence[float] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        blueprint: Blueprint,
        config: EngineConfig,
        compile_progress: Callable[[float, int, str], None] | None,
        load_progress: Callable[[int, int], None],
    ) -> None:
        """Load the model; `config` is resolved, and its KV cache holds the longest text or pass."""
        assert config.max_model_len is not None, "the configuration is resolved"
        seats = min(MAX_PASS_TEXTS, config.max_num_batched_tokens)
        num_blocks = max(
            -(-config.max_model_len // config.block_size),
            config.max_num_batched_tokens // config.block_size + seats,
        )
        config = replace(config, task="embed", max_num_seqs=seats, num_kv_blocks=num_blocks)
        backend = make_backend(config, compile_progress)
        self._model, self._backend = load_on_ranks(
            checkpoint, blueprint, config, backend, load_progress
        )
        self._chunk = config.max_num_batched_tokens
        self._block_size = config.block_size
        self._num_blocks = num_blocks
        allocate_kv_cache(self._backend, self._model.blueprint, config)

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: str, starts: Sequence[int] = ()
    ) -> list[F32]:
        """Embed texts in one pass (see `LoadedEmbedder.embed`); prefill long ones in chunks."""
        longest = max(map(len, texts))
        chunks = [self._rows(texts, start, pooling) for start in range(0, longest, self._chunk)]
        found = [np.concatenate(rows) for rows in zip(*chunks, strict=True)]
        if pooling != "rank":
            return [pooled(rows, pooling) for rows in found]
        # The sum is exact, so that its bits depend on nothing else.
        sums = [math.fsum(map(mul, rows[-1].tolist(), self.head)) for rows in found]
        return [np.array([score], np.float32) for score in sums]

    def _rows(self, texts: Sequence[Sequence[int]], start: int, pooling: str) -> list[F32]:
        """Hidden states of each text's chunk that `pooling` needs, float32 [rows, hidden_size]."""
        sizes = [min(self._chunk, len(text) - start) for text in texts]
        first_rows = np.concatenate([[0], np.cumsum(sizes)])
        width = max(-(-(start + size) // self._block_size) for size in sizes)
        # A text of several chunks is computed alone, and the first blocks hold it.
        first_blocks = np.cumsum([0] + [-(-size // self._block_size) for size in sizes[:-1]])
        positions = [np.arange(start, start + size) for size in sizes]
        wanted = [
            {
                "mean": range(size),
                "cls": range(start == 0),
            }.get(pooling, range(len(text) - 1 - start, size))
            for text, size in zip(texts, sizes, strict=True)
        ]
        inputs = StepInputs(
            token_ids=np.concatenate([text[start : start + self._chunk] for text in texts]).astype(
                np.int32
            ),
            positions=np.concatenate(positions).astype(np.int32),
            slot_mapping=np.concatenate(
                [
                    block * self._block_size + at
                    for block, at in zip(first_blocks, positions, strict=True)
                ]
            ).astype(np.int64),
            query_start=first_rows.astype(np.int32),
            block_tables=np.minimum(
                first_blocks[:, None] + np.arange(width), self._num_blocks - 1
            ).astype(np.int32),
            num_decodes=0,
            logit_rows=np.concatenate(
                [
                    row + np.array(rows, np.int32)
                    for row, rows in zip(first_rows[:-1], wanted, strict=True)
                ]
            ).astype(np.int32),
        )
        states = self._backend.execute(self._model.hidden, inputs).copy()
        return np.split(states, np.cumsum([len(rows) for rows in wanted[:-1]]))


def _yes_minus_no(
    checkpoint: Checkpoint, tokenizer: Tokenizer, prompt: RerankPrompt
) -> Sequence[float]:
    """The row of the output head for "yes" minus that for "no".

    A GGUF file may contain only these two rows.

    Raises:
        CheckpointError: the checkpoint does not have these rows.
    """
    ids = (tokenizer.token_id(prompt.yes), tokenizer.token_id(prompt.no))
    name = "output.weight" if "output.weight" in checkpoint.tensors else "token_embd.weight"
    if HEAD in checkpoint.tensors:
        name = HEAD
        ids = (0, 1)
    info = checkpoint.tensors[name]
    if any(row is None or row >= info.shape[0] for row in ids):
        raise CheckpointError(
            f"{checkpoint.path.name} has no rows for yes and no in {name}.",
            "Use Qwen3-Reranker, or fetch the model again.",
        )
    stored = checkpoint.raw(name).reshape(info.shape[0], -1)
    shape = (1, info.shape[1])
    yes, no = (dequantize(stored[row], shape, info.type)[0].tolist() for row in ids)
    return [a - b for a, b in zip(yes, no, strict=True)]


def load(
    model: str | Path,
    config: EngineConfig,
    *,
    compile_progress: Callable[[float, int, str], None] | None = None,
    load_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedEngine | LoadedEmbedder:
    """Load a model for its own task, or for the `task` that `config` names.

    Raises:
        TwinphaseError: as `LLM`.
    """
    checkpoint = open_model(resolve_model(str(model)), quantization=config.quantization)
    if task_of(checkpoint, config) != "generate":
        return LoadedEmbedder(checkpoint, config, compile_progress, load_progress)
    return LoadedEngine(
        checkpoint, config, compile_progress=compile_progress, load_progress=load_progress
    )


def _check_settings(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Refuse settings that would have no effect."""
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
