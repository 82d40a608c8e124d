"""Loads a model onto a backend: opens its files, reads its blueprint, and checks its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinphase.backends.base import Backend
from twinphase.blueprint import Blueprint
from twinphase.errors import InvalidRequestError, UnsupportedModelError
from twinphase.models.architectures import describe, gemma3, gguf_architecture
from twinphase.models.bert import HF as ENCODERS
from twinphase.models.config import Config
from twinphase.models.decoder import Decoder
from twinphase.models.tasks import HEAD, is_encoder
from twinphase.models.tensors import check_tensors, model_tensors, unused_tensors
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import resolve_model
from twinphase.weights.safetensors import open_safetensors, read_folder_config


def open_model(path: Path, *, quantization: str = "none", header_only: bool = False) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder.

    Args:
        path: path of the file or the folder.
        quantization: quantization of a folder's matrices, one of `config.QUANTIZATIONS`.
        header_only: whether no tensor will be read, so that converted tensors are not made and the
            use is not recorded.

    Raises:
        InvalidRequestError: `quantization` is given for a GGUF file or an encoder.
        TwinphaseError: as `open_gguf` and `open_safetensors`, or the architecture is not supported.
    """
    if path.is_dir():
        fields = read_folder_config(path)
        model_type = fields.get("model_type")
        encoder = ENCODERS.get(str(model_type))
        if fields.get("use_bidirectional_attention") and str(model_type) in gemma3.HF:
            encoder = "gemma-embedding"
        if encoder is not None and quantization != "none":
            raise InvalidRequestError(
                f"{path.name} is an encoder, which is computed in float32.",
                "Leave quantization out.",
            )
        architecture = encoder or gguf_architecture(model_type, path.name)
        return open_safetensors(
            path,
            architecture,
            quantization=quantization,
            header_only=header_only,
            mark_used=not header_only,
        )
    if quantization != "none":
        raise InvalidRequestError(
            f"{path.name} cannot be quantized while loading: GGUF files are as they are.",
            "Leave quantization out, or give the model's Hugging Face folder.",
        )
    return open_gguf(path, mark_used=not header_only)


def model_blueprint(name: str) -> Blueprint:
    """The blueprint of a model by its name or path; reads only the headers of its files."""
    return read_blueprint(open_model(resolve_model(name), header_only=True))


def read_blueprint(checkpoint: Checkpoint, max_positions: int | None = None) -> Blueprint:
    """Read the blueprint of a model, and check its architecture and tensors.

    `max_positions` is the maximum length of a sequence, which selects one of LongRoPE's two sets of
    factors.

    Raises:
        UnsupportedModelError: an encoder, or the architecture or a feature is not implemented; the
            message names it.
        CheckpointError: a hyper-parameter or tensor is missing or wrong; the message names it.
    """
    if is_encoder(checkpoint):
        raise UnsupportedModelError(
            f"{checkpoint.path.name} is an encoder, which has neither prefill nor decode.",
            "Embed texts with it: LLM.embed, or `twinphase serve` and /v1/embeddings.",
        )
    blueprint = describe(Config.of(checkpoint, max_positions))
    drafting = tuple(f"blk.{blueprint.num_layers + i}." for i in range(blueprint.draft_layers))
    ignored = [name for name in checkpoint.tensors if name.startswith(drafting)] if drafting else []
    ignored += [*unused_tensors(blueprint), HEAD]
    check_tensors(checkpoint, dict(model_tensors(blueprint)), ignored)
    return blueprint


def load_model(
    checkpoint: Checkpoint,
    backend: Backend,
    max_positions: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    blueprint: Blueprint | None = None,
) -> Decoder:
    """Load `checkpoint` onto `backend`, for sequences of up to `max_positions` tokens.

    None stands for the model's context. `progress` is called with (done, total) layers; `blueprint`
    is the result of `read_blueprint` for these positions.

    Raises:
        TwinphaseError: as `read_blueprint`, or the backend cannot compute the model.
    """
    blueprint = blueprint or read_blueprint(checkpoint, max_positions)
    return Decoder(
        checkpoint, blueprint, backend, max_positions or blueprint.context_length, progress
    )
