"""Writes a GGUF file of a known model's shape with random weights: its speed is real, its text not.

python benchmarks/random_model.py llama-3.2-1b Q4_0 1b.gguf
python benchmarks/random_model.py llama-3.2-1b Q4_0 small.gguf --layers 4

Names are those of `twinphase estimate --list-models`. Weights are random bytes with sane scales:
quantizing a billion random numbers would take minutes and change nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from twinphase.blueprint import Blueprint, ShortConv
from twinphase.estimate.known_models import KNOWN_MODELS
from twinphase.models.architectures import describe, gguf_architecture
from twinphase.models.config import Config
from twinphase.models.tensors import model_tensors
from twinphase.weights.checkpoint import Checkpoint, TensorInfo

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


def metadata_of(b: Blueprint, theta: float) -> dict[str, Any]:
    """GGUF's keys after the architecture's prefix, as llama.cpp's converters write them."""
    layers = range(b.num_layers)
    heads = [b.kv_shape(i).num_heads if b.attends(i) else 0 for i in layers]
    widths = [b.ffn_width(i) for i in layers]
    dim = b.full_kv.head_dim if b.full_kv else b.head_dim
    values: dict[str, Any] = {
        "context_length": 8192,
        "embedding_length": b.hidden_size,
        "block_count": b.num_layers,
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "attention.head_count": b.num_heads,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": b.norm_eps,
        "rope.freq_base": theta,
        "rope.dimension_count": 2 * max(len(rope.frequencies) for rope in b.ropes if rope)
        if any(b.ropes)
        else dim,
        "vocab_size": b.vocab_size,
    }
    if any(b.windows):
        values["attention.sliding_window"] = max(window for window in b.windows if window)
        values["attention.sliding_window_pattern"] = [window is not None for window in b.windows]
    if b.full_kv:
        for key in ("attention.key_length_swa", "attention.value_length_swa"):
            values[key] = b.head_dim
        values["rope.dimension_count_swa"] = b.head_dim
        values |= {
            "attention.shared_kv_layers": b.shared_kv_layers,
            "embedding_length_per_layer_input": b.layer_embedding_size,
            "final_logit_softcapping": b.logit_softcap,
        }
    r = b.recurrence
    if isinstance(r, ShortConv):
        values["shortconv.l_cache"] = r.taps
    elif r is not None:
        values |= {
            "ssm.conv_kernel": r.taps,
            "ssm.state_size": r.key_dim,
            "ssm.group_count": r.key_heads,
            "ssm.time_step_rank": r.value_heads,
            "ssm.inner_size": r.num_values,
        }
    if b.architecture == "granitehybrid":
        values["expert_shared_feed_forward_length"] = widths[0]
        values["rope.scaling.finetuned"] = False
        values |= {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
        values["attention.scale"] = b.scale
    if b.architecture == "qwen35":  # all positions of a text are the same in every section
        values["rope.dimension_sections"] = [11, 11, 10, 0]
        values |= {"full_attention_interval": 4, "attention.head_count_kv": b.num_kv_heads}
    return values


def add_value(writer: Any, key: str, value: Any) -> None:
    add = {bool: "add_bool", int: "add_uint32", float: "add_float32", list: "add_array"}
    getattr(writer, add[type(value)])(key, value)


def add_vocabulary(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("llama")
    tokens = [
        *VOCABULARY,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(f"w{i}" for i in range(size - 259)),
    ]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (size - 259)])


def as_quantizer(name: str, shape: tuple[int, ...], kind: str) -> str:
    """The type of a tensor where llama.cpp's quantizer writes most of them as `kind`."""
    kept = ("conv.weight", "conv1d.weight", "norm.weight")
    if not name.endswith(".weight") or len(shape) < 2 or name.endswith(kept):
        return "F32"
    if name == "token_embd.weight":
        kind = "Q6_K"
    return {"Q6_K": "Q8_0"}.get(kind, "Q5_0") if kind.endswith("K") and shape[1] % 256 else kind


def write_model(name: str, kind: str, path: Path, layers: int | None = None) -> Path:
    """A dense model's file; `layers` replaces the known model's: the first of them are written."""
    config = dict(KNOWN_MODELS[name].config)
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    arch = gguf_architecture(config["model_type"], name)
    blueprint = describe(Config(config, arch, name))
    if blueprint.experts:
        raise SystemExit(f"{name} is a mixture of experts, which this script does not write.")
    values = metadata_of(blueprint, float(config.get("rope_theta", 1e6)))
    writer: Any = gguf.GGUFWriter(str(path), arch)
    for key, value in values.items():
        add_value(writer, f"{arch}.{key}", value)
    add_vocabulary(writer, blueprint.vocab_size)
    shapes = {"token_embd.weight": (blueprint.vocab_size, blueprint.hidden_size)}
    shapes |= {"blk.0.attn_q.bias": (1,)} if blueprint.qkv_bias else {}
    header = Checkpoint(
        path,
        arch,
        {f"{arch}.{key}": value for key, value in values.items()},
        {tensor: TensorInfo(tensor, shape, "F32", 0, 0) for tensor, shape in shapes.items()},
        (),
        "",
    )
    rng = np.random.default_rng(0)
    if blueprint.full_kv:  # a quarter of the pairs of a full layer's head rotates
        divisors = np.full(blueprint.full_kv.head_dim // 2, 1e30, np.float32)
        divisors[: len(divisors) // 4] = 1
        writer.add_tensor("rope_freqs.weight", divisors)
    # A head of its own would not change the work of a step.
    for tensor, shape in model_tensors(replace(describe(Config.of(header)), tied=True)):
        own = as_quantizer(tensor, shape, kind)
        if own != "F32":
            data = random_tensor(rng, (shape[0], shape[1]), own)
            writer.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType[own])
        elif tensor.endswith("ssm_a"):
            writer.add_tensor(tensor, np.full(shape, -1, np.float32))
        else:
            flat = tensor.endswith("norm.weight") or "scale" in tensor
            numbers = np.ones(shape) if flat else rng.standard_normal(shape) / 2
            # llama.cpp's converter writes this norm of Falcon-H1 without a suffix.
            bare = arch == "falcon-h1" and tensor.endswith(".ffn_norm.weight")
            written = tensor.removesuffix(".weight") if bare else tensor
            writer.add_tensor(written, numbers.astype(np.float32))
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
