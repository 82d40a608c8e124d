"""Speculation beside llama.cpp's: one request that copies, tokens per second of decode, on the same GGUF file.

    PEERS_DIR=/some/folder python benchmarks/peers/setup.py llamacpp      # once
    PEERS_DIR=/some/folder python benchmarks/speculation_peers.py [--model FILE.gguf]

llama.cpp is that of llama-cpp-python with its prompt lookup (`LlamaPromptLookupDecoding`), drafting 10 tokens, its
default, and 2, which its documentation advises for CPUs. Each engine answers the same prompts greedily with its own
arithmetic; the prompt lies in its KV cache, and the time is that from the first token to the last. Within a repetition
all take their turn; printed are medians, and the median ratio of ours to each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FILE = "SmolLM2-135M-Instruct.Q4_0.gguf"
CONTEXT = 2560
LOOKUPS = (0, 2, 10)  # tokens drafted


def serve_peer(model: str, threads: int) -> None:
    """In the peer's environment: one JSON object per line in, {"lookup", "token_ids", "count"}, and one out."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    made: dict[int, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        lookup = asked["lookup"]
        if lookup not in made:
            draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
            made[lookup] = Llama(model, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, draft_model=draft,
                                 flash_attn=True, logits_all=lookup > 0, verbose=False)  # fmt: skip
        times = []
        for _ in made[lookup].generate(asked["token_ids"], temp=0.0):
            times.append(time.perf_counter())
            if len(times) == asked["count"]:
                break
        print(json.dumps({"rate": (len(times) - 1) / (times[-1] - times[0])}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help=f"a GGUF file [default: {FILE} below PEERS_DIR]")
    parser.add_argument("--tasks", default="rewrite,quote")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--serve-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = Path(os.environ.get("PEERS_DIR", "peers"))
    model = str(args.model or folder / "models" / FILE)
    if args.serve_peer:
        serve_peer(model, args.threads)
        return
    import speculation as own  # beside this file
    from twinphase import LLM
    from twinphase.phases.hardware import processor_name

    command = [folder / "llamacpp/bin/python", __file__, "--serve-peer", "--model", model, "--threads"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    peer = subprocess.Popen([*command, str(args.threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=environment)  # fmt: skip
    assert peer.stdin is not None and peer.stdout is not None
    llm = LLM(model, threads=args.threads, max_model_len=CONTEXT)
    size, tokens = own.LENGTHS[1][0], args.tokens
    names = ["twinphase off", "twinphase auto", *(f"llama.cpp lookup {k}" if k else "llama.cpp off" for k in LOOKUPS)]
    print(f"{datetime.date.today()}, {processor_name()}, {Path(model).name}, {args.reps} repetitions, tokens/s")
    for task in args.tasks.split(","):
        asked = own.TASKS[task](size, tokens, 0)
        prompt = llm.chat(asked.messages, asked.params)[0].prompt_token_ids
        rates: dict[str, list[float]] = {name: [] for name in names}
        modes = {"twinphase off": own.Mode("off"), "twinphase auto": own.Mode("auto")}
        for repetition in range(-1, args.reps):  # the first one fills the caches
            for index in range(len(names)):
                name = names[(index + repetition) % len(names)]
                if name in modes:
                    rate = own_rate(llm, modes[name], asked)
                else:
                    lookup = int(name.split()[-1]) if name[-1].isdigit() else 0
                    question = {"lookup": lookup, "token_ids": prompt, "count": tokens}
                    print(json.dumps(question), file=peer.stdin, flush=True)
                    rate = json.loads(peer.stdout.readline())["rate"]
                if repetition >= 0:
                    rates[name].append(rate)
        for name, found in rates.items():
            ours = statistics.median(a / b for a, b in zip(rates["twinphase auto"], found, strict=True))
            print(f"| {task} | {name} | {statistics.median(found):.0f} | {ours:.2f} |", flush=True)
    peer.stdin.close()
    peer.wait()


def own_rate(llm: Any, mode: Any, asked: Any) -> float:
    """Tokens per second of decode."""
    llm.engine.drafter = mode.fresh(llm)
    (output,) = llm.chat(asked.messages, asked.params)
    llm.engine.drafter = None
    times = output.metrics.token_times
    return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    main()
