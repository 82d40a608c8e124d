"""Write a GGUF file again in another block format, with llama.cpp's own quantizer.

For: `setup.py`, which runs it in the `llamacpp` environment to get the formats llama.cpp is fastest with.
Not for: quality: a 4-bit file made from another 4-bit file has been rounded twice.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama_cpp

FILE_TYPES = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}


def requantize(source: Path, target: Path, file_type: str, threads: int) -> None:
    """Requantize `source` into `target`."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    params.nthread = threads
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if status != 0:
        raise SystemExit(f"{source}: quantizing to {file_type} failed with status {status}")


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("file_type", choices=sorted(FILE_TYPES))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    requantize(args.source, args.target, args.file_type, args.threads)


if __name__ == "__main__":
    main()
