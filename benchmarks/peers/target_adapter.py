"""Targets of `twinphase bench`: our engine, transformers, llama.cpp, a server at a URL.

Options: fields of `EngineConfig` for our engine; `flash_attention` (bool) for llama.cpp. A server
gets random words of the wanted length, not the prompts' tokens: it may have another tokenizer, and
its own count goes into the figures.
"""

from __future__ import annotations

from typing import Any

from protocol import LoadRequest, Timing, serve

from twinphase_bench.targets.kinds import TargetOptions, kind_of
from twinphase_bench.targets.target import TargetFacts


def conditions(facts: TargetFacts) -> dict[str, str]:
    return {
        "version": facts.engine,
        "precision": f"{facts.model}, {facts.precision}",
        **facts.details,
    }


class OurEngine:
    """Stepped by hand with its default settings but for its size; no text is made."""

    def __init__(self, request: LoadRequest) -> None:
        from twinphase.config import EngineConfig
        from twinphase_bench.targets.engine import EngineTarget

        settings: dict[str, Any] = {"threads": request.threads, **request.options}
        if request.max_seqs > 1:
            blocks = (
                -(-max(request.kv_tokens, request.max_len) // EngineConfig().block_size)
                + request.max_seqs
            )
            settings |= {
                "max_num_seqs": request.max_seqs,
                "max_model_len": request.max_len,
                "num_kv_blocks": blocks,
            }
        target = EngineTarget(request.model, **settings)
        self._stepped = target.stepped
        self.conditions = conditions(target.facts)

    def generate(self, prompts: list[list[int]], n: int) -> Timing:
        tickets = [self._stepped.submit(prompt, n) for prompt in prompts]
        widest = max(len(record.prefill_ids) + record.num_decodes for record in self._stepped.run())
        self._stepped.clear()
        if any(len(one.tokens) != n or one.request.counts.num_cached_tokens for one in tickets):
            raise RuntimeError("a request lacks tokens, or had some from a cache")
        began = tickets[0].submitted
        end = max(one.times[-1] for one in tickets)
        count = len(prompts) * len(prompts[0])
        last = [one.tokens[-1] for one in tickets]
        return Timing(
            tickets[0].times[0] - began, end - began, count, n * len(prompts), last, widest
        )


class StaticBatch:
    """transformers and llama.cpp in this process."""

    def __init__(self, request: LoadRequest) -> None:
        from twinphase_bench.targets.llama_cpp import LlamaCpp
        from twinphase_bench.targets.transformers import Transformers

        kind, _, path = request.model.partition(":")
        make: Any = {"llama-cpp": LlamaCpp, "transformers": Transformers}[kind]
        self._engine = make(path, threads=request.threads, **request.options)
        self.conditions = conditions(self._engine.facts)

    def generate(self, prompts: list[list[int]], n: int) -> Timing:
        run = self._engine.generate(prompts, n)
        batch = len(prompts)
        first = run.step_ends[0] - run.began
        end = run.step_ends[-1] - run.began
        return Timing(first, end, batch * len(prompts[0]), n * batch, run.last_tokens, batch)


class Server:
    """A server at a URL, which must be up; times are those of its client."""

    def __init__(self, request: LoadRequest) -> None:
        from twinphase_bench.targets.phases_of_url import PhasesOfUrl

        self._target = PhasesOfUrl(request.model, **TargetOptions(**request.options).server)
        self.conditions = conditions(self._target.facts)

    def generate(self, prompts: list[list[int]], n: int) -> Timing:
        length = len(prompts[0])
        if n == 1 and len(prompts) == 1:
            sample = self._target.prefill(length)
            return Timing(sample.seconds, sample.seconds, int(sample.tokens), 1, [])
        seen = self._target.together(len(prompts), length, n)
        began = min(one.sent for one in seen)
        ends = [one.last_token or one.ended for one in seen]
        computed = sum(
            (one.num_prompt_tokens or length) - (one.num_cached_tokens or 0) for one in seen
        )
        new = sum(one.num_output_tokens or n for one in seen)
        widest = sum(one.token_times[0] <= min(ends) for one in seen)
        return Timing(seen[0].token_times[0] - began, max(ends) - began, computed, new, [], widest)


def load(request: LoadRequest) -> OurEngine | StaticBatch | Server:
    kind = kind_of(request.model, is_model=lambda _: True)
    return {"model": OurEngine, "url": Server}.get(kind, StaticBatch)(request)


if __name__ == "__main__":
    serve(load)
