"""Where twinphase keeps files between runs, and how they get there whole or not at all.

Names folders and writes bytes; knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from twinphase.errors import CheckpointError, ModelNotFoundError, StorageError

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
    """The folder for what is derived from the model at `path`; it need not exist yet."""
    return cache_root() / "index" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary file to write, which becomes `path` afterwards: readers never see a part of it.

    Raises:
        OSError: no space or no right; nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic only within one file system.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-{os.getpid()}-", dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that readers see the old content or the new, never a part.

    Raises:
        OSError: no space or no right; nothing is left.
    """
    with atomically(path) as temporary:
        temporary.write_bytes(data)


def replace_derived(path: Path, data: bytes) -> bool:
    """Writes a file in a model's cache folder, and removes what was derived from older content.

    GGUF files stay: they carry a key of their own. False if the cache cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.iterdir():
            if old.suffix != ".gguf":
                old.unlink(missing_ok=True)
        write_atomically(path, data)
    except OSError:
        return False
    return True


def mark_used(model: Path) -> None:
    """Remembers this moment as the last use of a model, if the cache can be written."""
    with contextlib.suppress(OSError):
        (model_cache(model) / "used").touch()


def last_used(model: Path) -> float | None:
    """When the model was last opened, seconds since the epoch; None if that is not known."""
    try:
        return (model_cache(model) / "used").stat().st_mtime
    except OSError:
        return None


def map_file(path: Path, min_bytes: int, too_short: str) -> tuple[mmap.mmap, os.stat_result]:
    """A file's content, mapped for reading, and its state.

    Args:
        path: of the file.
        min_bytes: size of the smallest valid file.
        too_short: what a smaller file is, for the message.

    Raises:
        ModelNotFoundError: no such file, or a directory.
        CheckpointError: a file that is too short, or that cannot be read.
    """
    try:
        require_regular(path, "Give a model file.")
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            if state.st_size < min_bytes:
                raise CheckpointError(
                    f"{path} is {too_short} ({state.st_size} bytes).", "Fetch the file again."
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), state
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"There is no file {path}.", "Check the path, or pull the model first."
        ) from None
    except IsADirectoryError:
        raise ModelNotFoundError(f"{path} is a directory.", "Give the .gguf file in it.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte, or what cannot be mapped
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path} cannot be read: {reason}.", "Check the file and its rights."
        ) from None


def require_regular(path: Path, fix: str) -> None:
    """Refuses pipes, devices and sockets, where reading may never end.

    Raises:
        CheckpointError: the path names one of these; `fix` says what to do.
        OSError: there is nothing at the path.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path} is a pipe, a device or a socket, not a file.", fix)


def read_limited(path: Path, max_bytes: int, fix: str) -> bytes:
    """A small file's content.

    Raises:
        CheckpointError: it is larger than `max_bytes`, or cannot be read; `fix` says what to do.
    """
    try:
        require_regular(path, fix)
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path} is larger than {max_bytes >> 20} MiB.", fix)
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.", fix) from None


def abandoned(folder: Path, prefix: str) -> list[Path]:
    """What killed processes left in a folder, under names of prefix, process id and a hyphen."""
    owners = {
        path: path.name.removeprefix(prefix).partition("-")[0] for path in folder.glob(f"{prefix}*")
    }
    return [path for path, pid in owners.items() if pid.isdigit() and not _is_running(int(pid))]


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
    """The error to show for a failed write at `path`: no space and no right differ."""
    fix = f"Set {_CACHE_VARIABLE} to a folder you may write to, on a disk with room."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"No disk space left at {path}.", f"Free some space there, or: {fix}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"No right to write at {path}.", fix)
    return StorageError(f"Could not write at {path}: {error.strerror or error}.", fix)
