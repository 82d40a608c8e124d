"""Under what conditions something was measured: machine, model file, versions, command line, and who else used the CPU.

Whatever cannot be found out is "unknown". Nothing secret gets in: values of options that hold keys are left out, and
the user's home folder is written as ~.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType

from twinphase import __version__
from twinphase.bench.targets.target import TargetFacts
from twinphase.phases.hardware import processor_name

__all__ = ["Bystanders", "command_line", "conditions", "file_sha256", "public"]

UNKNOWN = "unknown"
SECRET_WORDS = ("key", "token", "secret", "password", "authorization", "header")
# Anywhere in a text: scheme, user and password, host, path, query, fragment.
URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)([^\s/?#]*@)?([^\s/?#]*)([^\s?#]*)(\?[^\s#]*)?(#\S*)?")
NOTABLE_CORES = 0.1  # used by others: below it is what any system does


def conditions(
    facts: TargetFacts | None = None,
    *,
    model: Path | None = None,
    threads: int | None = None,
    isa: str = "",
    command: Sequence[str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> dict[str, str]:
    """What a reader needs to judge a measurement and to repeat it, in the order in which it is shown.

    Args:
        facts: of the target.
        model: its file, where it is here.
        threads: that compute; None is unknown.
        isa: instruction-set path; "" is unknown.
        command: the command line; this process's unless told.
        flags: settings of the measurement that the command line does not show.
    """
    found = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")}
    found["command"] = command_line(sys.argv if command is None else command)
    if facts is not None:
        found |= {"target": public(facts.name), "engine": facts.engine, "model": public(facts.model)}
        found["precision"] = facts.precision
        found["context length"] = f"{facts.context_length:,}" if facts.context_length else UNKNOWN
        found |= {key: public(value) for key, value in facts.details.items()}
    if model is not None:
        found["model file"] = _model_file(model)
        found["model SHA-256"] = file_sha256(model)
    found |= {key: _flag(key, value) for key, value in (flags or {}).items()}
    return found | _machine(threads, isa)


def _machine(threads: int | None, isa: str) -> dict[str, str]:
    versions = {name: _version(name) for name in ("numba", "numpy")}
    return {
        "processor": processor_name(),
        "cores": f"{_usable_cores()} usable of {os.cpu_count() or UNKNOWN}",
        "threads": str(threads or UNKNOWN),
        "instruction set": isa or UNKNOWN,
        "memory": _memory(),
        "system": _system(),
        "Python": platform.python_version(),
        "twinphase": __version__,
        **versions,
        "load average": _load_average(),
    }


def _usable_cores() -> int | str:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or UNKNOWN


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):
        return UNKNOWN


def _system() -> str:
    kernel = f"{platform.system()} {platform.release()}".strip() or UNKNOWN
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def _load_average() -> str:
    try:
        return ", ".join(f"{value:.2f}" for value in os.getloadavg()) + " (1, 5, 15 minutes before)"
    except (OSError, AttributeError):
        return UNKNOWN


def _model_file(path: Path) -> str:
    try:
        return f"{path.name}, {path.stat().st_size:,} bytes"
    except OSError:
        return path.name


def file_sha256(path: Path) -> str:
    """SHA-256 over every byte of a file, "unknown" where it is not a readable file. Seconds for a large model."""
    try:
        stat = path.stat()
        return _sha256(path, stat.st_size, stat.st_mtime_ns)
    except OSError:
        return UNKNOWN


@functools.cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def command_line(arguments: Sequence[str]) -> str:
    """A command line to type again, without secrets, and without the folder that the program lies in."""
    words: list[str] = []
    secret = False
    for index, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        is_option = argument.startswith("-")
        if index == 0:
            words.append("twinphase" if Path(argument).name in ("__main__.py", "cli.py") else Path(argument).name)
        elif secret:  # whatever it begins with: a key may begin with a hyphen
            words.append("***")
            secret = False
            continue
        elif is_option and equals and _is_secret(name):
            words.append(f"{name}=***")
        elif is_option and equals:
            words.append(_quoted(f"{name}={public(argument[len(name) + 1 :])}"))
        else:
            words.append(_quoted(public(argument)) if index else argument)
        secret = is_option and not equals and _is_secret(name)
    return " ".join(words)


def _quoted(argument: str) -> str:
    # A shell must see ~ to put the home folder in its place.
    return "~/" + shlex.quote(argument[2:]) if argument.startswith("~/") else shlex.quote(argument)


def _is_secret(name: str) -> bool:
    # Whole words, so that "--max-tokens" is no secret and "--api-key" is.
    return any(word in SECRET_WORDS for word in name.lower().replace("_", "-").split("-"))


def _flag(name: str, value: object) -> str:
    return "***" if _is_secret(name) else public(str(value))


def public(text: str) -> str:
    """Text without what a URL may keep secret (password, query, fragment), and without the user's home folder."""
    text = URL.sub(_public_url, text)
    home = os.path.expanduser("~")
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if len(home) > 1 else text


def _public_url(found: re.Match[str]) -> str:
    scheme, user, host, path, query, fragment = found.groups()
    user = "***@" if user else ""
    return f"{scheme}{user}{host}{path}{'?***' if query else ''}{'#***' if fragment else ''}"


class Bystanders:
    """Whoever else used the CPU while something was measured, by the kernel's counters.

    A context manager: the measurement runs inside. This process, its descendants and those of `pids` are the
    measurement; everything else on the machine is a bystander.
    """

    def __init__(self, pids: Iterable[int] = ()) -> None:
        """Count `pids` (a server that is measured here) as part of the measurement."""
        self._pids = {os.getpid(), *pids}
        self._start: tuple[int, int] | None = None
        self._time = 0.0
        self.cores: float | None = None

    def __enter__(self) -> Bystanders:
        self._time, self._start = time.perf_counter(), self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end, seconds = self._read(), time.perf_counter() - self._time
        if self._start is not None and end is not None and seconds > 0 and end[0] > self._start[0]:
            ticks = (end[0] - self._start[0]) - (end[1] - self._start[1])
            # Counters of processes and of the machine are read one after the other, hence a tick less than none.
            self.cores = max(0.0, ticks / os.sysconf("SC_CLK_TCK") / seconds)

    def _read(self) -> tuple[int, int] | None:
        """(ticks that all used, ticks that the measurement used), or None where the kernel does not say."""
        used = _machine_ticks()
        return None if used is None else (used, _ticks_of_trees(self._pids))

    def noise(self) -> str:
        """One sentence for `Report.noise`."""
        if self.cores is None:
            return "How much CPU others used during the measurement is unknown: the kernel does not say."
        if self.cores < NOTABLE_CORES:
            return f"Others used {self.cores:.2f} cores during the measurement: the machine was quiet."
        return (
            f"Others used {self.cores:.2f} of {os.cpu_count()} cores during the measurement: times may be longer than "
            "on a quiet machine."
        )


def _machine_ticks() -> int | None:
    """CPU ticks that everything on this machine has used, or None where the kernel does not say."""
    try:
        # user, nice, system, then (after idle and iowait) irq, softirq, steal.
        used = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    return sum(used[:3]) + sum(used[5:]) or None


def _ticks_of_trees(roots: set[int]) -> int:
    """CPU ticks of processes and their descendants, those included that have ended and were waited for."""
    parents, ticks = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)], ticks[int(entry.name)] = int(words[1]), sum(map(int, words[11:15]))
    return sum(ticks[pid] for pid in ticks if _descends(pid, roots, parents))


def _descends(pid: int, roots: set[int], parents: Mapping[int, int]) -> bool:
    seen = set()
    while pid and pid not in seen:
        if pid in roots:
            return True
        seen.add(pid)
        pid = parents.get(pid, 0)
    return False
