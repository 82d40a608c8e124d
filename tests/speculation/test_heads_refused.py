"""Draft heads that do not fit their model, or that are incomplete, are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.speculation.tiny_heads import (
    EAGLE3,
    MEDUSA,
    eagle3_tensors,
    medusa_tensors,
    opened,
    write_heads,
)
from torch import Tensor

from twinphase.errors import (
    CheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
)

CONFIGS = {"medusa": MEDUSA, "eagle3": EAGLE3}
TENSORS = {"medusa": medusa_tensors(MEDUSA), "eagle3": eagle3_tensors()}
NO_SUCH_LAYERS = {"eagle_aux_hidden_state_layer_ids": "all"}
# The method, what changes in its config and tensors (None: it is not there), and the message.
DAMAGED: list[tuple[str, dict[str, Any], dict[str, Tensor | None], str]] = [
    ("eagle3", {"vocab_size": 32000}, {}, "vocab_size 32000, the model has 320"),
    ("medusa", {"hidden_size": 4096}, {}, "hidden_size 4096, the model has 64"),
    ("eagle3", {"target_hidden_size": 96}, {}, "target_hidden_size 96, the model has 64"),
    ("eagle3", {}, {"midlayer.hidden_norm.weight": None}, "no tensor layers.0.hidden_norm.weight"),
    ("medusa", {}, {"blocks.2.layers.1.weight": None}, "no tensor blocks.2.layers.1.weight"),
    (
        "medusa",
        {},
        {"lm_heads.1.weight": torch.zeros(319, 64)},
        r"lm_heads.1.weight of shape \[319, 64\] and type float32, not \[320, 64\]",
    ),
    ("eagle3", {}, {"d2t": torch.full((100,), 300)}, "tokens in d2t beyond the model's 320"),
    ("eagle3", {}, {"d2t": None}, "no tensor d2t of 100 integers"),
    ("medusa", {"truncated_vocab_size": 50}, {}, "no tensor token_map of 50 integers"),
    ("medusa", {"num_heads": "many"}, {}, "num_heads 'many' in their config"),
    ("eagle3", {"eagle_config": None}, {}, r"layers \[2, 2, 1\] to read of the model's 4"),
    ("eagle3", {"eagle_config": NO_SUCH_LAYERS}, {}, "layers 'all' to read"),
    ("eagle3", {"num_key_value_heads": 4}, {}, "6 heads of 16 for 4 of keys"),
]
UNSUPPORTED: list[tuple[str, dict[str, Any], dict[str, Tensor | None], str]] = [
    (
        "eagle3",
        {"architectures": ["LlamaForCausalLM"]},
        {},
        "the kind LlamaForCausalLM, and the method is eagle3",
    ),
    ("medusa", {}, {"extra": torch.zeros(1)}, "a tensor 'extra', which has no place"),
    ("eagle3", {"rope_scaling": {"rope_type": "llama3"}}, {}, "scale their rotations"),
    ("eagle3", {"num_hidden_layers": 2}, {}, "more than one layer"),
    ("medusa", {}, {"extra": torch.zeros(1, dtype=torch.float64)}, "has type F64"),
]


@pytest.mark.parametrize(
    ("error", "method", "config", "tensors", "message"),
    [(CheckpointError, *row) for row in DAMAGED]
    + [(UnsupportedModelError, *row) for row in UNSUPPORTED],
)
def test_what_does_not_fit_is_refused(tmp_path, target, error, method, config, tensors, message):
    def changed(whole: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in (whole | changes).items() if value is not None}

    folder = write_heads(
        tmp_path, changed(CONFIGS[method], config), changed(TENSORS[method], tensors)
    )
    with pytest.raises(error, match=message):
        opened(folder, target)


def test_a_folder_without_weights(tmp_path, target):
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    with pytest.raises(ModelNotFoundError, match="has no model.safetensors"):
        opened(tmp_path, target)
    (tmp_path / "medusa_lm_head.pt").touch()
    with pytest.raises(UnsupportedModelError, match="as a pickle"):
        opened(tmp_path, target)
