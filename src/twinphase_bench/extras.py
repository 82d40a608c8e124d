"""Imports packages of the bench extra on first use, with a clear error if one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from twinphase import TwinphaseError, install_command, note

# Packages for plots and pages; the extra also has scipy, for the intervals of `bench compare`.
DRAWING = ("altair", "vl_convert")


class MissingExtraError(TwinphaseError):
    """A package that this command needs is not installed."""


def can_draw() -> bool:
    """Whether plots and pages can be made."""
    return all(importlib.util.find_spec(name) is not None for name in DRAWING)


def note_missing_plots() -> None:
    """Warn, before a long measurement, that the report will have no plots."""
    if not can_draw():
        note(
            "The extra [bench] is not installed: there will be tables, but no plots and no HTML "
            f"page. For those: {install_command('bench')}"
        )


def require(module: str, packages: str | None = None) -> Any:
    """Import a module of an extra.

    Args:
        module: dotted name: "scipy.stats", "vl_convert".
        packages: arguments of `pip install` if the module is not part of the bench extra.

    Raises:
        MissingExtraError: its package is not installed. A broken package raises its own error.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # The package is installed, but one of its dependencies is not.
    what = package if packages else "the bench extra"
    command = f"pip install {packages}" if packages else install_command("bench")
    raise MissingExtraError(f"This needs {what}: {package} is not installed.", command)


class OnFirstUse:
    """A module of the bench extra, imported when one of its attributes is used."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(require(self._module), name)
