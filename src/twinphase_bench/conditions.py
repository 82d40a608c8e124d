"""The conditions of a measurement: machine, model file, versions, command line, other load.

What cannot be found out is "unknown". Nothing secret gets in: values of options that hold keys
are left out, and the user's home folder is written as ~.
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
# Any system uses less than this in the background.
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
    """What a reader needs to judge a measurement and to repeat it, in display order.

    Args:
        facts: of the target.
        model: its file, where it is here.
        threads: that compute; None is unknown.
        isa: instruction-set path; "" is unknown.
        command: the command line; default: of this process.
        flags: settings of the measurement that the command line does not show.
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
    """SHA-256 over every byte of a file, "unknown" where it is not a readable file.

    Seconds for a large model.
    """
    return _known(lambda: _sha256(path, path.stat().st_size, path.stat().st_mtime_ns))


@functools.cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def command_line(arguments: Sequence[str]) -> str:
    """A command line to type again, without secrets and without the program's folder."""
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
    # A shell must see ~ to put the home folder in its place.
    return "~/" + shlex.quote(argument[2:]) if argument.startswith("~/") else shlex.quote(argument)


def _is_secret(name: str) -> bool:
    # Whole words, so that "--max-tokens" is no secret and "--api-key" is.
    return not SECRET_WORDS.isdisjoint(name.lower().replace("_", "-").split("-"))


def public(text: str) -> str:
    """Text without the secrets of URLs (user, password, query, fragment) and the home folder."""
    from twinphase_bench.client.client import (
        without_secrets,
    )  # its parser is not in a peer engine's environment

    text = URL.sub(lambda found: without_secrets(found[0]), text)
    home = os.path.expanduser("~")
    return re.sub(rf"(?<!\w){re.escape(home)}(?=/|$)", "~", text) if len(home) > 1 else text


class Bystanders:
    """Other programs that used the CPU during a measurement, by the kernel's counters.

    A context manager: the measurement runs inside. This process and its descendants are the
    measurement; everything else on the machine is a bystander. Afterwards `cores` says how many
    cores others used on average, None where the kernel does not say.
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
            # Counters of processes and of the machine are read one after the other, hence a tick
            # less than none.
            self.cores = max(0.0, ticks / os.sysconf("SC_CLK_TCK") / seconds)

    def _read(self) -> tuple[int, int] | None:
        """(ticks of the machine, ticks of the measurement); None if the kernel gives none."""
        used = _machine_ticks()
        return None if used is None else (used, _ticks_of_tree(os.getpid()))

    def noise(self) -> str:
        """One sentence for `Report.noise`."""
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
    """CPU ticks that everything on this machine has used, or None where the kernel does not say."""
    try:
        # user, nice, system, then (after idle and iowait) irq, softirq, steal.
        used = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    return sum(used[:3]) + sum(used[5:]) or None


def _ticks_of_tree(root: int) -> int:
    """CPU ticks of a process and its descendants, including those that have ended."""
    children: dict[int, list[int]] = {}
    ticks = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(words[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, words[11:15]))
    tree = [root]
    for pid in tree:  # which grows meanwhile
        tree += children.pop(pid, [])
    return sum(ticks.get(pid, 0) for pid in tree)
