"""llama.cpp in this process, through llama-cpp-python's low-level binding.

The low-level calls leave out the Python sampling of its high-level class: the figures are those of llama.cpp itself.
Batches are as wide as asked for, each sequence with a KV stream of its own.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from twinphase.bench.extras import require
from twinphase.bench.targets.prompts import FreshIds
from twinphase.bench.targets.target import DecodeSample, PrefillSample, TargetFacts
from twinphase.config import available_cores
from twinphase.errors import ContextLengthError, ModelNotFoundError, TwinphaseError, UnsupportedModelError

__all__ = ["LlamaCppTarget"]

PREFILL = "llama_decode of the whole prompt into an empty KV cache, logits of the last position, argmax of them."
DECODE = "llama_decode of one token for each sequence, and argmax of each one's logits."
ROUND_TO = 256  # tokens: contexts are made for lengths rounded up, so that neighbouring places share one


class LlamaCppTarget:
    """A GGUF file loaded by llama.cpp, with a context for each size of batch, made when first asked for."""

    def __init__(self, path: str, *, threads: int | None = None, seed: int = 0) -> None:
        """Load a file.

        Raises:
            MissingExtraError: llama-cpp-python is not installed.
            ModelNotFoundError: no such file.
            UnsupportedModelError: llama.cpp cannot load it.
        """
        if not Path(path).expanduser().is_file():
            raise ModelNotFoundError(f"There is no file {path!r}.", "Give llama-cpp:FILE.gguf.")
        self._lib = lib = require("llama_cpp", "llama-cpp-python")
        self._keep_silent = lib.llama_log_callback(lambda level, text, data: None)  # it lives as long as it is set
        lib.llama_log_set(self._keep_silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(str(Path(path).expanduser()).encode(), params)
        if not self._model:
            raise UnsupportedModelError(f"llama.cpp cannot load {path}.", "Try it with llama.cpp itself.")
        self._threads = threads or available_cores()
        self._vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self._trained = int(lib.llama_model_n_ctx_train(self._model))
        self._ids = FreshIds(self._vocab, seed)
        self._contexts: dict[int, tuple[int, Any]] = {}  # by sequences: tokens of each, and the context
        description = ctypes.create_string_buffer(128)
        lib.llama_model_desc(self._model, description, len(description))
        self.facts = TargetFacts(
            name=f"llama-cpp:{path}",
            kind="llama-cpp",
            engine=f"llama.cpp of llama-cpp-python {metadata.version('llama-cpp-python')}",
            model=Path(path).name,
            precision=f"{description.value.decode()} weights, f16 KV cache",
            context_length=self._trained,
            prefill_definition=PREFILL,
            decode_definition=DECODE,
            details={
                "threads": str(self._threads),
                "flash attention": "on",
                "llama.cpp was built for": lib.llama_print_system_info().decode().strip(),
            },
        )

    def prefill(self, num_tokens: int) -> PrefillSample:
        """Time one prompt's prefill."""
        context = self._context(1, num_tokens + 1)
        prompt = self._ids.take(num_tokens)
        with self._buffer(num_tokens) as buffer:
            rows = _fill(buffer, [prompt], 0, 0)
            start = time.perf_counter()
            self._run(context, buffer, rows)
            return PrefillSample(num_tokens, time.perf_counter() - start)

    def decode(self, position: int, batch: int, num_tokens: int) -> DecodeSample:
        """Time `num_tokens` steps of `batch` sequences; `gaps` has one entry a step."""
        context = self._context(batch, position + num_tokens + 1)
        with self._buffer(max(position, batch)) as buffer:
            last = []
            for sequence in range(batch):
                last += self._decode(context, buffer, [self._ids.take(position)], 0, sequence)
            gaps = []
            for step in range(num_tokens):
                start = time.perf_counter()
                last = self._decode(context, buffer, [[token] for token in last], position + step)
                gaps.append(time.perf_counter() - start)
        return DecodeSample(position + (num_tokens - 1) / 2, batch, tuple(gaps))

    def close(self) -> None:
        """Free contexts and model."""
        for _, context in self._contexts.values():
            self._lib.llama_free(context)
        self._contexts.clear()
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = None

    def _context(self, batch: int, length: int) -> Any:
        """An empty context for `batch` sequences of at least `length` tokens."""
        if length > self._trained:
            raise ContextLengthError(f"{length:,} tokens: the model was trained for {self._trained:,}.")
        size, context = self._contexts.get(batch, (0, None))
        if size < length:
            if context:
                self._lib.llama_free(context)
            # A single sequence gets the whole context at once: its lengths come in random order.
            size = self._trained if batch == 1 else min(self._trained, -(-length // ROUND_TO) * ROUND_TO)
            context = self._new_context(batch, size)
            self._contexts[batch] = size, context
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        return context

    def _new_context(self, batch: int, length: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = length * batch
        params.n_batch = max(length, batch)
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = 1
        params.kv_unified = False  # a unified cache makes every token scan the others' keys under a mask
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise TwinphaseError(f"llama.cpp made no context for {batch} sequences of {length:,} tokens.")
        with self._buffer(batch) as buffer:  # its memory is touched before a clock starts
            self._decode(context, buffer, [[1]] * batch, 0)
        return context

    @contextmanager
    def _buffer(self, tokens: int) -> Iterator[Any]:
        buffer = self._lib.llama_batch_init(tokens, 0, 1)
        try:
            yield buffer
        finally:
            self._lib.llama_batch_free(buffer)

    def _decode(self, context: Any, buffer: Any, pieces: list[list[int]], position: int, first: int = 0) -> list[int]:
        """One call for all pieces, at `position` of the sequences from `first` on; the next token of each."""
        return self._run(context, buffer, _fill(buffer, pieces, position, first))

    def _run(self, context: Any, buffer: Any, rows: list[int]) -> list[int]:
        """Compute what the buffer holds; the most likely token of each of those rows."""
        status = self._lib.llama_decode(context, buffer)
        if status:
            raise TwinphaseError(f"llama_decode returned {status}.", "Its context may be too small.")
        return [self._argmax(context, row) for row in rows]

    def _argmax(self, context: Any, row: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


def _fill(buffer: Any, pieces: list[list[int]], position: int, first: int) -> list[int]:
    """Lay one piece a sequence into the buffer; the rows of their last tokens, which get logits."""
    row, rows = 0, []
    for sequence, piece in enumerate(pieces, first):
        for offset, token in enumerate(piece):
            buffer.token[row], buffer.pos[row] = token, position + offset
            buffer.n_seq_id[row], buffer.seq_id[row][0] = 1, sequence
            buffer.logits[row] = int(offset == len(piece) - 1)
            row += 1
        rows.append(row - 1)
    buffer.n_tokens = row
    return rows
