"""llama.cpp, driven through llama-cpp-python's low-level binding.

For: `versus_peers.py`. The low-level calls leave out the Python sampling of the high-level class, so the figures are
those of llama.cpp itself. Not for: use as a client of llama.cpp.

Options: `flash_attention` (bool).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np
from protocol import LoadRequest, Timing, serve, version


class LlamaCpp:
    """One context for single requests, and one for each size of batch, made when first asked for."""

    def __init__(self, request: LoadRequest) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(request.model.encode(), params)
        if not self._model:
            raise RuntimeError(f"cannot load {request.model}")
        self._threads = request.threads
        self._flash = bool(request.options.get("flash_attention", True))
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context = self._new_context(request.max_len, 1)
        self._length = request.kv_tokens // request.max_seqs
        self._contexts: dict[int, ctypes.c_void_p] = {}  # by number of sequences

    def _new_context(self, length: int, sequences: int) -> ctypes.c_void_p:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = length * sequences
        params.n_batch = length * sequences
        params.n_seq_max = sequences
        params.n_threads = self._threads
        params.n_threads_batch = self._threads
        params.flash_attn_type = int(self._flash)
        # One stream a sequence: a unified cache makes every token scan the others' keys under a mask.
        params.kv_unified = False
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("cannot create a context")
        return context

    def conditions(self) -> dict[str, str]:
        """Version, and what llama.cpp says it was compiled for."""
        description = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self._model, description, len(description))
        return {
            "version": version("llama-cpp-python"),
            "precision": f"{description.value.decode()}, f16 KV, flash attention {'on' if self._flash else 'off'}",
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def _argmax(self, context: ctypes.c_void_p, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def _feed(self, tokens: Sequence[int]) -> int:
        """Append tokens to the single sequence and return the next one."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        check(llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens))))
        return self._argmax(self._context, -1)

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def prefill(self, tokens: list[int]) -> Timing:
        """Token ids in to first token out."""
        self._clear()
        start = time.perf_counter()
        first = self._feed(tokens)
        return Timing(time.perf_counter() - start, 1, [first])

    def decode(self, tokens: list[int], n: int) -> Timing:
        """`n` further tokens after the first."""
        self._clear()
        produced = [self._feed(tokens)]
        start = time.perf_counter()
        for _ in range(n):
            produced.append(self._feed(produced[-1:]))
        return Timing(time.perf_counter() - start, n, produced)

    def batch(self, prompts: list[list[int]], n: int) -> Timing:
        """The prompts, then calls of one token for every sequence.

        A context is exactly as wide as the batch, and its memory is touched before the clock starts.
        """
        if len(prompts) not in self._contexts:
            self._contexts[len(prompts)] = self._new_context(self._length, len(prompts))
        context = self._contexts[len(prompts)]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        buffer = llama_cpp.llama_batch_init(sum(len(prompt) for prompt in prompts), 0, 1)
        try:
            return self._run_batch(context, buffer, prompts, n)
        finally:
            llama_cpp.llama_batch_free(buffer)

    def _run_batch(
        self, context: ctypes.c_void_p, buffer: llama_cpp.llama_batch, prompts: list[list[int]], n: int
    ) -> Timing:
        start = time.perf_counter()
        last: list[int] = []
        # As many whole prompts a call as fill one internal batch: a tenth faster here than all of them in one call.
        group = max(1, llama_cpp.llama_n_ubatch(context) // max(len(prompt) for prompt in prompts))
        for first in range(0, len(prompts), group):
            pieces = prompts[first : first + group]
            last += self._decode(context, buffer, pieces, [0] * len(pieces), first)
        for step in range(n - 1):
            pieces = [[token] for token in last]
            last = self._decode(context, buffer, pieces, [len(prompt) + step for prompt in prompts], 0)
        return Timing(time.perf_counter() - start, n * len(prompts), last, len(last))

    def _decode(
        self,
        context: ctypes.c_void_p,
        buffer: llama_cpp.llama_batch,
        pieces: list[list[int]],
        positions: list[int],
        first: int,
    ) -> list[int]:
        """One call for all pieces, which belong to the sequences from `first` on; returns the next token of each."""
        rows = fill_batch(buffer, pieces, positions, first)
        check(llama_cpp.llama_decode(context, buffer))
        return [self._argmax(context, row) for row in rows]


def fill_batch(buffer: llama_cpp.llama_batch, pieces: list[list[int]], positions: list[int], first: int) -> list[int]:
    """Lay one piece a sequence into the batch; return the row of each piece's last token, which gets logits."""
    row = 0
    last_rows: list[int] = []
    for sequence, (piece, position) in enumerate(zip(pieces, positions, strict=True), first):
        for offset, token in enumerate(piece):
            buffer.token[row] = token
            buffer.pos[row] = position + offset
            buffer.n_seq_id[row] = 1
            buffer.seq_id[row][0] = sequence
            buffer.logits[row] = int(offset == len(piece) - 1)
            row += 1
        last_rows.append(row - 1)
    buffer.n_tokens = row
    return last_rows


def check(status: int) -> None:
    """Raise when `llama_decode` did not do all of its work."""
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status}")


if __name__ == "__main__":
    serve(LlamaCpp)
