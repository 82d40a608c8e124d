"""Write a GGUF file again in another block format, with llama.cpp's own quantizer.

    python requantize.py SOURCE.gguf TARGET.gguf q4_0|q8_0      # by `setup.py`, in the `llamacpp`
    environment

Not for quality: a 4-bit file made from another 4-bit file has been rounded twice.
"""

from __future__ import annotations

import sys

import llama_cpp

FILE_TYPES = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}

if __name__ == "__main__":
    source, target, file_type = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if status != 0:
        raise SystemExit(f"{source}: quantizing to {file_type} failed with status {status}")
