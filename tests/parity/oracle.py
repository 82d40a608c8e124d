"""The float32 model that ours is measured against: transformers, on the weights of a GGUF file.

Dequantization here is the `gguf` package's and the forward pass is transformers', so that nothing is shared with what
is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["Oracle", "chunks", "negative_log_likelihood", "requantized", "tensors"]

F32 = NDArray[np.float32]
CHUNK = 512  # rows whose logits are in memory at a time

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """transformers' name of a GGUF tensor."""
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    base = name.removesuffix(".weight")
    if base in whole:
        return f"{whole[base]}.weight"
    _, layer, part = base.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _half_split(weight: F32, heads: int) -> F32:
    """Undo the row order that llama.cpp's converter gives Q and K (`permute` in convert_hf_to_gguf.py).

    There the two numbers that RoPE rotates together lie side by side; in transformers, half a head apart.
    """
    outputs, inputs = weight.shape
    return weight.reshape(heads, outputs // heads // 2, 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def tensors(path: Path) -> dict[str, F32]:
    """All tensors of a GGUF file, dequantized by the `gguf` package."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = np.array(values, np.float32).reshape([int(n) for n in reversed(tensor.shape)])
    return found


def _config(path: Path, vocab_size: int) -> LlamaConfig:
    fields = gguf.GGUFReader(path).fields

    def number(key: str) -> float:
        return fields[f"llama.{key}"].contents()

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings="output.weight" not in {t.name for t in gguf.GGUFReader(path).tensors},
        attn_implementation="eager",
    )


class Oracle:
    """transformers' Llama in float32."""

    def __init__(self, path: Path) -> None:
        weights = tensors(path)
        config = _config(path, len(weights["token_embd.weight"]))
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        state = {}
        for name, values in weights.items():
            part = name.split(".")[-2]
            values = _half_split(values, heads[part]) if part in heads else values
            state[_hf_name(name)] = torch.from_numpy(np.ascontiguousarray(values))
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.model = LlamaForCausalLM(config).eval()
        self.model.load_state_dict(state)

    def logits(self, ids: Sequence[int]) -> Iterator[tuple[slice, F32]]:
        """Positions and their logits [positions, vocab_size], chunk by chunk: all at once would take much memory."""
        with torch.inference_mode():
            hidden = self.model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
            for rows in chunks(len(ids)):
                yield rows, self.model.lm_head(hidden[rows]).numpy()


def chunks(count: int) -> Iterator[slice]:
    """Positions 0 to `count` in chunks."""
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def negative_log_likelihood(ids: Sequence[int], at: slice, logits: F32) -> float:
    """Sum of -log p(the id that follows) over the positions `at`; the last of all has none."""
    next_ids = ids[at.start + 1 : at.stop + 1]
    rows = logits[: len(next_ids)].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(rows).sum(axis=1))
    return float((log_sum - rows[np.arange(len(rows)), list(next_ids)]).sum())


def requantized(source: Path, target: Path, tensor_type: str) -> Path:
    """The model with the matrices of its layers rounded to another format; the embedding stays as it is."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            add = writer.add_float32 if field.types[0] == gguf.GGUFValueType.FLOAT32 else writer.add_uint32
            add(name, field.contents())
    kind = gguf.GGMLQuantizationType[tensor_type]
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
