"""What a draft model is worth: tokens per second of single requests with and without it, by the tokens drafted at once.

    python benchmarks/draft_model.py [--model qwen2.5-coder:1.5b] [--draft qwen2.5-coder:0.5b] [-k 1 2 3 4]
    python benchmarks/draft_model.py --model smollm2 --first-layers 10 20

With --first-layers, the model drafts for itself by its own first layers, norm and head (LayerSkip without its
training; Elhoushi et al., 2024, arXiv:2404.16710), with a copy of them and a KV cache of its own.

All variants answer each prompt in turn; "chosen" drafts up to the largest k, as far as it seems worth it. Ratios are
medians over the prompts. Answers that differ from those without drafts end the run.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from twinphase.engine.drafting import load_draft_model, open_draft_model
from twinphase.engine.loading import LoadedEngine
from twinphase.engine.runner import Runner
from twinphase.request import Request, SamplingParams
from twinphase.speculation.speculator import Speculator
from twinphase.speculation.writing import Writing

PROMPTS = (
    "Write a Python function that parses a CSV file and returns a list of dictionaries.",
    "Write a binary search tree class in Python with insert, delete and in-order traversal.",
    "Write a JavaScript function that debounces another function, with comments.",
    "Implement merge sort and quick sort in C++.",
    "Write a SQL query for the three best paid employees of each department, and explain it.",
)


@dataclass
class Variant:
    """One way to draft, and what it did."""

    name: str
    drafter: Speculator | None
    rates: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def answer(loaded: LoadedEngine, variant: Variant, prompt: str, params: SamplingParams) -> list[int]:
    """The tokens; the rate is of those after the first."""
    engine, counts = loaded.engine, variant.counts
    _, token_ids = loaded.encode([{"role": "user", "content": prompt}])
    request = Request("r", token_ids, params, cache_salt=f"{variant.name} {prompt}")
    engine.drafter = variant.drafter
    engine.add_request(request)
    while not request.output_token_ids:
        engine.step()
    start = time.perf_counter()
    while engine.has_work:
        (share,) = engine.step().batch.scheduled
        counts["steps"] += 1
        counts["drafted"] += share.num_drafts
    variant.rates.append((len(request.output_token_ids) - 1) / (time.perf_counter() - start))
    counts["accepted"] += request.num_accepted_draft_tokens
    counts["tokens"] += len(request.output_token_ids) - 1
    engine.drafter = None
    return request.output_token_ids


def first_layers(loaded: LoadedEngine, model: str, count: int, k: int) -> Writing:
    """The model itself, cut behind its first layers."""
    drafts = load_draft_model(open_draft_model(model, loaded), k, loaded)
    runner = drafts._execute.__self__  # type: ignore[attr-defined]
    assert isinstance(runner, Runner)
    whole = runner.model.blueprint
    cut = {"num_layers": count, "ropes": whole.ropes[:count], "windows": whole.windows[:count]}
    runner.model.blueprint, runner.model.layers = replace(whole, **cut), runner.model.layers[:count]
    return Writing(drafts, loaded.engine.cost_model.seconds, loaded.engine.shape.window)


def variants(loaded: LoadedEngine, make: Callable[[int], Writing], name: str, ks: list[int]) -> list[Variant]:
    """Each k always, and up to the largest as the chooser has it; one model drafts for all."""
    writing, made = make(max(ks)), []
    for k, always in [*((k, True) for k in ks), (max(ks), False)]:
        drafter = Speculator([], loaded.engine.cost_model, most=k, always=always)
        drafter.writing = Writing(writing.model, loaded.engine.cost_model.seconds, loaded.engine.shape.window, most=k)
        made.append(Variant(f"{name}k = {k}" if always else f"{name}chosen", drafter))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder:1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder:0.5b")
    parser.add_argument("--first-layers", type=int, nargs="*", default=[])
    parser.add_argument("--tokens", type=int, default=56)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("-k", type=int, nargs="*", default=[1, 2, 3, 4])
    args = parser.parse_args()
    loaded = LoadedEngine(args.model, max_model_len=2048, max_num_seqs=4)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens, seed=0, ignore_eos=True)
    compared = [Variant("off", None)]
    for count in args.first_layers:
        made = first_layers(loaded, args.model, count, max(args.k))
        compared += variants(loaded, lambda k, made=made: made, f"{count} layers, ", args.k)
    if not args.first_layers:
        seconds, window = loaded.engine.cost_model.seconds, loaded.engine.shape.window
        draft = Writing(load_draft_model(open_draft_model(args.draft, loaded), max(args.k), loaded), seconds, window)
        compared += variants(loaded, lambda k: draft, "", args.k)
    for variant in compared:
        answer(loaded, variant, "Hello!", replace(params, max_tokens=12))
        variant.rates.clear()
        variant.counts.clear()
    for prompt in PROMPTS:
        answers = [answer(loaded, variant, prompt, params) for variant in compared]
        assert all(one == answers[0] for one in answers), "a draft changed an answer"
    print(f"{'':>22}  tokens/s  ratio  accepted  tokens/step")
    for variant in compared:
        ratio = median(a / b for a, b in zip(variant.rates, compared[0].rates, strict=True))
        counts = variant.counts
        accepted = counts["accepted"] / max(1, counts["drafted"])
        print(
            f"{variant.name:>22}  {median(variant.rates):8.1f}  {ratio:5.2f}  {accepted:8.0%}  "
            f"{counts['tokens'] / counts['steps']:11.2f}"
        )


if __name__ == "__main__":
    main()
