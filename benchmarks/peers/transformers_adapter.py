"""Hugging Face transformers on PyTorch: the baseline most people have at hand.

For: `versus_peers.py`. The model is called directly, with a cache, because `generate()` adds host work a step.
Not for: the fastest PyTorch can do; nothing is compiled.
"""

from __future__ import annotations

import time

import torch
from protocol import LoadRequest, Timing, serve, version
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    """A bf16 model in eager mode with the default (SDPA) attention."""

    def __init__(self, request: LoadRequest) -> None:
        torch.set_num_threads(request.threads)
        self._model = AutoModelForCausalLM.from_pretrained(request.model, dtype=torch.bfloat16).eval()

    def conditions(self) -> dict[str, str]:
        """Versions and data types."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        return {"version": f"{version('transformers')}, {version('torch')}", "precision": f"{dtype} weights and KV"}

    def _step(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Feed tokens of shape (requests, length) and return the next token of each, shape (requests, 1)."""
        output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(dim=-1, keepdim=True)

    def prefill(self, tokens: list[int]) -> Timing:
        """Token ids in to first token out."""
        start = time.perf_counter()
        with torch.inference_mode():
            first = int(self._step(torch.tensor([tokens]), DynamicCache()))
        return Timing(time.perf_counter() - start, 1, [first])

    def decode(self, tokens: list[int], n: int) -> Timing:
        """`n` further tokens after the first."""
        with torch.inference_mode():
            cache = DynamicCache()
            token = self._step(torch.tensor([tokens]), cache)
            produced = [int(token)]
            start = time.perf_counter()
            for _ in range(n):
                token = self._step(token, cache)
                produced.append(int(token))
            return Timing(time.perf_counter() - start, n, produced)

    def batch(self, prompts: list[list[int]], n: int) -> Timing:
        """Prompts of one length as a static batch."""
        start = time.perf_counter()
        with torch.inference_mode():
            cache = DynamicCache()
            token = self._step(torch.tensor(prompts), cache)
            for _ in range(n - 1):
                token = self._step(token, cache)
            last = [int(value) for value in token[:, 0]]
        return Timing(time.perf_counter() - start, n * len(prompts), last, len(prompts))


if __name__ == "__main__":
    serve(Transformers)
