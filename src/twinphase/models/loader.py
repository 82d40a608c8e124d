"""From an open checkpoint to a model on a backend: picks the architecture's class and checks its tensors."""

from __future__ import annotations

from typing import Protocol

from twinphase.backends.base import Array, Backend
from twinphase.errors import UnsupportedModelError
from twinphase.models.config import ModelConfig
from twinphase.models.llama import Llama
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.names import check_tensors

__all__ = ["Model", "load_model"]

ARCHITECTURES = {"llama": Llama}


class Model(Protocol):
    """A loaded model."""

    config: ModelConfig

    def forward(self, backend: Backend) -> Array:
        """Logits of the backend's current step."""


def load_model(checkpoint: Checkpoint, backend: Backend) -> Model:
    """Load `checkpoint` onto `backend`.

    Raises:
        UnsupportedModelError: the architecture is not implemented; the message names it and those that are.
        CheckpointError: a tensor is missing or has the wrong shape; the message names it.
    """
    model_class = ARCHITECTURES.get(checkpoint.architecture)
    if model_class is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"Architecture {checkpoint.architecture!r} of {checkpoint.path.name} is not supported.",
            f"Use a model of one of: {known}.",
        )
    config = ModelConfig.from_checkpoint(checkpoint)
    check_tensors(checkpoint, config)
    return model_class(checkpoint, config, backend)
