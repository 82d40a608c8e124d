"""OpenVINO GenAI.

For: `versus_peers.py`. Times come from a streamer that sees each token as the pipeline hands it out.
Not for: OpenVINO without its GenAI pipelines.

(The file is not called `openvino_genai.py`: it would hide the package of that name.)
"""

from __future__ import annotations

import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import LoadRequest, Timing, serve, version


class Clock(genai.StreamerBase):
    """Notes when each token comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.times: list[float] = []

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        """Called by the pipeline with one token, or several that came out together."""
        new = [token] if isinstance(token, int) else list(token)
        self.times.extend([time.perf_counter()] * len(new))
        self.tokens.extend(new)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Called by the pipeline after the last token."""


MANY_REQUESTS_TOKENS = 512  # of a step; a tenth to a quarter faster for 64 prompts of 256 than 2,048 or all at once


class OpenVino:
    """The pipeline for one prompt, and for the batch one whose scheduler is stepped by hand."""

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        # The hint runs one inference at a time on all threads; the one for throughput halved the rate of the batch.
        self._properties = {"INFERENCE_NUM_THREADS": request.threads, "PERFORMANCE_HINT": "LATENCY"}
        # The pipeline's own latency-oriented default: a prompt is never cut into chunks.
        scheduler = self._scheduler(sys.maxsize)
        self._pipeline = genai.LLMPipeline(request.model, "CPU", scheduler_config=scheduler, **self._properties)
        self._many: genai.ContinuousBatchingPipeline | None = None
        self._requests = 0
        self._weights = str(request.options.get("weights", "?"))

    def conditions(self) -> dict[str, str]:
        """Version, and the precisions OpenVINO chooses by default on a CPU."""
        return {
            "version": version("openvino-genai"),
            "precision": f"{self._weights} weights, default hints (bf16 math where the CPU has it, u8 KV)",
        }

    def _scheduler(self, tokens: int) -> genai.SchedulerConfig:
        """A scheduler that computes up to so many tokens a step."""
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = tokens
        scheduler.max_num_seqs = self._request.max_seqs
        return scheduler

    def _generate(self, tokens: list[int], n: int) -> tuple[float, Clock]:
        """Generate exactly `n` tokens; return the start time and the clock."""
        clock = Clock()
        ids = ov.Tensor(np.array([tokens], dtype=np.int64))
        start = time.perf_counter()
        self._pipeline.generate(ids, exact_length(n), clock)
        if len(clock.tokens) != n:
            raise RuntimeError(f"{len(clock.tokens)} tokens came out, {n} were asked for")
        return start, clock

    def prefill(self, tokens: list[int]) -> Timing:
        """Token ids in to first token out."""
        start, clock = self._generate(tokens, 1)
        return Timing(clock.times[0] - start, 1, clock.tokens)

    def decode(self, tokens: list[int], n: int) -> Timing:
        """`n` further tokens after the first."""
        _, clock = self._generate(tokens, n + 1)
        return Timing(clock.times[-1] - clock.times[0], n, clock.tokens)

    def batch(self, prompts: list[list[int]], n: int) -> Timing:
        """All prompts submitted before the first step; the cache grows as the pipeline sees fit."""
        if self._many is None:
            scheduler = self._scheduler(MANY_REQUESTS_TOKENS)
            self._many = genai.ContinuousBatchingPipeline(self._request.model, scheduler, "CPU", self._properties)
        tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        config, widest = exact_length(n), 0
        start = time.perf_counter()
        handles = [self._many.add_request(self._next_id(), tensor, config) for tensor in tensors]
        while self._many.has_non_finished_requests():
            self._many.step()
            widest = max(widest, self._many.get_metrics().scheduled_requests)
        seconds = time.perf_counter() - start
        outputs = [handle.read_all()[0].generated_ids for handle in handles]
        if any(len(tokens) != n for tokens in outputs):
            raise RuntimeError(f"{[len(tokens) for tokens in outputs]} tokens came out, {n} each were asked for")
        return Timing(seconds, n * len(prompts), [tokens[-1] for tokens in outputs], widest)

    def _next_id(self) -> int:
        self._requests += 1
        return self._requests


def exact_length(n: int) -> genai.GenerationConfig:
    """Greedy, to exactly `n` tokens."""
    config = genai.GenerationConfig()
    config.max_new_tokens = n
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(OpenVino)
