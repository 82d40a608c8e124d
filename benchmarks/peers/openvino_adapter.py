"""OpenVINO GenAI; a lone request's times come from a streamer that gets each token.

(The file is not called `openvino_genai.py`: it would hide the package of that name.)
"""

from __future__ import annotations

import itertools
import os
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import LoadRequest, Timing, serve, version

MANY_REQUESTS_TOKENS = (
    512  # of a step; a tenth to a quarter faster for 64 prompts of 256 than 2,048 or all at once
)


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


class OpenVino:
    """The pipeline for one prompt, and another, stepped by hand, where batches are measured."""

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        self._ids = itertools.count(1)
        # The hint runs one inference at a time on all threads; the one for throughput halved the
        # rate of the batch.
        properties = {"INFERENCE_NUM_THREADS": request.threads, "PERFORMANCE_HINT": "LATENCY"}
        arithmetic = "default hints (bf16 math where the CPU has it, u8 KV)"
        if max_isa := request.options.get("max_isa"):
            os.environ["ONEDNN_MAX_CPU_ISA"] = max_isa
            # OpenVINO picks bfloat16 by the processor's features, and oneDNN then rejects it.
            properties["INFERENCE_PRECISION_HINT"] = "f32"
            arithmetic = f"at most {max_isa}, f32 math, u8 KV"
        # The pipeline's own latency-oriented default: a prompt is never cut into chunks.
        scheduler = self._scheduler(sys.maxsize)
        self._alone = genai.LLMPipeline(
            request.model, "CPU", scheduler_config=scheduler, **properties
        )
        self._many: genai.ContinuousBatchingPipeline | None = None
        if request.max_seqs > 1:
            scheduler = self._scheduler(MANY_REQUESTS_TOKENS)
            self._many = genai.ContinuousBatchingPipeline(
                request.model, scheduler, "CPU", properties
            )
        precision = f"{request.options['weights']} weights, {arithmetic}"
        self.conditions = {"version": version("openvino-genai"), "precision": precision}

    def _scheduler(self, tokens: int) -> genai.SchedulerConfig:
        """A scheduler that computes up to so many tokens per step."""
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = tokens
        scheduler.max_num_seqs = self._request.max_seqs
        return scheduler

    def generate(self, prompts: list[list[int]], n: int) -> Timing:
        """Submit the prompts of a batch before the first step; the pipeline grows its own cache."""
        tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        config = genai.GenerationConfig()
        config.max_new_tokens = n
        config.ignore_eos = True
        config.do_sample = False
        clock = Clock()
        widest = 1
        first = 0.0
        start = time.perf_counter()
        if len(prompts) == 1:
            self._alone.generate(tensors[0], config, clock)
            first = clock.times[0]
            end = clock.times[-1]
            outputs = [clock.tokens]
        else:
            assert self._many is not None
            handles = [
                self._many.add_request(next(self._ids), tensor, config) for tensor in tensors
            ]
            while self._many.has_non_finished_requests():
                self._many.step()
                first = first or time.perf_counter()
                widest = max(widest, self._many.get_metrics().scheduled_requests)
            end = time.perf_counter()
            outputs = [handle.read_all()[0].generated_ids for handle in handles]
        if any(len(tokens) != n for tokens in outputs):
            raise RuntimeError(
                f"{[len(tokens) for tokens in outputs]} tokens came out, {n} each were asked for"
            )
        last = [tokens[-1] for tokens in outputs]
        computed = len(prompts) * len(prompts[0])
        return Timing(first - start, end - start, computed, n * len(prompts), last, widest)


if __name__ == "__main__":
    serve(OpenVino)
