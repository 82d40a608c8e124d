"""Packages that only measuring needs, imported when they are used: a missing one is an error that says what to type.

Not for what every command needs, which is imported where it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from twinphase.errors import TwinphaseError

__all__ = ["MissingExtraError", "require"]


class MissingExtraError(TwinphaseError):
    """A package is not installed that this command needs."""


def require(module: str, install: str = "'twinphase[bench]'") -> Any:
    """Import a module of an extra.

    Args:
        module: dotted name: "scipy.stats", "vl_convert".
        install: what `pip install` is to be given; the bench extra unless told.

    Raises:
        MissingExtraError: its package is not installed. One that is installed and broken raises what it raises.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is there, and something that it needs is not
    what = "the bench extra" if "[bench]" in install else package
    raise MissingExtraError(f"This needs {what}: {package} is not installed.", f"pip install {install}")
