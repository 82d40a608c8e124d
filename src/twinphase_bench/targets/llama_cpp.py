"""llama.cpp in this process, through llama-cpp-python's low-level binding.

The low-level calls avoid the Python sampling of its high-level class, so that the figures are those
of llama.cpp itself. Each sequence of a batch has its own KV stream.
"""

from __future__ import annotations

import ctypes
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from twinphase import (
    ContextLengthError,
    ModelNotFoundError,
    TwinphaseError,
    UnsupportedModelError,
    available_cores,
)
from twinphase_bench.extras import require
from twinphase_bench.targets.static_batch import Generated
from twinphase_bench.targets.target import TargetFacts

PREFILL = (
    "llama_decode of the whole prompt into an empty KV cache, logits of the last position, argmax "
    "of them."
)
DECODE = "llama_decode of one token for each sequence, and argmax of each one's logits."
# Lengths of contexts are rounded up to this, so that neighbouring places share one.
CONTEXT_STEP_TOKENS = 256
# This is llama.cpp's default.
UBATCH_TOKENS = 512


class LlamaCpp:
    """A GGUF file loaded by llama.cpp, with a context per batch size, created on first use."""

    def __init__(
        self, path: str, *, threads: int | None = None, flash_attention: bool = True
    ) -> None:
        """Load a file.

        Raises:
            MissingExtraError: llama-cpp-python is not installed.
            ModelNotFoundError: there is no such file.
            UnsupportedModelError: llama.cpp cannot load the file.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise ModelNotFoundError(f"There is no file {path!r}.", "Give llama-cpp:FILE.gguf.")
        self._lib = lib = require("llama_cpp", "llama-cpp-python")
        self._silence = lib.llama_log_callback(
            lambda level, text, data: None
        )  # It must exist as long as it is set.
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(file).encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise UnsupportedModelError(
                f"llama.cpp cannot load {path}.", "Try it with llama.cpp itself."
            )
        self._threads = threads or available_cores()
        self._flash_attention = flash_attention
        self.vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self._trained = int(lib.llama_model_n_ctx_train(self._model))
        self._contexts: dict[
            int, tuple[int, Any]
        ] = {}  # By number of sequences: tokens per sequence, and the context.
        description = ctypes.create_string_buffer(128)
        lib.llama_model_desc(self._model, description, len(description))
        self.facts = TargetFacts(
            name=f"llama-cpp:{path}",
            kind="llama-cpp",
            engine=f"llama.cpp of llama-cpp-python {metadata.version('llama-cpp-python')}",
            model=file.name,
            precision=f"{description.value.decode()} weights, f16 KV cache",
            context_length=self._trained,
            prefill_definition=PREFILL,
            decode_definition=DECODE,
            details={
                "threads": str(self._threads),
                "flash attention": "on" if flash_attention else "off",
                "llama.cpp was built for": lib.llama_print_system_info().decode().strip(),
            },
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Generated:
        """Prefill whole prompts, as many per call as fill an internal batch, then decode."""
        batch = len(prompts)
        length = len(prompts[0])
        context = self._context(batch, length + num_tokens)
        # This is a tenth faster than all prompts in one call.
        group = max(1, UBATCH_TOKENS // length)
        buffer = self._lib.llama_batch_init(max(group * length, batch), 0, 1)
        try:
            last: list[int] = []
            began = time.perf_counter()
            for first in range(0, batch, group):
                last += self._decode(context, buffer, prompts[first : first + group], 0, first)
            step_ends = [time.perf_counter()]
            for step in range(num_tokens - 1):
                last = self._decode(context, buffer, [[token] for token in last], length + step)
                step_ends.append(time.perf_counter())
        finally:
            self._lib.llama_batch_free(buffer)
        return Generated(began, step_ends, last)

    def close(self) -> None:
        """Free the contexts and the model."""
        for _, context in self._contexts.values():
            self._lib.llama_free(context)
        self._contexts.clear()
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = None

    def _context(self, batch: int, length: int) -> Any:
        """An empty context for `batch` sequences of at least `length` tokens."""
        lib = self._lib
        if length > self._trained:
            raise ContextLengthError(
                f"{length:,} tokens: the model was trained for {self._trained:,}."
            )
        size, context = self._contexts.get(batch, (0, None))
        if size < length:
            if context:
                lib.llama_free(context)
            # A single sequence gets the whole context at once, because its lengths come in random
            # order.
            size = (
                self._trained
                if batch == 1
                else min(self._trained, -(-length // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS)
            )
            context = self._new_context(batch, size)
            self._contexts[batch] = size, context
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        return context

    def _new_context(self, batch: int, length: int) -> Any:
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx = length * batch
        params.n_batch = max(length, batch, UBATCH_TOKENS)
        params.n_ubatch = UBATCH_TOKENS
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = int(self._flash_attention)
        params.kv_unified = (
            False  # In a unified cache, every token would scan the others' keys under a mask.
        )
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise TwinphaseError(
                f"llama.cpp made no context for {batch} sequences of {length:,} tokens."
            )
        buffer = lib.llama_batch_init(batch, 0, 1)
        try:
            self._decode(
                context, buffer, [[1]] * batch, 0
            )  # This touches the context's memory before the clock starts.
        finally:
            lib.llama_batch_free(buffer)
        return context

    def _decode(
        self, context: Any, buffer: Any, pieces: list[list[int]], position: int, first: int = 0
    ) -> list[int]:
        """Decode all pieces in one call, at `position` of sequences from `first`; new tokens."""
        rows = _fill(buffer, pieces, position, first)
        status = self._lib.llama_decode(context, buffer)
        if status:
            raise TwinphaseError(
                f"llama_decode returned {status}.", "Its context may be too small."
            )
        return [self._argmax(context, row) for row in rows]

    def _argmax(self, context: Any, row: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def _fill(buffer: Any, pieces: list[list[int]], position: int, first: int) -> list[int]:
    """Fill the buffer with one piece per sequence; return the rows with logits."""
    row = 0
    rows = []
    for sequence, piece in enumerate(pieces, first):
        for offset, token in enumerate(piece):
            buffer.token[row] = token
            buffer.pos[row] = position + offset
            buffer.n_seq_id[row] = 1
            buffer.seq_id[row][0] = sequence
            buffer.logits[row] = int(offset == len(piece) - 1)
            row += 1
        rows.append(row - 1)
    buffer.n_tokens = row
    return rows
