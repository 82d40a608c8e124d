"""Where twinphase keeps files between runs, and how they get there whole or not at all.

Names folders and writes bytes; knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
import tempfile
from pathlib import Path

from twinphase.errors import StorageError

_CACHE_VARIABLE = "TWINPHASE_CACHE"


def cache_root() -> Path:
    """The per-user cache folder: $TWINPHASE_CACHE, or the platform's (it need not exist yet)."""
    if chosen := os.environ.get(_CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "twinphase"
    if sys.platform == "win32":
        return (
            Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "twinphase"
        )
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinphase"


def model_cache(path: Path) -> Path:
    """The folder for what is derived from the model at `path`, a file or a folder (it need not exist yet)."""
    return cache_root() / "index" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that readers see the old content or the new, never a part.

    Raises:
        OSError: no space or no right; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic only within one file system.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def abandoned(folder: Path, prefix: str) -> list[Path]:
    """What processes that were killed have left in a folder, under names of prefix, process id and a hyphen."""
    found = []
    for path in folder.glob(f"{prefix}*"):
        owner = path.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not _is_running(int(owner)):
            found.append(path)
    return found


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":  # there, signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def storage_error(error: OSError, path: Path) -> StorageError:
    """The error to show for a failed write at `path`: no space and no right are told apart."""
    fix = f"Set {_CACHE_VARIABLE} to a folder you may write to, on a disk with room."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"No disk space left at {path}.", f"Free some space there, or: {fix}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"No right to write at {path}.", fix)
    return StorageError(f"Could not write at {path}: {error.strerror or error}.", fix)
