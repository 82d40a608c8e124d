"""Qwen3.5's layer for further tokens beside the same layer of transformers' own modules.

transformers leaves these weights out, so that the layer is put together here, as vLLM and llama.cpp
have it: `fc` of the normalized embedding and hidden state, a decoder layer, a norm, and the head.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families_gguf import write_gguf
from safetensors.torch import load_file, save_file
from tiny_families import make_model, randomize

from steps import Piece, Steps, step_inputs
from twinphase.backends.base import KVCacheSpec
from twinphase.backends.reference import ReferenceBackend
from twinphase.models.loader import open_model
from twinphase.models.mtp import MtpHead, mtp_problem

TOKENS = np.random.default_rng(0).integers(3, 448, 60).astype(np.int32)
TOLERANCE = 1e-3  # of the norm of the logits


class Layer(torch.nn.Module):
    """Named as in published folders."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config
        modeling = import_module(type(model).__module__)
        kind = type(model).__name__.removesuffix("ForCausalLM")
        norm = getattr(modeling, f"{kind}RMSNorm")
        width = config.hidden_size
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(width, config.rms_norm_eps)
        attends = config.layer_types.index("full_attention")
        self.layers = torch.nn.ModuleList(
            [getattr(modeling, f"{kind}DecoderLayer")(config, attends)]
        )
        self.norm = norm(width, config.rms_norm_eps)

    def forward(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [tokens - 1, vocab_size]: row i is of the token at i + 2."""
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        embedded = model.model.embed_tokens(tokens[:, 1:])
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(both, -1))
        count = x.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        angles = model.model.rotary_emb(x, positions[None].expand(3, 1, count))
        x = self.layers[0](x, position_embeddings=angles, attention_mask=mask)
        return model.lm_head(self.norm(x))[0]


def folder_with_layer(path: Path, name: str) -> tuple[Any, np.ndarray]:
    """A folder as published; the model, and the layer's logits."""
    model = make_model(name)
    layer = Layer(model).eval()
    randomize(layer)
    model.save_pretrained(path)
    own = {f"mtp.{key}": value.contiguous() for key, value in layer.state_dict().items()}
    save_file(load_file(path / "model.safetensors") | own, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        return model, layer(model, torch.tensor([TOKENS.tolist()])).numpy()


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("name", ["qwen35", "qwen35-moe"])
def test_logits_are_those_of_transformers(tmp_path, name, kind):
    model, expected = folder_with_layer(tmp_path / "folder", name)
    path = tmp_path / "folder"
    if kind == "gguf":
        path = write_gguf(open_model(path), model, tmp_path / "model.gguf")
    target = Steps(path, ReferenceBackend())
    checkpoint = open_model(path)
    assert mtp_problem(checkpoint, target.model.blueprint) is None
    target.model.kept = (target.model.blueprint.num_layers + 1,)
    target.run([Piece(TOKENS, 0, target.blocks)], logit_rows=[0])
    (hidden,) = target.backend.kept()
    backend = ReferenceBackend()
    head = MtpHead(target.model, checkpoint, backend, 512, 8)
    backend.allocate_kv_cache(KVCacheSpec.of(head.blueprint, 64, 16))
    found = []
    for start, end in ((0, 33), (33, 34), (34, len(TOKENS) - 1)):
        inputs = step_inputs([Piece(TOKENS[start + 1 : end + 1], start, target.blocks)])
        inputs = replace(inputs, hidden=hidden[start:end])
        found.append(backend.execute(head.forward, inputs).copy())
    error = np.linalg.norm(np.concatenate(found) - expected, axis=1)
    assert (error / np.linalg.norm(expected, axis=1)).max() <= TOLERANCE


def test_a_layer_that_lacks_a_tensor_is_named(tmp_path):
    folder_with_layer(tmp_path, "qwen35")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["mtp.pre_fc_norm_hidden.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    steps = Steps(tmp_path, ReferenceBackend())
    problem = mtp_problem(open_model(tmp_path), steps.model.blueprint)
    assert problem is not None and "hnorm" in problem
