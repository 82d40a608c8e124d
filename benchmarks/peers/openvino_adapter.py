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


class OpenVino:
    """The pipeline with its paged-attention scheduler, which also takes the batch."""

    def __init__(self, request: LoadRequest) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        # The pipeline's own latency-oriented default: a prompt is never cut into chunks.
        scheduler.max_num_batched_tokens = sys.maxsize
        self._pipeline = genai.LLMPipeline(
            request.model,
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=request.threads,
            PERFORMANCE_HINT="LATENCY",
        )
        self._weights = str(request.options.get("weights", "?"))

    def conditions(self) -> dict[str, str]:
        """Version, and the precisions OpenVINO chooses by default on a CPU."""
        return {
            "version": version("openvino-genai"),
            "precision": f"{self._weights} weights, default hints (bf16 math where the CPU has it, u8 KV)",
        }

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
        """All prompts handed over in one call; the pipeline's scheduler does the rest."""
        ids = np.array(prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        result = self._pipeline.generate(inputs, exact_length(n))
        seconds = time.perf_counter() - start
        lengths = [len(tokens) for tokens in result.tokens]
        if lengths != [n] * len(prompts):
            raise RuntimeError(f"{lengths} tokens came out, {n} each were asked for")
        return Timing(seconds, n * len(prompts), [tokens[-1] for tokens in result.tokens])


def exact_length(n: int) -> genai.GenerationConfig:
    """Greedy, to exactly `n` tokens."""
    config = genai.GenerationConfig()
    config.max_new_tokens = n
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(OpenVino)
