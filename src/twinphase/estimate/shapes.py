"""The shape of a decoder for the formulas, from a Hugging Face configuration or a checkpoint.

`models/architectures` interprets configurations of all formats; `known_models.py` resolves names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from twinphase.blueprint import Blueprint
from twinphase.errors import CheckpointError
from twinphase.models.architectures import describe, gguf_architecture
from twinphase.models.config import Config
from twinphase.models.loader import open_model, read_blueprint
from twinphase.models.size import Size, count_parameters, stored_bytes
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.gguf import quantization_name

CONFIG_FIX = "Give the config.json of a model as it was published."
HF_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class DecoderShape:
    """A blueprint and its origin.

    Attributes:
        name: as the user gave it.
        source: origin of its numbers.
        blueprint: structure of the model.
        dtype: storage type of the weights: "fp16", "bf16", "fp32" or a GGUF type; "" is unknown.
        stored: bytes of the tensors; None for a configuration without weights.
    """

    name: str
    source: str
    blueprint: Blueprint
    dtype: str
    stored: Size | None = None

    @cached_property
    def parameters(self) -> Size:
        return count_parameters(self.blueprint)

    @property
    def linear_parameters(self) -> int:
        """P: weights of the layers' matrices that one row uses, including its own experts."""
        return self.parameters.linear(self.blueprint.experts)

    @property
    def total_parameters(self) -> int:
        """All weights, as model cards count them."""
        return self.parameters.total

    @property
    def active_parameters(self) -> int:
        """Weights that one token uses, with the whole embedding matrix, as on model cards."""
        return self.parameters.active(self.blueprint.experts)


def read_config(path: Path, name: str) -> DecoderShape:
    """The shape in a config.json file; raises as `from_hf_config` does."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}.", CONFIG_FIX) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object.", CONFIG_FIX)
    if isinstance(config.get("text_config"), dict):  # This is a multimodal model.
        config |= config["text_config"]
    return from_hf_config(config, name, str(path))


def from_hf_config(config: Mapping[str, Any], name: str, source: str) -> DecoderShape:
    """The shape in the fields of a config.json.

    Raises:
        CheckpointError: a field is missing or has an impossible value; the message names it.
        UnsupportedModelError: the architecture or a feature is not supported.
    """
    blueprint = describe(Config(config, gguf_architecture(config.get("model_type"), name), name))
    dtype = config.get("dtype") or config.get("torch_dtype")
    known = isinstance(dtype, str) and not config.get("quantization_config")
    return DecoderShape(name, source, blueprint, HF_DTYPES.get(str(dtype), "") if known else "")


def from_model(path: Path, name: str) -> DecoderShape:
    """The shape of a GGUF file or a folder with weights, from its headers.

    Raises:
        TwinphaseError: as `open_model` and `read_blueprint`.
    """
    return from_checkpoint(open_model(path, header_only=True), name)


def from_checkpoint(checkpoint: Checkpoint, name: str) -> DecoderShape:
    """The shape of an open model; raises as `read_blueprint` does."""
    blueprint = read_blueprint(checkpoint)
    source = f"header{'' if checkpoint.config is None else 's'} of {checkpoint.path.name}"
    return DecoderShape(
        name, source, blueprint, quantization_name(checkpoint), stored_bytes(checkpoint, blueprint)
    )
