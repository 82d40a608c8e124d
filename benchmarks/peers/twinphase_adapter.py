"""twinphase itself, driven step by step.

For: `versus_peers.py`. The engine is stepped by hand in this process, as vLLM is, so that the time of each token is
seen and no text is made. Not for: the server, or the ledger's own account of the same time.

(The file is not called `twinphase.py`: it would hide the package of that name.)
"""

from __future__ import annotations

import time

from protocol import LoadRequest, Timing, serve

import twinphase
from twinphase import LLM, SamplingParams
from twinphase.request import Request


class Twinphase:
    """One engine with its default settings."""

    def __init__(self, request: LoadRequest) -> None:
        self._llm = LLM(model=request.model, threads=request.threads)
        self._requests = 0

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
        while engine.has_work:
            engine.step()
            end = time.perf_counter()
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
        return Timing(end - start, n * len(prompts), [request.output_token_ids[-1] for request in requests])


if __name__ == "__main__":
    serve(Twinphase)
