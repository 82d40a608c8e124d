"""Writes a GGUF file of a known model's shape with random weights: its speed is real, its text not.

python benchmarks/random_model.py llama-3.2-1b Q4_0 1b.gguf
python benchmarks/random_model.py llama-3.2-1b Q4_0 small.gguf --layers 4

Names are those of `twinphase estimate --list-models`. Weights are random bytes with sane scales:
quantizing a billion random numbers would take minutes and change nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from twinphase.estimate.known_models import KNOWN_MODELS

# Bytes and weights of a block, where its float16 scale and minimum are, and the largest size of a
# code.
BLOCKS: dict[str, tuple[int, int, int, int | None, float]] = {
    "Q4_0": (18, 32, 0, None, 8),
    "Q4_1": (20, 32, 0, 2, 15),
    "Q5_0": (22, 32, 0, None, 16),
    "Q5_1": (24, 32, 0, 2, 31),
    "Q8_0": (34, 32, 0, None, 127),
    "Q2_K": (84, 256, 80, 82, 45),
    "Q3_K": (110, 256, 108, None, 128),
    "Q4_K": (144, 256, 0, 2, 945),
    "Q5_K": (176, 256, 0, 2, 1953),
    "Q6_K": (210, 256, 208, None, 4096),
    "IQ4_NL": (18, 32, 0, None, 127),
    "IQ4_XS": (136, 256, 0, None, 4064),
}
VOCABULARY = ("<unk>", "<s>", "</s>")


def random_tensor(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> NDArray[np.uint8]:
    """Uint8 [rows, bytes of a row]; weights of about 1 / sqrt(columns)."""
    spread = shape[1] ** -0.5
    if kind not in BLOCKS:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(spread)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    nbytes, count, scale_at, minimum_at, largest = BLOCKS[kind]
    rows = shape[0]
    blocks = shape[1] // count
    data = rng.integers(0, 256, (rows, blocks, nbytes), dtype=np.uint8)
    scale = np.float16(2 * spread / largest)
    data[..., scale_at : scale_at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    if minimum_at is not None:
        minimum = np.float16(spread * (-1 if kind in ("Q4_1", "Q5_1") else 1 / 63))
        data[..., minimum_at : minimum_at + 2] = np.frombuffer(minimum.tobytes(), np.uint8)
    return data.reshape(rows, -1)


def write_model(name: str, kind: str, path: Path, layers: int | None = None) -> Path:
    """A Llama-family file; `layers` replaces the known model's."""
    config = dict(KNOWN_MODELS[name].config)
    layers = layers or config["num_hidden_layers"]
    vocab = config["vocab_size"]
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    ffn = config["intermediate_size"]
    dim = config.get("head_dim", hidden // heads)
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(float(config.get("rope_theta", 10000.0)))
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")
    tokens = [
        *VOCABULARY,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(f"w{i}" for i in range(vocab - 259)),
    ]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (vocab - 259)])
    rng = np.random.default_rng(0)

    def matrix(tensor: str, rows: int, columns: int, kind: str = kind) -> None:
        data = random_tensor(rng, (rows, columns), kind)
        writer.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType[kind])

    matrix(
        "token_embd.weight", vocab, hidden, "Q6_K"
    )  # as llama.cpp's quantizer stores a tied embedding
    shapes = {
        "attn_q": (heads * dim, hidden),
        "attn_k": (kv_heads * dim, hidden),
        "attn_v": (kv_heads * dim, hidden),
        "attn_output": (hidden, heads * dim),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    for layer in range(layers):
        for tensor, (rows, columns) in shapes.items():
            matrix(f"blk.{layer}.{tensor}.weight", rows, columns)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(KNOWN_MODELS))
    parser.add_argument("type", choices=[*BLOCKS, "F16", "BF16"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    print(write_model(args.name, args.type, args.path, args.layers))


if __name__ == "__main__":
    main()
