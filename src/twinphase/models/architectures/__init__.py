"""One file per architecture, each of which says how it differs from Llama and computes nothing.

A file has `HF`, the model types of Hugging Face's config.json with the name that GGUF has for each,
and `describe`.
"""

from __future__ import annotations

from collections.abc import Callable

from twinphase.blueprint import Blueprint
from twinphase.errors import UnsupportedModelError
from twinphase.models.architectures import (
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt_oss,
    granite,
    llama,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from twinphase.models.config import Config

_MODULES = (
    llama,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    gemma,
    gemma2,
    gemma3,
    phi3,
    olmo2,
    olmoe,
    granite,
    smollm3,
    gpt_oss,
    exaone4,
    glm4,
)
_MODEL_TYPES: dict[str, str] = {
    model_type: name for module in _MODULES for model_type, name in module.HF.items()
}
_DESCRIBE: dict[str, Callable[[Config], Blueprint]] = {}
for _module in _MODULES:
    for _name in _module.HF.values():
        _DESCRIBE.setdefault(_name, _module.describe)
ARCHITECTURES = tuple(_DESCRIBE)  # by GGUF's names


def gguf_architecture(model_type: object, name: str) -> str:
    """GGUF's name for the `model_type` of a config.json; `name` is the model's, for the message.

    Raises:
        UnsupportedModelError: not one of `ARCHITECTURES`.
    """
    if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"The architecture {str(model_type)[:80]!r} (model_type) of {name} is not supported.",
            f"Use a model of one of: {', '.join(sorted(_MODEL_TYPES))}.",
        )
    return _MODEL_TYPES[model_type]


def describe(config: Config) -> Blueprint:
    """The blueprint of a model.

    Raises:
        UnsupportedModelError: an architecture or a feature that is not known.
        CheckpointError: a field that is missing or absurd.
    """
    if config.architecture not in _DESCRIBE:
        raise UnsupportedModelError(
            f"The architecture {config.architecture!r} of {config.name} is not supported.",
            f"Use a model of one of: {', '.join(sorted(ARCHITECTURES))}.",
        )
    if config.architecture == "llama" and (
        config.fields.get("model_type") == "mixtral" or config.fields.get("num_experts")
    ):
        return mixtral.describe(config)
    return _DESCRIBE[config.architecture](config)
