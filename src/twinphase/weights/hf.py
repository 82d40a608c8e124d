"""Fetches a GGUF file, or the parts of one, from a model hub.

`huggingface_hub` does it, which resumes and shows progress by itself; it is imported only when something has to be
downloaded. Not for names or the places of models (hub.py).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from twinphase.errors import DownloadError, ModelNotFoundError, TwinphaseError
from twinphase.weights.split import is_later_part, part_names
from twinphase.weights.storage import storage_error

__all__ = ["fetch_from_hub", "matching_files"]

_LOG_ERRORS = 40  # logging.ERROR
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def fetch_from_hub(repo: str, file: str | None, target: Path) -> Path:
    """Downloads one GGUF file of a repository; of a split one all parts, and the first is returned.

    Args:
        repo: "org/name".
        file: its path in the repository, or a part of it that fits one file only ("Q4_K_M"); None if it has only one.
        target: folder for the files of this repository; what an interrupted download left there is continued.

    Raises:
        ModelNotFoundError: no such repository or file, or several that fit (they are listed).
        DownloadError: the hub cannot be reached, or denies access.
        StorageError: no space, or no right to write.
    """
    import huggingface_hub

    try:
        with _quiet():
            files = huggingface_hub.HfApi().list_repo_files(repo)
        chosen = _choose([f for f in files if f.lower().endswith(".gguf")], repo, file)
        parts = [huggingface_hub.hf_hub_download(repo, part, local_dir=target) for part in part_names(chosen)]
        return Path(parts[0])
    except TwinphaseError:
        raise
    except Exception as error:
        raise _failure(error, repo, target) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the library's warnings of each retry off the terminal: the error at the end says it in one line."""
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(_LOG_ERRORS)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def matching_files(files: list[str], wanted: str | None) -> list[str]:
    """Those that a name stands for: all for None, the exact one, or else those that contain it in any case."""
    if wanted is None:
        return files
    exact = [f for f in files if f == wanted]
    return exact or [f for f in files if wanted.lower() in f.lower()]


def _choose(files: list[str], repo: str, wanted: str | None) -> str:
    files = [f for f in files if not is_later_part(f)]
    found = matching_files(files, wanted)
    if not files:
        raise ModelNotFoundError(f"The repository {repo} has no .gguf file.", "Choose a repository of GGUF files.")
    if len(found) != 1:
        cause = f"{repo} has {len(found) or 'no'} GGUF files" + (f" that fit {wanted!r}." if wanted else ".")
        raise ModelNotFoundError(cause, f"Use hf:{repo}:FILE with one of: {', '.join(found or files)}.")
    return found[0]


def _failure(error: Exception, repo: str, target: Path) -> TwinphaseError:
    """Tells the library's errors apart by name: their classes have moved between its versions."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return storage_error(error, target)
    if "GatedRepoError" in names:
        return DownloadError(
            f"{repo} is open only to users who accepted its terms.", "Accept them on its page and log in to the hub."
        )
    if "LocalEntryNotFoundError" not in names and names & {
        "RepositoryNotFoundError",
        "EntryNotFoundError",
        "HFValidationError",
    }:
        return ModelNotFoundError(f"There is no repository {repo} (or it is private).", "Check the name after 'hf:'.")
    lines = str(error).strip().splitlines()
    reason = (lines[0] if lines else type(error).__name__)[:300].rstrip(".")
    return DownloadError(
        f"{repo} could not be downloaded: {reason}.", "Check the network and try again; it continues where it stopped."
    )
