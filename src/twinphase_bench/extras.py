"""Packages of the bench extra, imported on first use; a missing one is a clear error."""

from __future__ import annotations

import importlib
from typing import Any

from twinphase import TwinphaseError


class MissingExtraError(TwinphaseError):
    """A package that this command needs is not installed."""


def require(module: str, install: str = "'twinphase[bench]'") -> Any:
    """Import a module of an extra.

    Args:
        module: dotted name: "scipy.stats", "vl_convert".
        install: what `pip install` is to be given.

    Raises:
        MissingExtraError: its package is not installed. One that is installed and broken raises
            what it raises.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is there, and something that it needs is not
    what = "the bench extra" if "[bench]" in install else package
    raise MissingExtraError(
        f"This needs {what}: {package} is not installed.", f"pip install {install}"
    )


class OnFirstUse:
    """A module of the bench extra that is imported when one of its attributes is used."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(require(self._module), name)
