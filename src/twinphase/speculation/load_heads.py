"""Loads draft heads from a folder with config.json and model.safetensors.

Names of tensors and settings are those of vLLM and of the papers. An unknown tensor is refused,
since it belongs to another method. `medusa.py` and `eagle3.py` compute the heads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.speculation.eagle3 import Eagle3, Eagle3Shape, Eagle3Weights
from twinphase.speculation.medusa import Medusa, MedusaWeights
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.quant import dequantize
from twinphase.weights.safetensors import read_arrays, read_folder_config

F32 = NDArray[np.float32]
_RETRAIN = "Use heads that were trained for this model."


def load_heads(
    folder: Path, method: str, target: Checkpoint, num_layers: int, num_tokens: int
) -> Medusa | Eagle3:
    """Load heads for `target`, a model of `num_layers` layers.

    Args:
        folder: folder of the heads.
        method: expected kind of heads, "medusa" or "eagle3".
        target: the model that the heads draft for.
        num_layers: number of the target's layers.
        num_tokens: tokens per draft; at most the number of Medusa heads.

    Raises:
        ModelNotFoundError: the folder or a file in it is missing.
        CheckpointError: a shape does not fit the target or the heads' config, or a file is damaged.
        UnsupportedModelError: the heads are of another method, or of an unsupported variant.
    """
    config = read_folder_config(folder)
    names = [str(config.get("model_type")), *map(str, config.get("architectures") or [])]
    if not any(method in name.lower() for name in names):
        raise UnsupportedModelError(
            f"{folder} has heads of the kind {names[-1][:60]}, and the method is {method}.",
            "Use a folder of Medusa heads with medusa, or of EAGLE-3's with eagle3.",
        )
    vocab_size, hidden_size = target.tensors["token_embd.weight"].shape
    files = _Files(folder, config, vocab_size, hidden_size)
    return (
        _medusa(files, num_layers, num_tokens)
        if method == "medusa"
        else _eagle3(files, target, num_layers, num_tokens)
    )


class _Files:
    """Config and tensors of a folder; each tensor is taken once, and its shape is checked."""

    def __init__(
        self, folder: Path, config: dict[str, Any], vocab_size: int, hidden_size: int
    ) -> None:
        self.folder = folder
        self.config = config
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        for name, own in (
            ("vocab_size", vocab_size),
            ("hidden_size", hidden_size),
            ("target_hidden_size", hidden_size),
        ):
            if config.get(name, own) != own and (
                name != "hidden_size" or "target_hidden_size" not in config
            ):
                self.fail(f"{name} {config[name]!r}, the model has {own}", _RETRAIN)
        self.arrays = {_plain(name): array for name, array in read_arrays(folder).items()}

    def fail(
        self, what: str, fix: str = "Check the folder's config.json, or fetch it again."
    ) -> NoReturn:
        raise CheckpointError(f"The heads in {self.folder} have {what}.", fix)

    def count(self, *names: str, default: int | None = None) -> int:
        """The positive number in the config under one of these names."""
        value = next(
            (self.config[name] for name in names if self.config.get(name) is not None), default
        )
        if type(value) is not int or not 0 < value < 1 << 31:
            self.fail(f"{names[0]} {value!r} in their config")
        return value

    def take(self, name: str, *shape: int) -> F32:
        array = self.arrays.pop(name, None)
        if array is None:
            self.fail(f"no tensor {name}")
        if array.shape != shape or array.dtype != np.float32:
            self.fail(
                f"a tensor {name} of shape {list(array.shape)} and type {array.dtype}, not "
                f"{list(shape)} floats"
            )
        return array

    def take_ids(self, name: str, count: int, *, offsets: bool) -> NDArray[np.int64]:
        """The target's token ids [count]; with `offsets`, they are stored relative to the rows."""
        array = self.arrays.pop(name, None)
        if array is None or array.shape != (count,) or array.dtype.kind != "i":
            self.fail(f"no tensor {name} of {count} integers")
        ids = array.astype(np.int64) + (np.arange(count) if offsets else 0)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            self.fail(f"tokens in {name} beyond the model's {self.vocab_size}", _RETRAIN)
        return ids

    def finish(self) -> None:
        if self.arrays:
            raise UnsupportedModelError(
                f"The heads in {self.folder} have a tensor {min(self.arrays)[:100]!r}, which "
                "has no place in them.",
                "Use heads of the published form.",
            )


def _plain(name: str) -> str:
    """vLLM's name of a tensor."""
    name = (
        name.removeprefix("medusa_heads.").removeprefix("model.").replace("midlayer.", "layers.0.")
    )
    # The first published heads use these names.
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def _medusa(files: _Files, num_layers: int, num_tokens: int) -> Medusa:
    width = files.hidden_size
    config = files.config

    heads = files.count("num_heads", "medusa_num_heads")
    blocks = files.count("num_hidden_layers", "medusa_num_layers", default=1)
    size = files.count("truncated_vocab_size", default=files.vocab_size)
    token_map = (
        files.take_ids("token_map", size, offsets=False) if size != files.vocab_size else None
    )
    names = [[f"blocks.{head}.layers.{block}" for head in range(heads)] for block in range(blocks)]
    num_lm_heads = 1 if config.get("original_lm_head") else heads
    zeros = np.zeros(width, np.float32)

    def bias(name: str) -> F32:
        return files.take(name, width) if name in files.arrays else zeros

    weights = MedusaWeights(
        blocks=[
            np.stack([files.take(f"{name}.weight", width, width) for name in row]) for row in names
        ],
        biases=[np.stack([bias(f"{name}.bias") for name in row]) for row in names],
        lm_heads=np.stack(
            [files.take(f"lm_heads.{head}.weight", size, width) for head in range(num_lm_heads)]
        ),
        token_map=token_map,
    )
    files.finish()
    return Medusa(weights, num_layers, num_tokens)


def _eagle3(files: _Files, target: Checkpoint, num_layers: int, num_tokens: int) -> Eagle3:
    config = files.config
    count = files.count
    take = files.take
    width = count("hidden_size", default=files.hidden_size)
    heads = count("num_attention_heads")
    shape = Eagle3Shape(
        num_heads=heads,
        num_kv_heads=count("num_key_value_heads", default=heads),
        head_dim=count("head_dim", default=width // heads),
        rope_theta=_rope_theta(files),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        norm_before_residual=config.get("norm_before_residual") is True,
    )
    if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        files.fail(f"{shape.num_heads} heads of {shape.head_dim} for {shape.num_kv_heads} of keys")
    if count("num_hidden_layers", default=1) != 1 or config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"The heads in {files.folder} have more than one layer, or another activation than "
            "silu.",
            "Use EAGLE-3 heads of the published form.",
        )
    embed = _embedding(files, target, width)
    inner = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    size = count("intermediate_size")
    draft_size = count("draft_vocab_size", default=files.vocab_size)
    layer = "layers.0."
    mapped = draft_size != files.vocab_size or "d2t" in files.arrays
    weights = Eagle3Weights(
        fc=take("fc.weight", width, 3 * files.hidden_size),
        input_layernorm=take(f"{layer}input_layernorm.weight", width),
        hidden_norm=take(f"{layer}hidden_norm.weight", width),
        qkv=np.concatenate(
            [
                take(f"{layer}self_attn.{name}_proj.weight", rows, 2 * width)
                for name, rows in zip("qkv", (inner, kv, kv), strict=True)
            ]
        ),
        o_proj=take(f"{layer}self_attn.o_proj.weight", width, inner),
        post_attention_layernorm=take(f"{layer}post_attention_layernorm.weight", width),
        gate_up=np.concatenate(
            [take(f"{layer}mlp.{name}_proj.weight", size, width) for name in ("gate", "up")]
        ),
        down_proj=take(f"{layer}mlp.down_proj.weight", width, size),
        norm=take("norm.weight", width),
        lm_head=take("lm_head.weight", draft_size, width),
        token_ids=files.take_ids("d2t", draft_size, offsets=True)
        if mapped
        else np.arange(draft_size),
    )
    files.arrays.pop("t2d", None)  # d2t has the same information.
    files.finish()
    return Eagle3(weights, shape, _layers(files, num_layers), embed, num_tokens)


def _rope_theta(files: _Files) -> float:
    rope = files.config.get("rope_parameters") or files.config.get("rope_scaling") or {}
    if (
        not isinstance(rope, dict)
        or rope.get("rope_type", rope.get("type", "default")) != "default"
    ):
        raise UnsupportedModelError(
            f"The heads in {files.folder} scale their rotations, which is not supported.",
            "Use EAGLE-3 heads with plain RoPE.",
        )
    theta = files.config.get("rope_theta") or rope.get("rope_theta", 10000.0)
    if not isinstance(theta, (int, float)) or not theta > 1:
        files.fail(f"rope_theta {theta!r} in their config")
    return float(theta)


def _layers(files: _Files, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are fused; the default is that of the EAGLE-3 paper."""
    eagle = files.config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else files.config
    layers = eagle.get("eagle_aux_hidden_state_layer_ids", [2, num_layers // 2, num_layers - 3])
    whole = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if (
        not whole
        or len(set(layers)) != 3
        or layers != sorted(layers)
        or not 0 <= layers[0] <= layers[2] < num_layers
    ):
        files.fail(f"layers {layers!r} to read of the model's {num_layers}", _RETRAIN)
    return tuple(layers)


def _embedding(files: _Files, target: Checkpoint, width: int) -> Any:
    """A function that embeds token ids with the heads' own embedding, or with the target's."""
    if "embed_tokens.weight" in files.arrays:
        table = files.take("embed_tokens.weight", files.vocab_size, width)
        return lambda token_ids: table[list(token_ids)]
    if width != files.hidden_size:
        files.fail(
            f"hidden_size {width} and no embedding of their own; the model has {files.hidden_size}",
            _RETRAIN,
        )
    info = target.tensors["token_embd.weight"]
    rows = target.raw(info.name).reshape(files.vocab_size, -1)

    def embed(token_ids: Sequence[int]) -> F32:
        return dequantize(rows[list(token_ids)].reshape(-1), (len(token_ids), width), info.type)

    return embed
