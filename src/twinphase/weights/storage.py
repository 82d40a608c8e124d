"""The folders for files that are kept between runs, and atomic writes to them.

It does not know the content of the files.
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
    """The user's cache folder: $TWINPHASE_CACHE, or the platform's; it may not exist yet."""
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
    """The folder for data derived from the model at `path`; it may not exist yet."""
    return cache_root() / "index" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary file that becomes `path` after the block, so that readers never see a part.

    Raises:
        OSError: there is no space or no permission; no file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A rename is atomic only within one file system, so the temporary file is beside the target.
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
    """Write a file so that readers see either the old or the new content.

    Raises:
        OSError: there is no space or no permission; no file is left.
    """
    with atomically(path) as temporary:
        temporary.write_bytes(data)


def replace_derived(path: Path, data: bytes) -> bool:
    """Write a file in a model's cache folder, and remove files derived from older content.

    GGUF files are kept, because they contain their own key. Returns False if the cache cannot be
    written.
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
    """Record this moment as the last use of a model, if the cache can be written."""
    with contextlib.suppress(OSError):
        (model_cache(model) / "used").touch()


def last_used(model: Path) -> float | None:
    """The time when the model was last opened, seconds since the epoch; None if unknown."""
    try:
        return (model_cache(model) / "used").stat().st_mtime
    except OSError:
        return None


def map_file(path: Path, min_bytes: int, too_short: str) -> tuple[mmap.mmap, os.stat_result]:
    """Map a file for reading; returns its content and its state.

    Args:
        path: path of the file.
        min_bytes: size of the smallest valid file.
        too_short: description of a smaller file for the message.

    Raises:
        ModelNotFoundError: there is no such file, or it is a directory.
        CheckpointError: the file is too short, or cannot be read.
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
    # A ValueError means a null byte in the path, or a file that cannot be mapped.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path} cannot be read: {reason}.", "Check the file and its permissions."
        ) from None


def require_regular(path: Path, fix: str) -> None:
    """Refuse pipes, devices and sockets, because reading them may never end.

    Raises:
        CheckpointError: the path is one of these; `fix` is the remedy in the message.
        OSError: the path does not exist.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path} is a pipe, a device or a socket, not a file.", fix)


def read_limited(path: Path, max_bytes: int, fix: str) -> bytes:
    """Read a small file.

    Raises:
        CheckpointError: the file is larger than `max_bytes`, or cannot be read; `fix` is the remedy
            in the message.
    """
    try:
        require_regular(path, fix)
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path} is larger than {max_bytes >> 20} MiB.", fix)
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.", fix) from None


def abandoned(folder: Path, prefix: str) -> list[Path]:
    """Leftovers of killed processes in a folder, named by the prefix, a process id and a hyphen."""
    owners = {
        path: path.name.removeprefix(prefix).partition("-")[0] for path in folder.glob(f"{prefix}*")
    }
    return [path for path, pid in owners.items() if pid.isdigit() and not _is_running(int(pid))]


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":  # On Windows, signal 0 would end the process.
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def storage_error(error: OSError, path: Path) -> StorageError:
    """The error for a failed write at `path`; it distinguishes missing space and permission."""
    fix = f"Set {_CACHE_VARIABLE} to a folder you may write to, on a disk with room."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"No disk space left at {path}.", f"Free some space there, or: {fix}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"No permission to write at {path}.", fix)
    return StorageError(f"Could not write at {path}: {error.strerror or error}.", fix)
