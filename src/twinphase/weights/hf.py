"""Downloads a GGUF file, its parts, or a folder with safetensors files from a model hub.

`huggingface_hub` resumes downloads and shows progress; it is imported only for a download. `hub.py`
resolves the names and places of models.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from twinphase.errors import (
    DownloadError,
    ModelNotFoundError,
    TwinphaseError,
    UnsupportedModelError,
)
from twinphase.weights.progress import status
from twinphase.weights.safetensors import CONFIG, INDEX, SINGLE, read_index
from twinphase.weights.split import is_later_part, part_names
from twinphase.weights.storage import storage_error

# The files that a folder needs besides its weights.
_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "1_Pooling/config.json",
    *(f"{n}_Dense/{file}" for n in (2, 3) for file in ("config.json", "model.safetensors")),
)
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def fetch_from_hub(repo: str, file: str | None, target: Path) -> Path:
    """Download a GGUF file of a repository, or its config, tokenizer and safetensors files.

    Args:
        repo: "org/name".
        file: path of a GGUF file in the repository, or a unique part of the path ("Q4_K_M"); None
            if the repository has at most one.
        target: folder for the files of this repository; an interrupted download there is continued.

    Returns:
        The GGUF file, or the first part of a split one; or `target`, if it is a Hugging Face
        folder.

    Raises:
        ModelNotFoundError: there is no such repository or file, or several match, which the message
            lists.
        UnsupportedModelError: the weights are pickles, which are never fetched.
        CheckpointError: an index of safetensors files is damaged.
        DownloadError: the hub cannot be reached, or denies access.
        StorageError: there is no space, or no permission to write.
    """
    import huggingface_hub

    try:
        with _quiet(), status(f"Asking the hub for the files of {repo} ..."):
            files = huggingface_hub.HfApi().list_repo_files(repo)
        models = [f for f in files if f.lower().endswith(".gguf")]

        def fetch(name: str) -> Path:
            return Path(huggingface_hub.hf_hub_download(repo, name, local_dir=target))

        if not models and file is None:
            return _fetch_folder(files, repo, target, fetch)
        return [fetch(part) for part in part_names(_choose(models, repo, file))][0]
    except TwinphaseError:
        raise
    except Exception as error:
        raise _failure(error, repo, target) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's warnings about retries on the terminal; the final error has the reason."""
    from huggingface_hub.utils import logging as hub_logging

    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)


def matching_files(files: list[str], wanted: str | None) -> list[str]:
    """The files that a name matches: all for None, the exact one, or those that contain it."""
    if wanted is None:
        return files
    exact = [f for f in files if f == wanted]
    return exact or [f for f in files if wanted.lower() in f.lower()]


def _choose(files: list[str], repo: str, wanted: str | None) -> str:
    files = [f for f in files if not is_later_part(f)]
    fitting = matching_files(files, wanted)
    if not files:
        raise ModelNotFoundError(
            f"The repository {repo} has no .gguf file.", f"Leave out the file: hf:{repo}."
        )
    if len(fitting) != 1:
        fit = f" that fit {wanted!r}" if wanted else ""
        raise ModelNotFoundError(
            f"{repo} has {len(fitting) or 'no'} GGUF files{fit}.",
            f"Use hf:{repo}:FILE with one of: {', '.join(fitting or files)}.",
        )
    return fitting[0]


def _fetch_folder(files: list[str], repo: str, target: Path, fetch: Callable[[str], Path]) -> Path:
    """Download a folder, small files first: if the weights are complete, so is the rest."""
    if CONFIG not in files or not {SINGLE, INDEX} & set(files):
        pickles = [f for f in files if f.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise UnsupportedModelError(
                f"{repo} has its weights as a pickle ({pickles[0]}), which runs code when it is "
                "opened.",
                "It was not fetched. Choose a repository with .safetensors or .gguf files.",
            )
        raise ModelNotFoundError(
            f"{repo} has no .gguf and no {SINGLE} file.", "Choose another repository."
        )
    for name in files:
        if name in _FOLDER_FILES:
            fetch(name)
    for name in [SINGLE] if SINGLE in files else sorted(set(read_index(fetch(INDEX)).values())):
        fetch(name)
    return target


def _failure(error: Exception, repo: str, target: Path) -> TwinphaseError:
    """Convert the library's error by class name, because classes have moved between versions."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return storage_error(error, target)
    if "GatedRepoError" in names:
        return DownloadError(
            f"{repo} is open only to users who accepted its terms.",
            "Accept them on its page and log in to the hub.",
        )
    if "LocalEntryNotFoundError" not in names and names & {
        "RepositoryNotFoundError",
        "EntryNotFoundError",
        "HFValidationError",
    }:
        return ModelNotFoundError(
            f"There is no repository {repo} (or it is private).", "Check the name after 'hf:'."
        )
    (reason, *_) = str(error).strip().splitlines() or [type(error).__name__]
    reason = reason[:300].rstrip(".")
    return DownloadError(
        f"{repo} could not be downloaded: {reason}.",
        "Check the network and try again; it continues where it stopped.",
    )
