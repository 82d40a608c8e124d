"""onnxruntime-genai.

For: `versus_peers.py`. Not for: onnxruntime without its generation loop.
"""

from __future__ import annotations

import json
import time

import numpy as np
import onnxruntime_genai as og
from protocol import LoadRequest, Timing, serve, version


class OrtGenai:
    """One model; a fresh generator for each measurement, made outside the clock."""

    def __init__(self, request: LoadRequest) -> None:
        config = og.Config(request.model)
        session = {"intra_op_num_threads": request.threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = og.Model(config)
        self._max_len = request.max_len
        self._weights = str(request.options.get("weights", "?"))

    def conditions(self) -> dict[str, str]:
        """Version and precisions."""
        return {"version": version("onnxruntime-genai"), "precision": f"{self._weights} weights, int8 activations"}

    def _generator(self, batch: int, length: int) -> og.Generator:
        params = og.GeneratorParams(self._model)
        # min_length keeps end-of-text from being chosen.
        params.set_search_options(
            max_length=min(length, self._max_len), min_length=length, do_sample=False, batch_size=batch
        )
        return og.Generator(self._model, params)

    def _generate(self, prompts: list[list[int]], n: int) -> tuple[float, list[float], list[int]]:
        """Generate `n` tokens; return the start, the time of each token, and the tokens of the first prompt."""
        generator = self._generator(len(prompts), len(prompts[0]) + n)
        ids = np.array(prompts, dtype=np.int32)
        times: list[float] = []
        produced: list[int] = []
        start = time.perf_counter()
        generator.append_tokens(ids if len(prompts) > 1 else ids[0])
        for _ in range(n):
            generator.generate_next_token()
            produced.append(int(generator.get_next_tokens()[0]))
            times.append(time.perf_counter())
        return start, times, produced

    def prefill(self, tokens: list[int]) -> Timing:
        """Token ids in to first token out."""
        start, times, produced = self._generate([tokens], 1)
        return Timing(times[0] - start, 1, produced)

    def decode(self, tokens: list[int], n: int) -> Timing:
        """`n` further tokens after the first."""
        _, times, produced = self._generate([tokens], n + 1)
        return Timing(times[-1] - times[0], n, produced)

    def batch(self, prompts: list[list[int]], n: int) -> Timing:
        """Prompts of one length as a static batch."""
        start, times, produced = self._generate(prompts, n)
        return Timing(times[-1] - start, n * len(prompts), produced[-1:], len(prompts))


if __name__ == "__main__":
    serve(OrtGenai)
