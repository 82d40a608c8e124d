"""From a file or folder to a model on a backend: opens it, describes it, checks its tensors, loads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinphase.backends.base import Backend
from twinphase.blueprint import Blueprint
from twinphase.models.architectures import describe, gguf_architecture
from twinphase.models.config import Config
from twinphase.models.decoder import Decoder
from twinphase.models.tensors import check_tensors
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.gguf import open_gguf
from twinphase.weights.safetensors import open_safetensors, read_folder_config

__all__ = ["load_model", "open_model", "read_blueprint"]


def open_model(path: Path, **options: Any) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder; `options` are those of `open_gguf` or `open_safetensors`.

    Raises:
        TwinphaseError: as those two, or an architecture that is not known.
    """
    if not path.is_dir():
        return open_gguf(path, mark_used=options.get("mark_used", True))
    architecture = gguf_architecture(read_folder_config(path).get("model_type"), path.name)
    return open_safetensors(path, architecture, **options)


def read_blueprint(checkpoint: Checkpoint, max_positions: int | None = None) -> Blueprint:
    """What the model is made of, once its architecture and tensors are known to be right.

    `max_positions` is the longest sequence it will see, which chooses between LongRoPE's two sets of factors.

    Raises:
        UnsupportedModelError: the architecture or a feature is not implemented; the message names it.
        CheckpointError: a hyper-parameter or tensor is missing or wrong; the message names it.
    """
    blueprint = describe(Config.of(checkpoint, max_positions))
    check_tensors(checkpoint, blueprint)
    return blueprint


def load_model(
    checkpoint: Checkpoint,
    backend: Backend,
    max_positions: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """Load `checkpoint` onto `backend`, for sequences of up to `max_positions` tokens (None: the model's context).

    `progress` is called with (done, total) layers.

    Raises:
        TwinphaseError: as `read_blueprint`, or what the backend cannot compute.
    """
    blueprint = read_blueprint(checkpoint, max_positions)
    return Decoder(checkpoint, blueprint, backend, max_positions or blueprint.context_length, progress)
