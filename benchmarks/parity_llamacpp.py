"""Greedy answers beside llama.cpp's: how many are the same, and how close the choice was where they part.

For: showing that where two sound implementations of the same quantized weights disagree, the model itself was near
undecided. Prompts are rendered and tokenized by twinphase and go to both as token ids; end-of-text is ignored.
Not for: speed (`versus_peers.py`), nor judging which of the two is closer to float32 (tests/parity).

    python benchmarks/parity_llamacpp.py --llama-python PATH --model model.gguf

runs twinphase in this process and llama.cpp in a process of the given Python, which needs llama-cpp-python and NumPy.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = 20  # most likely tokens that each engine reports for every position
QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of Portugal, and what is it known for?",
    "Write a haiku about the sea.",
    "Explain recursion to a ten-year-old.",
    "Give me a recipe for pancakes.",
    "What is the difference between a virus and a bacterium?",
    "Translate to French: The train leaves at noon.",
    "Name five animals that live in the desert.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "What is 17 times 23?",
    "How do vaccines work?",
    "Tell me a short story about a robot who learns to paint.",
    "What causes the seasons on Earth?",
    "Summarize the plot of Cinderella in two sentences.",
    "How do I tie a tie?",
    "What are the primary colours?",
    "Write an SQL query that counts the rows of a table called users.",
    "Why do cats purr?",
    "Give three tips for learning a new language.",
    "What is photosynthesis?",
    "List the planets of the solar system in order.",
    "Write a polite e-mail declining an invitation.",
    "What happens when water boils?",
    "Explain what an operating system does.",
    "Give me a synonym for happy, sad, big and small.",
    "What is the Pythagorean theorem?",
    "How far away is the Moon?",
    "Write a limerick about a baker.",
    "What is machine learning?",
    "Why do leaves change colour in autumn?",
    "How can I sleep better?",
    "Write a regular expression that matches a date such as 2024-05-31.",
    "What does HTTP status 404 mean?",
    "Describe the taste of a lemon.",
    "Who was Marie Curie?",
    "What is the largest ocean?",
    "Explain inflation in simple terms.",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Suggest a name for a coffee shop by the beach.",
    "What is a black hole?",
    "Give me a checklist for a camping trip.",
    "How does a bicycle stay upright?",
    "What is the meaning of the proverb 'a stitch in time saves nine'?",
    "Write the first paragraph of a mystery novel.",
    "What are the benefits of regular exercise?",
    "Explain the difference between a list and a tuple in Python.",
    "How do bees make honey?",
    "What is the boiling point of water on Mount Everest?",
    "Write a motivational quote about patience.",
)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens; for each position the most likely tokens' scores, which mean something only as differences."""

    tokens: list[int]
    scores: list[dict[int, float]]


def llama_answers(model: str, prompts: Sequence[list[int]], count: int, threads: int) -> list[dict[str, Any]]:
    """llama.cpp's side, run by its own Python: tokens, and [token, logit] of the TOP best at every position."""
    import llama_cpp
    import numpy as np

    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = max(map(len, prompts)) + count
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(loaded, params)
    if not loaded or not context:
        raise SystemExit(f"llama.cpp cannot load {model}")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    answers = []
    for prompt in prompts:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens, best, piece = [], [], list(prompt)
        for _ in range(count):
            array = (llama_cpp.llama_token * len(piece))(*piece)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(piece))):
                raise SystemExit("llama_decode failed")
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocab,))
            order = np.argsort(-logits, kind="stable")[:TOP]
            best.append([[int(token), float(logits[token])] for token in order])
            tokens.append(int(order[0]))
            piece = tokens[-1:]
        answers.append({"tokens": tokens, "scores": best})
    return answers


def ask_llama(python: Path, request: dict[str, Any]) -> list[Answer]:
    """Run this file's worker in llama.cpp's environment."""
    done = subprocess.run(
        [str(python), __file__, "--worker"], input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True
    )
    # llama.cpp may print before; the reply is the last line.
    replies = json.loads(done.stdout.splitlines()[-1])
    return [Answer(reply["tokens"], [dict(map(tuple, best)) for best in reply["scores"]]) for reply in replies]


def our_answers(llm: Any, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """twinphase's side; scores are log probabilities."""
    from twinphase import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=TOP)
    answers = []
    for result in llm.generate(prompts, params):
        output = result.outputs[0]
        scores = [{token: entry.logprob for token, entry in position.items()} for position in output.logprobs or []]
        answers.append(Answer(output.token_ids, scores))
    return answers


def parting(ours: Answer, theirs: Answer) -> int | None:
    """First position where the tokens differ, None when they never do."""
    pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=True))
    return next((index for index, (a, b) in pairs if a != b), None)


def gap(scores: dict[int, float], chosen: int, other: int) -> float:
    """How far `other` is behind `chosen`, in logits; infinite when it is not among the best."""
    return scores[chosen] - scores[other] if other in scores else math.inf


def report(llm: Any, ours: Sequence[Answer], theirs: Sequence[Answer], count: int) -> None:
    """Print a row for each answer that parts, and the summary."""
    print(f"{'question':40} {'at':>3} {'ours':>16} {'gap':>6} {'llama.cpp':>16} {'gap':>6}")
    gaps, agreed, shared = [], 0, 0
    for question, a, b in zip(QUESTIONS, ours, theirs, strict=False):
        at = parting(a, b)
        shared += count if at is None else at
        if at is None:
            agreed += 1
            continue
        mine, other = a.tokens[at], b.tokens[at]
        here, there = gap(a.scores[at], mine, other), gap(b.scores[at], other, mine)
        gaps.append(max(here, there))
        words = [repr(llm.tokenizer.decode([token]))[:16] for token in (mine, other)]
        print(f"{question[:40]:40} {at:3} {words[0]:>16} {here:6.3f} {words[1]:>16} {there:6.3f}")
    total = len(ours)
    print(f"\n{agreed} of {total} answers agree over all {count} tokens; on average the first {shared / total:.1f} do.")
    if gaps:
        gaps.sort()
        median, worst = gaps[len(gaps) // 2], gaps[-1]
        print(f"Where they part, the larger of the two gaps between both tokens' logits: median {median:.3f}, "
              f"largest {worst:.3f}.")  # fmt: skip


def main() -> None:
    """Parse the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", type=Path, required=True, help="Python of the environment with llama.cpp")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file that both load")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="how many of the 50 questions")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    from twinphase import LLM

    llm = LLM(args.model, threads=args.threads)
    questions = QUESTIONS[: args.prompts]
    texts = [llm.chat_template.render([{"role": "user", "content": question}]) for question in questions]
    prompts = [llm.tokenizer.encode(text) for text in texts]
    request = {"model": str(args.model), "prompts": prompts, "count": args.tokens, "threads": args.threads}
    theirs = ask_llama(args.llama_python, request)
    ours = our_answers(llm, prompts, args.tokens)
    print(f"{args.model.name}, greedy, {args.tokens} tokens, {llm.config.threads} threads\n")
    report(llm, ours, theirs, args.tokens)


def worker() -> None:
    """Answer the one request on stdin."""
    request = json.load(sys.stdin)
    print(json.dumps(llama_answers(**request)))


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
