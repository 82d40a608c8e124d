"""twinphase: an LLM inference engine in which prefill and decode are first-class.

The public names load on first use, so that `import twinphase` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinphase.engine.frontends.async_engine import AsyncEngine
    from twinphase.engine.frontends.llm import LLM
    from twinphase.engine.frontends.outputs import RequestOutput
    from twinphase.request import SamplingParams

__all__ = ["LLM", "AsyncEngine", "RequestOutput", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_HOME = {
    "AsyncEngine": "twinphase.engine.frontends.async_engine",
    "LLM": "twinphase.engine.frontends.llm",
    "RequestOutput": "twinphase.engine.frontends.outputs",
    "SamplingParams": "twinphase.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'twinphase' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
