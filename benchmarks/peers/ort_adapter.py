"""onnxruntime-genai; a fresh generator for each measurement, made outside the clock."""

from __future__ import annotations

import json
import time

import numpy as np
import onnxruntime_genai as og
from protocol import LoadRequest, Timing, serve, version


class OrtGenai:
    def __init__(self, request: LoadRequest) -> None:
        config = og.Config(request.model)
        session = {"intra_op_num_threads": request.threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = og.Model(config)
        self._max_len = request.max_len
        precision = f"{request.options['weights']} weights, int8 activations"
        self.conditions = {"version": version("onnxruntime-genai"), "precision": precision}

    def generate(self, prompts: list[list[int]], n: int) -> Timing:
        batch = len(prompts)
        length = len(prompts[0])
        params = og.GeneratorParams(self._model)
        # min_length keeps end-of-text from being chosen.
        params.set_search_options(
            max_length=min(length + n, self._max_len),
            min_length=length + n,
            do_sample=False,
            batch_size=batch,
        )
        generator = og.Generator(self._model, params)
        ids = np.array(prompts, dtype=np.int32)
        times: list[float] = []
        produced: list[int] = []
        start = time.perf_counter()
        generator.append_tokens(ids if batch > 1 else ids[0])
        for _ in range(n):
            generator.generate_next_token()
            produced.append(int(generator.get_next_tokens()[0]))
            times.append(time.perf_counter())
        return Timing(
            times[0] - start, times[-1] - start, batch * length, n * batch, produced, batch
        )


if __name__ == "__main__":
    serve(OrtGenai)
