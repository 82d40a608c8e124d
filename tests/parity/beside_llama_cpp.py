"""The second oracle: llama.cpp, where llama-cpp-python is installed.

A script, since that compiles for minutes.

export PYTHONPATH=.:tests:tests/parity
python tests/parity/beside_llama_cpp.py logits                        # every architecture, tiny and
random python tests/parity/beside_llama_cpp.py answers qwen2.5-coder:0.5b    # greedy answers to 50
prompts
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from families_gguf import write_gguf
from rich.console import Console
from rich.table import Table
from tiny_families import FAMILIES, logits_of, make_model

from steps import Steps
from twinphase import LLM, SamplingParams
from twinphase.backends.reference import ReferenceBackend
from twinphase.models.loader import open_model
from twinphase.weights.hub import resolve_model

TOKENS = np.random.default_rng(0).integers(3, 448, 70, dtype=np.int32)
SUBJECTS = (
    "a list",
    "a string",
    "a dictionary",
    "two numbers",
    "a file",
    "a date",
    "a matrix",
    "a tree",
    "a queue",
    "JSON",
)
TASKS = (
    "Write a Python function that sorts {}.",
    "Explain in one sentence what {} is.",
    "How do I copy {} in Python?",
    "Name three uses of {}.",
    "Write a unit test for a function that takes {}.",
)
NEW_TOKENS = 16


def logits() -> Table:
    """Largest relative error of a row's logits, between each two of the three."""
    table = Table(
        "architecture", "ours, llama.cpp", "ours, transformers", "llama.cpp, transformers"
    )
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(family)
            model.save_pretrained(folder)
            path = write_gguf(open_model(Path(folder)), model, Path(folder) / "model.gguf")
            peer = llama_cpp.Llama(
                str(path),
                n_ctx=512,
                n_batch=512,
                logits_all=True,
                verbose=False,
                type_k=0,
                type_v=0,
            )
            peer.eval(TOKENS.tolist())
            theirs = np.array(peer.scores[: len(TOKENS)])
            ours = Steps(path, ReferenceBackend(), num_blocks=32).chunked(TOKENS, [len(TOKENS)])
            oracle = logits_of(model, TOKENS.tolist())
        pairs = ((ours, theirs), (ours, oracle), (theirs, oracle))
        table.add_row(family, *(f"{_error(one, other):.1e}" for one, other in pairs))
    return table


def _error(found: Any, expected: Any) -> float:
    return float(
        (np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max()
    )


def answers(model: str) -> Table:
    """Where greedy answers part, and how close our two best tokens were there (natural log)."""
    path = resolve_model(model)
    llm = LLM(str(path), max_model_len=512)
    peer = llama_cpp.Llama(str(path), n_ctx=512, flash_attn=True, verbose=False)
    prompts = [
        [{"role": "user", "content": task.format(subject)}]
        for task in TASKS
        for subject in SUBJECTS
    ]
    outputs = llm.chat(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=2))
    table = Table(
        "prompt",
        "parts at token",
        "between our two best",
        title=f"{model}: {len(prompts)} greedy answers",
    )
    for messages, output in zip(prompts, outputs, strict=True):
        found = output.outputs[0]
        expected = []
        for token in peer.generate(
            list(output.prompt_token_ids), temp=0.0, repeat_penalty=1.0, reset=True
        ):
            expected.append(token)
            if len(expected) == len(found.token_ids):
                break
        parts = [
            at
            for at, pair in enumerate(zip(found.token_ids, expected, strict=True))
            if pair[0] != pair[1]
        ]
        if parts and found.logprobs is not None:
            best = sorted(
                (entry.logprob for entry in found.logprobs[parts[0]].values()), reverse=True
            )[:2]
            table.add_row(messages[0]["content"], str(parts[0]), f"{best[0] - best[1]:.2f}")
    table.caption = f"{len(prompts) - table.row_count} of {len(prompts)} are the same"
    return table


if __name__ == "__main__":
    Console().print(logits() if sys.argv[1:2] == ["logits"] else answers(sys.argv[2]))
