"""ik_llama.cpp, compiled by `setup.py ik` from a source folder of the user's."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from engines import IK_LIBRARY
from protocol import LoadRequest, Timing, serve


class IkLlama:
    """A GGUF file, with flash attention and its default of an f16 KV cache."""

    def __init__(self, request: LoadRequest) -> None:
        folder = Path(os.environ["PEERS_DIR"]) / request.options["build"]
        self._lib = ctypes.CDLL(str(folder / IK_LIBRARY))
        self._lib.ik_load.restype = ctypes.c_void_p
        self._lib.ik_system.restype = ctypes.c_char_p
        model = self._lib.ik_load(request.model.encode(), request.threads)
        if not model:
            raise RuntimeError(f"ik_llama.cpp cannot load {request.model}")
        self._model = ctypes.c_void_p(model)
        text = ctypes.create_string_buffer(128)
        self._lib.ik_describe(self._model, text, len(text))
        self.conditions = {
            "version": f"ik_llama.cpp ({request.options['build']})",
            "precision": f"{Path(request.model).name}, {text.value.decode()} weights, f16 KV cache",
            "ik_llama.cpp was built for": self._lib.ik_system().decode().strip(),
        }

    def generate(self, prompts: list[list[int]], n: int) -> Timing:
        """All prompts in calls of up to 512 tokens, then a token of each per call."""
        count = len(prompts)
        length = len(prompts[0])
        tokens = (ctypes.c_int * (count * length))(*(token for one in prompts for token in one))
        last = (ctypes.c_int * count)()
        ends = (ctypes.c_double * n)()
        status = self._lib.ik_generate(self._model, tokens, count, length, n, last, ends)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return Timing(ends[0], ends[n - 1], count * length, n * count, list(last), count)


if __name__ == "__main__":
    serve(IkLlama)
