"""The tokenizer of the tests' random models, without a file."""

from __future__ import annotations

from functools import cache

import numpy as np
from tests.tiny_gguf import tiny_vocabulary

from twinphase.tokenizer.gguf_vocabulary import build_tokenizer, gguf_facts
from twinphase.tokenizer.tokenizer import Tokenizer


@cache
def byte_level(pre: str = "smollm", size: int = 320) -> Tokenizer:
    tokens, types, merges = tiny_vocabulary(size)
    arrays = {"tokens": tokens, "token_type": np.array(types), "merges": merges}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.eos_token_id": 2,
    }
    vocabulary = {f"tokenizer.ggml.{key}": value for key, value in arrays.items()}
    backend = build_tokenizer(metadata, vocabulary)
    return Tokenizer(backend, gguf_facts(metadata, backend))
