"""vLLM on a CPU: its V1 engine is stepped by hand in this process, to time each token."""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import LoadRequest, Timing, serve, version

MANY_REQUESTS_TOKENS = 2048  # of a step
KV_GIGABYTES = "2"  # of 23 kB per token of this model: 93,000 tokens


class Vllm:
    def __init__(self, request: LoadRequest) -> None:
        # Read from the environment when vLLM is imported.
        cores = sorted(os.sched_getaffinity(0))[: request.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_GIGABYTES)
        from vllm import LLM

        self._engine = LLM(
            model=request.model,
            dtype="bfloat16",
            max_model_len=request.max_len,
            # A whole prompt in one step is best alone; of many, 2,048 tokens per step were a
            # seventh faster than all.
            max_num_batched_tokens=request.max_len
            if request.max_seqs == 1
            else MANY_REQUESTS_TOKENS,
            max_num_seqs=request.max_seqs,
            enable_prefix_caching=False,
        ).llm_engine
        self._requests = 0
        self.conditions = {
            "version": f"{version('vllm-cpu')}, {version('torch')}",
            "precision": "bfloat16 weights and KV, compiled",
        }

    def generate(self, prompts: list[list[int]], n: int) -> Timing:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        names = [str(self._requests + number) for number in range(len(prompts))]
        self._requests += len(prompts)
        finished: list[Any] = []
        first = 0.0
        widest = 0
        start = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            end = time.perf_counter()
            widest = max(widest, len(outputs))
            first = first or (
                end if any(output.request_id == names[0] for output in outputs) else 0.0
            )
            finished += [output for output in outputs if output.finished]
        tokens = [list(output.outputs[0].token_ids) for output in finished]
        if [len(one) for one in tokens] != [n] * len(prompts):
            raise RuntimeError(
                f"{[len(one) for one in tokens]} tokens came out, {n} each were asked for"
            )
        last = [one[-1] for one in tokens]
        computed = len(prompts) * len(prompts[0])
        return Timing(first - start, end - start, computed, n * len(prompts), last, widest)


if __name__ == "__main__":
    serve(Vllm)
