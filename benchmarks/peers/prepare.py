"""Turn the GGUF file into the two things every peer needs: a bf16 model folder and a stream of prompt tokens.

For: `setup.py`, which runs it in the `hf` environment. The folder holds the GGUF weights dequantized to bfloat16, in
the layout transformers, vLLM and the converters read; the token stream is text that ships with Python, tokenized.
Not for: measuring anything, or making a better model: the weights are those of the 4-bit file, only stored wider.
"""

from __future__ import annotations

import argparse
import json
import platform
import pydoc_data.topics as topics
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def save_model(gguf: Path, out: Path) -> None:
    """Write the dequantized model and its tokenizer to `out`."""
    # A packed model cannot be saved, so the blocks are expanded on load.
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(out, safe_serialization=True)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(out)


def prompt_text() -> str:
    """All help topics of this Python, in a fixed order: long, varied English with code, on every machine."""
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def save_tokens(model: Path, out: Path) -> int:
    """Write the token ids of the prompt text to `out` and return how many there are."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt_text(), add_special_tokens=False)["input_ids"]
    out.write_text(json.dumps({"source": f"pydoc_data.topics of Python {platform.python_version()}", "tokens": ids}))
    return len(ids)


def main() -> None:
    """Parse the arguments and write both outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True, help="GGUF file to dequantize")
    parser.add_argument("--model", type=Path, required=True, help="folder to write the bf16 model to")
    parser.add_argument("--tokens", type=Path, required=True, help="JSON file to write the prompt tokens to")
    args = parser.parse_args()
    save_model(args.gguf, args.model)
    print(f"{args.model}: bf16 model")
    print(f"{args.tokens}: {save_tokens(args.model, args.tokens)} tokens")


if __name__ == "__main__":
    main()
