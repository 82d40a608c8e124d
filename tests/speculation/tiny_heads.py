"""Small random Medusa and EAGLE-3 heads, in folders as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from twinphase.models.loader import open_model
from twinphase.speculation.eagle3 import Eagle3
from twinphase.speculation.load_heads import load_heads
from twinphase.speculation.medusa import Medusa

VOCAB = 320
WIDTH = 64
LAYERS = 4
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "vocab_size": VOCAB,
    "draft_vocab_size": 100,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}
MEDUSA = {
    "model_type": "medusa",
    "num_heads": 3,
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "vocab_size": VOCAB,
}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Matrices whose products keep their inputs' size, and norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / shape[1] ** 0.5
        if len(shape) == 2
        else 1 + torch.randn(shape, generator=generator) / 10
        for name, shape in shapes.items()
    }


def medusa_tensors(config: dict[str, Any], *, bias: bool = False) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config["num_heads"]):
        for block in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{block}.weight"] = WIDTH, WIDTH
            if bias:
                shapes[f"blocks.{head}.layers.{block}.bias"] = (WIDTH,)
        if not config.get("original_lm_head") or not head:
            shapes[f"lm_heads.{head}.weight"] = config.get("truncated_vocab_size", VOCAB), WIDTH
    tensors = random_tensors(shapes)
    if "truncated_vocab_size" in config:
        tensors["token_map"] = torch.randperm(VOCAB)[: config["truncated_vocab_size"]]
    return tensors


def eagle3_tensors(*, seed: int = 0, embedding: bool = True) -> dict[str, Tensor]:
    layer = "midlayer."
    inner = 6 * 16
    kv = 2 * 16
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        f"{layer}input_layernorm.weight": (WIDTH,),
        f"{layer}hidden_norm.weight": (WIDTH,),
        f"{layer}self_attn.q_proj.weight": (inner, 2 * WIDTH),
        f"{layer}self_attn.k_proj.weight": (kv, 2 * WIDTH),
        f"{layer}self_attn.v_proj.weight": (kv, 2 * WIDTH),
        f"{layer}self_attn.o_proj.weight": (WIDTH, inner),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
        f"{layer}mlp.gate_proj.weight": (96, WIDTH),
        f"{layer}mlp.up_proj.weight": (96, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, 96),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (100, WIDTH),
    }
    if embedding:
        shapes["embed_tokens.weight"] = VOCAB, WIDTH
    tensors = random_tensors(shapes, seed)
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:100].sort().values
    tensors["d2t"] = chosen - torch.arange(100)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def write_heads(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def opened(folder: Path, target: Path, num_tokens: int = 3) -> Medusa | Eagle3:
    method = "medusa" if "medusa" in (folder / "config.json").read_text() else "eagle3"
    return load_heads(folder, method, open_model(target), LAYERS, num_tokens)
