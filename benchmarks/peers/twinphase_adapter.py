"""twinphase itself, driven step by step.

For: `versus_peers.py`. The engine is stepped by hand in this process, as vLLM is, so that the time of each token is
seen and no text is made. Not for: the server, or the ledger's own account of the same time. Not by
`twinphase.bench.targets.stepped`: `--python` may name the environment of a version that has none.

Options: `kv_cache_dtype` (str).

(The file is not called `twinphase.py`: it would hide the package of that name.)
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from protocol import LoadRequest, Timing, serve

import twinphase
from twinphase import LLM, SamplingParams
from twinphase.config import EngineConfig
from twinphase.request import Request


class Twinphase:
    """One engine with its default settings but for its size, and without prefix cache."""

    def __init__(self, request: LoadRequest) -> None:
        settings: dict[str, Any] = {"threads": request.threads, **request.options}
        if request.max_seqs > 1:
            block = EngineConfig().block_size
            settings["max_num_seqs"] = request.max_seqs
            settings["max_model_len"] = request.max_len
            settings["num_kv_blocks"] = -(-max(request.kv_tokens, request.max_len) // block) + request.max_seqs
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := set(settings) - known:
            raise RuntimeError(f"this version of twinphase has no {', '.join(sorted(unknown))}")
        if "enable_prefix_caching" in known:
            settings["enable_prefix_caching"] = False
        self._llm = LLM(model=request.model, **settings)
        self._requests = 0
        self._widest = 0  # requests that one step of the last run advanced, at the most

    def conditions(self) -> dict[str, str]:
        """Version, and the precision of the checkpoint, which the kernels keep."""
        return {
            "version": f"twinphase {twinphase.__version__}",
            "precision": f"{self._llm.checkpoint.path.name}, {self._llm.config}",
        }

    def _submit(self, tokens: list[int], n: int) -> Request:
        self._requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        request = Request(str(self._requests), tokens, params)
        self._llm.engine.add_request(request)
        return request

    def _run(self, requests: list[Request]) -> tuple[float, float]:
        """Step until idle; return when the first token of the first request came, and when the last step ended."""
        engine = self._llm.engine
        first = 0.0
        end = 0.0
        self._widest = 0
        while engine.has_work:
            result = engine.step()
            end = time.perf_counter()
            self._widest = max(self._widest, len(result.batch.scheduled))
            if not first and requests[0].output_token_ids:
                first = end
        return first, end

    def _check(self, requests: list[Request], n: int) -> None:
        for request in requests:
            if len(request.output_token_ids) != n:
                raise RuntimeError(f"{len(request.output_token_ids)} tokens came out, {n} were asked for")
            if request.num_cached_tokens:
                raise RuntimeError(f"{request.num_cached_tokens} prompt tokens came from a cache")

    def prefill(self, tokens: list[int]) -> Timing:
        """Token ids in to first token out."""
        start = time.perf_counter()
        request = self._submit(tokens, 1)
        first, _ = self._run([request])
        self._check([request], 1)
        return Timing(first - start, 1, request.output_token_ids)

    def decode(self, tokens: list[int], n: int) -> Timing:
        """`n` further tokens after the first."""
        request = self._submit(tokens, n + 1)
        first, end = self._run([request])
        self._check([request], n + 1)
        return Timing(end - first, n, request.output_token_ids)

    def batch(self, prompts: list[list[int]], n: int) -> Timing:
        """All prompts submitted before the first step."""
        start = time.perf_counter()
        requests = [self._submit(prompt, n) for prompt in prompts]
        _, end = self._run(requests)
        self._check(requests, n)
        last = [request.output_token_ids[-1] for request in requests]
        return Timing(end - start, n * len(prompts), last, self._widest)


if __name__ == "__main__":
    serve(Twinphase)
