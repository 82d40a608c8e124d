"""The conditions of a measurement: machine, model, versions, command line, other programs.

Conditions that cannot be determined are "unknown". Secrets are omitted: values of options with keys
are removed, and the user's home folder is written as ~.
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
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from twinphase import __version__, available_cores
from twinphase.phases.hardware import processor_name
from twinphase_bench.targets.target import TargetFacts

UNKNOWN = "unknown"
SECRET_WORDS = {"key", "token", "secret", "password", "authorization", "header"}
URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://\S+")
# Every system uses less than this in the background.
MIN_NOTABLE_CORES = 0.1


def conditions(
    facts: TargetFacts | None = None,
    *,
    model: Path | None = None,
    threads: int | None = None,
    isa: str = "",
    command: Sequence[str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> dict[str, str]:
    """The conditions that a reader needs to judge and repeat a measurement, in display order.

    Args:
        facts: facts of the target.
        model: the model's file, if it is on this machine.
        threads: number of compute threads; None is unknown.
        isa: instruction-set path; "" is unknown.
        command: command line; by default this process's.
        flags: settings of the measurement that are not in the command line.
    """
    found = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")}
    found["command"] = command_line(sys.argv if command is None else command)
    if facts is not None:
        found |= {
            "target": public(facts.name),
            "engine": facts.engine,
            "model": public(facts.model),
        }
        found["precision"] = facts.precision
        found["context length"] = f"{facts.context_length:,}" if facts.context_length else UNKNOWN
        found |= {key: public(value) for key, value in facts.details.items()}
    if model is not None:
        found |= model_file(model)
    distribution = _known(lambda: platform.freedesktop_os_release()["PRETTY_NAME"])
    found |= {
        key: "***" if _is_secret(key) else public(str(value))
        for key, value in (flags or {}).items()
    }
    return {
        **found,
        "processor": processor_name(),
        "cores": f"{available_cores()} usable of {os.cpu_count() or UNKNOWN}",
        "threads": str(threads or found.get("threads", UNKNOWN)),
        "instruction set": isa or found.get("instruction set") or UNKNOWN,
        "memory": _known(
            lambda: f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
        ),
        "system": f"{distribution}, {platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "twinphase": __version__,
        "numba": _known(lambda: metadata.version("numba")),
        "numpy": _known(lambda: metadata.version("numpy")),
        "load average": _known(
            lambda: "{:.2f}, {:.2f}, {:.2f} (1, 5, 15 minutes before)".format(*os.getloadavg())
        ),
    }


def model_file(path: Path) -> dict[str, str]:
    """Name, size and hash of a model's file."""
    size = _known(lambda: f", {path.stat().st_size:,} bytes")
    return {
        "model file": path.name + (size if size != UNKNOWN else ""),
        "model SHA-256": file_sha256(path),
    }


def _known(find: Callable[[], str]) -> str:
    try:
        return find()
    except (OSError, ValueError, KeyError, AttributeError, metadata.PackageNotFoundError):
        return UNKNOWN


def file_sha256(path: Path) -> str:
    """SHA-256 over every byte of a file; "unknown" if the file cannot be read.

    Seconds for a large model.
    """
    return _known(lambda: _sha256(path, path.stat().st_size, path.stat().st_mtime_ns))


@functools.cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def command_line(arguments: Sequence[str]) -> str:
    """A command line to repeat, without secrets and without the program's folder."""
    program = Path(arguments[0]).name
    words = ["twinphase" if program in ("__main__.py", "cli.py") else program]
    hide_next = False
    for argument in arguments[1:]:
        name, equals, _ = argument.partition("=")
        secret = argument.startswith("-") and _is_secret(name)
        # A key may begin with a hyphen.
        if hide_next:
            words.append("***")
            hide_next = False
            continue
        words.append(f"{name}=***" if secret and equals else _quoted(public(argument)))
        hide_next = secret and not equals
    return " ".join(words)


def _quoted(argument: str) -> str:
    # The ~ must not be quoted, so that the shell replaces it.
    return "~/" + shlex.quote(argument[2:]) if argument.startswith("~/") else shlex.quote(argument)


def _is_secret(name: str) -> bool:
    # Whole words are compared, so that "--max-tokens" is not a secret but "--api-key" is.
    return not SECRET_WORDS.isdisjoint(name.lower().replace("_", "-").split("-"))


def public(text: str) -> str:
    """The text without secrets in URLs (user, password, query, fragment) and home folder."""
    from twinphase_bench.client.client import (
        without_secrets,
    )  # The parser is not available in another engine's environment.

    text = URL.sub(lambda found: without_secrets(found[0]), text)
    home = os.path.expanduser("~")
    return re.sub(rf"(?<!\w){re.escape(home)}(?=/|$)", "~", text) if len(home) > 1 else text


class Bystanders:
    """Measures the CPU use of other programs during a measurement, by the kernel's counters.

    The measurement runs inside this context manager. This process and its descendants belong to the
    measurement; all other processes are bystanders. Afterwards `cores` is the average number of
    cores that bystanders used; None if unknown.
    """

    def __init__(self) -> None:
        self._start: tuple[int, int] | None = None
        self._time = 0.0
        self.cores: float | None = None

    def __enter__(self) -> Bystanders:
        self._time = time.perf_counter()
        self._start = self._read()
        return self

    def __exit__(self, *exception: object) -> None:
        end = self._read()
        seconds = time.perf_counter() - self._time
        if self._start is not None and end is not None and seconds > 0 and end[0] > self._start[0]:
            ticks = (end[0] - self._start[0]) - (end[1] - self._start[1])
            # The counters are read one after the other, so the difference may be slightly negative.
            self.cores = max(0.0, ticks / os.sysconf("SC_CLK_TCK") / seconds)

    def _read(self) -> tuple[int, int] | None:
        """(ticks of the machine, ticks of the measurement); None if unavailable."""
        used = _machine_ticks()
        return None if used is None else (used, _ticks_of_tree(os.getpid()))

    def noise(self) -> str:
        """A sentence for `Report.noise`."""
        if self.cores is None:
            return (
                "How much CPU others used during the measurement is unknown: the kernel does not "
                "say."
            )
        if self.cores < MIN_NOTABLE_CORES:
            return (
                f"Others used {self.cores:.2f} cores during the measurement: the machine was quiet."
            )
        return (
            f"Others used {self.cores:.2f} of {os.cpu_count()} cores during the measurement: times "
            "may be longer than on a quiet machine."
        )


def _machine_ticks() -> int | None:
    """CPU ticks used by all processes of this machine; None if unavailable."""
    try:
        # The columns are user, nice, system, then (after idle and iowait) irq, softirq, steal.
        used = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    return sum(used[:3]) + sum(used[5:]) or None


def _ticks_of_tree(root: int) -> int:
    """CPU ticks of a process and its descendants, including those that have ended."""
    children: dict[int, list[int]] = {}
    ticks = {}
    for entry in Path("/proc").glob("[0-9]*"):
        # The process has ended in the meantime.
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(words[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, words[11:15]))
    tree = [root]
    for pid in tree:  # The list grows during the loop.
        tree += children.pop(pid, [])
    return sum(ticks.get(pid, 0) for pid in tree)
