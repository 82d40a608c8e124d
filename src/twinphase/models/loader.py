"""From an open checkpoint to a model on a backend: picks the architecture's class and checks its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twinphase.backends.base import Array, Backend
from twinphase.errors import UnsupportedModelError
from twinphase.models.config import ModelConfig
from twinphase.models.llama import Llama
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.names import check_tensors

__all__ = ["Model", "load_model", "read_config"]

ARCHITECTURES = {"llama": Llama}


class Model(Protocol):
    """A loaded model."""

    config: ModelConfig

    def forward(self, backend: Backend) -> Array:
        """Logits of the backend's current step."""


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model's hyper-parameters, once its architecture and tensors are known to be right.

    Raises:
        UnsupportedModelError: the architecture or a feature is not implemented; the message names it.
        CheckpointError: a hyper-parameter or tensor is missing or wrong; the message names it.
    """
    if checkpoint.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"Architecture {checkpoint.architecture!r} of {checkpoint.path.name} is not supported.",
            f"Use a model of one of: {known}.",
        )
    config = ModelConfig.from_checkpoint(checkpoint)
    check_tensors(checkpoint, config)
    return config


def load_model(
    checkpoint: Checkpoint,
    backend: Backend,
    max_positions: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Model:
    """Load `checkpoint` onto `backend`, for sequences of up to `max_positions` tokens (None: the model's context).

    `progress` is called with (done, total) layers.

    Raises:
        TwinphaseError: as `read_config`, or what the backend cannot compute.
    """
    config = read_config(checkpoint)
    model_class = ARCHITECTURES[checkpoint.architecture]
    return model_class(checkpoint, config, backend, max_positions or config.context_length, progress)
