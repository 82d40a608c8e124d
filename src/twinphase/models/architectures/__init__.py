"""One file per architecture, with its differences from Llama; nothing is computed here.

A file has `HF`, which maps model types in Hugging Face's config.json to GGUF's names, and
`describe`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from twinphase.blueprint import Blueprint
from twinphase.errors import UnsupportedModelError
from twinphase.models.config import Config

_FAMILIES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_GGUF_NAMES: dict[str, str] = {
    model_type: name for family in _FAMILIES for model_type, name in family.HF.items()
}
_BY_GGUF_NAME = {name: family for family in _FAMILIES for name in family.HF.values()}
# Models that users ask for, by the start of both formats' names, and the missing feature.
_KNOWN_MISSING = {
    "gemma3n": "AltUp's four streams of hidden states",
    "mistral4": "latent attention (MLA)",
    "deepseek": "latent attention (MLA)",
    "glm4_moe_lite": "latent attention (MLA)",
    "kimi": "latent attention (MLA)",
    "nemotron_h_moe": "experts without a gate",
    "mamba": "layers of Mamba",
}


def _unsupported(architecture: str, field: str, name: str, known: list[str]) -> Exception:
    missing = next((m for a, m in _KNOWN_MISSING.items() if architecture.startswith(a)), None)
    why = f": it has {missing}" if missing else ""
    return UnsupportedModelError(
        f"The architecture {architecture[:80]!r}{field} of {name} is not supported{why}.",
        f"Use a model of one of: {', '.join(known)}.",
    )


def gguf_architecture(model_type: object, name: str) -> str:
    """GGUF's name for the `model_type` of a config.json; `name` is the model's name in messages.

    Raises:
        UnsupportedModelError: the architecture is not supported.
    """
    if not isinstance(model_type, str) or model_type not in _GGUF_NAMES:
        raise _unsupported(str(model_type), " (model_type)", name, sorted(_GGUF_NAMES))
    return _GGUF_NAMES[model_type]


def describe(config: Config) -> Blueprint:
    """The blueprint of a model.

    Raises:
        UnsupportedModelError: the architecture or a feature is not supported.
        CheckpointError: a field is missing or has an impossible value.
    """
    if config.architecture not in _BY_GGUF_NAME:
        raise _unsupported(config.architecture, "", config.name, sorted(_BY_GGUF_NAME))
    blueprint: Blueprint = _BY_GGUF_NAME[config.architecture].describe(config)
    return blueprint
