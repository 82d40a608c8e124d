"""Turn the GGUF file into what every peer needs: a bf16 model folder and prompt tokens.

    python prepare.py MODEL.gguf FOLDER TOKENS.json      # by `setup.py`, in the `hf` environment

The folder holds the GGUF weights dequantized to bfloat16, in the layout that transformers, vLLM and
the converters read: the weights of the 4-bit file, only stored wider. The token stream is text that
ships with Python, tokenized.
"""

from __future__ import annotations

import json
import platform
import pydoc_data.topics as topics
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(gguf: Path, folder: Path, tokens: Path) -> None:
    # A packed model cannot be saved, so the blocks are expanded on load.
    packed = GgufConfig(dequantize=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=packed
    )
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(folder)
    # All help topics of this Python, in a fixed order: long, varied English with code, on every
    # machine.
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens.write_text(
        json.dumps(
            {"source": f"pydoc_data.topics of Python {platform.python_version()}", "tokens": ids}
        )
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
