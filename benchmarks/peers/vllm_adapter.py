"""vLLM on a CPU.

For: `versus_peers.py`. The engine is stepped by hand in this process, so that the time of each token is seen.
Not for: vLLM's server.

Options: `eager` (bool): skip torch.compile, which takes about a minute at every start.
"""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import LoadRequest, Timing, serve, version

MANY_REQUESTS_TOKENS = 2048  # of a step
KV_GIGABYTES = "2"  # of 23 kB a token of this model: 93,000 tokens


def configure(threads: int) -> None:
    """Settings vLLM reads from the environment when it is imported."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_GIGABYTES)


class Vllm:
    """The V1 engine in this process, prefix cache off."""

    def __init__(self, request: LoadRequest) -> None:
        configure(request.threads)
        from vllm import LLM

        self._llm = LLM(
            model=request.model,
            dtype="bfloat16",
            max_model_len=request.max_len,
            # A whole prompt in one step is best alone; of many, 2,048 tokens a step were a seventh faster than all.
            max_num_batched_tokens=request.max_len if request.max_seqs == 1 else MANY_REQUESTS_TOKENS,
            max_num_seqs=request.max_seqs,
            enable_prefix_caching=False,
            enforce_eager=bool(request.options.get("eager", False)),
        )
        self._eager = bool(request.options.get("eager", False))
        self._requests = 0
        self._widest = 0  # requests that one step of the last run advanced, at the most

    def conditions(self) -> dict[str, str]:
        """Versions and precisions."""
        mode = "eager" if self._eager else "compiled"
        return {
            "version": f"{version('vllm-cpu')}, {version('torch')}",
            "precision": f"bfloat16 weights and KV, {mode}",
        }

    def _submit(self, tokens: list[int], n: int) -> str:
        from vllm import SamplingParams

        self._requests += 1
        name = str(self._requests)
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def _run(self, times: list[float] | None = None) -> list[Any]:
        """Step until idle; note the time whenever a first request's output has grown."""
        engine = self._llm.llm_engine
        finished: list[Any] = []
        self._widest = 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            self._widest = max(self._widest, len(outputs))
            for output in outputs:
                if times is not None:
                    times.append(time.perf_counter())
                if output.finished:
                    finished.append(output)
        return finished

    def _timed(self, tokens: list[int], n: int) -> tuple[float, list[float], list[int]]:
        times: list[float] = []
        start = time.perf_counter()
        self._submit(tokens, n)
        (output,) = self._run(times)
        produced = list(output.outputs[0].token_ids)
        if len(produced) != n or len(times) != n:
            raise RuntimeError(f"{len(produced)} tokens in {len(times)} outputs, {n} were asked for")
        return start, times, produced

    def prefill(self, tokens: list[int]) -> Timing:
        """Token ids in to first token out."""
        start, times, produced = self._timed(tokens, 1)
        return Timing(times[0] - start, 1, produced)

    def decode(self, tokens: list[int], n: int) -> Timing:
        """`n` further tokens after the first."""
        _, times, produced = self._timed(tokens, n + 1)
        return Timing(times[-1] - times[0], n, produced)

    def batch(self, prompts: list[list[int]], n: int) -> Timing:
        """All prompts submitted before the first step."""
        start = time.perf_counter()
        for prompt in prompts:
            self._submit(prompt, n)
        outputs = self._run()
        seconds = time.perf_counter() - start
        produced = sum(len(output.outputs[0].token_ids) for output in outputs)
        if produced != n * len(prompts):
            raise RuntimeError(f"{produced} tokens came out, {n * len(prompts)} were asked for")
        last = [output.outputs[0].token_ids[-1] for output in outputs]
        return Timing(seconds, produced, last, self._widest)


if __name__ == "__main__":
    serve(Vllm)
