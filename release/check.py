"""Build the wheel and the source distribution, and try both as a user would.

    python release/check.py                      # `make release-check`: about a minute
    python release/check.py --with-dependencies  # everything fetched again, as on a new machine

Each is installed into a new environment and used there: with no compiler on the PATH, outside this
folder. Without `--with-dependencies`, the environment sees the dependencies of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("twinphase", "twinphase_bench")
# Compiled for one version of everything, so a source distribution has none.
KERNELS = "twinphase/backends/cpu/prebuilt/"
# Documentation that a command shows.
DOCUMENTS = {"twinphase/two-phases.md"}
SDIST_FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
LIMIT_SECONDS = 300
READY_SECONDS = 120
POLL_SECONDS = 0.2


class CheckError(Exception):
    """A distribution does not do what it must."""


def run(*command: object, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """A command's stdout.

    Raises:
        CheckError: it failed, or took too long.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, env=env, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"{' '.join(words)} took more than {LIMIT_SECONDS} s.") from None
    if done.returncode:
        raise CheckError(f"{' '.join(words)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """A wheel and a source distribution of this working tree, in `folder`."""
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, "-t", "sdist", "-t", "wheel")
    (wheel,) = folder.glob("twinphase-*.whl")
    (sdist,) = folder.glob("twinphase-*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Every file of the packages is in both, and nothing that is not theirs is in the wheel."""
    here = {
        path.relative_to(ROOT / "src").as_posix()
        for package in PACKAGES
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    if different := in_wheel ^ (here | DOCUMENTS):
        raise CheckError(f"The wheel differs from src: {sorted(different)[:10]}")
    sources = {name for name in here if not name.startswith(KERNELS)}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    if missing := {*SDIST_FILES, *(f"src/{name}" for name in sources)} - in_sdist:
        raise CheckError(f"The source distribution lacks {sorted(missing)[:10]}")


def check_metadata(wheel: Path) -> None:
    """The wheel's extras are those of pyproject.toml, and it brings the command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")}
    if extras != set(project["optional-dependencies"]):
        raise CheckError(f"The wheel's extras are {sorted(extras)}.")


def try_out(distribution: Path, version: str, model: Path, *, with_dependencies: bool) -> None:
    """Install into a new environment, and use the command, the package and a server."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        python = home / "venv" / "bin" / "python"
        run(sys.executable, "-m", "venv", "--without-pip", home / "venv")
        options = []
        if not with_dependencies:
            options = ["--no-deps", "--no-build-isolation"]
            outer = Path(sysconfig.get_path("purelib"))
            inner = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
            # A plain path in a .pth file: the editable install of this environment stays out.
            Path(inner.strip(), "dependencies.pth").write_text(f"{outer}\n")
        pip = (sys.executable, "-m", "pip", "--python", python)
        run(*pip, "install", "-q", *options, distribution)
        env = {
            "PATH": str(python.parent),
            "HOME": str(home),
            # Kernels that this machine has compiled need not be compiled again.
            "TWINPHASE_CACHE": os.environ.get("TWINPHASE_CACHE", str(_usual_cache())),
        }
        _use(python, home, env, version, model)


def _usual_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinphase"


def _use(python: Path, home: Path, env: Mapping[str, str], version: str, model: Path) -> None:
    command = python.with_name("twinphase")
    found = run(python, "-c", "import twinphase; print(twinphase.__file__)", env=env, cwd=home)
    if not found.startswith(str(home)):
        raise CheckError(f"The package that was imported is {found.strip()}.")
    if (printed := run(command, "version", env=env, cwd=home)) != f"twinphase {version}\n":
        raise CheckError(f"`twinphase version` prints {printed!r}, not {version}.")
    estimate = ("estimate", "--model", "llama-2-7b", "--hardware", "a100-80gb-sxm")
    if "TPOT" not in run(command, *estimate, env=env, cwd=home):
        raise CheckError("`twinphase estimate` does not name TPOT.")
    for words in (["help", "run"], ["roofline", "--help"], ["show", model]):
        run(command, *words, env=env, cwd=home)
    answer = json.loads(
        run(command, "run", model, "hello", "--max-tokens", "4", "--json", env=env, cwd=home)
    )
    if not answer["usage"]["completion_tokens"]:
        raise CheckError(f"`twinphase run` answered nothing: {answer}")
    _serve(command, home, env, model)


def _serve(command: Path, home: Path, env: Mapping[str, str], model: Path) -> None:
    """A server starts, is found by `ps`, and ends by `stop`."""
    log = home / "server.log"
    with open(log, "w") as file:
        server = subprocess.Popen(
            [command, "serve", model, "--port", "0"], env=env, cwd=home, stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while "listening" not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise CheckError(f"The server is not ready:\n{log.read_text()}")
            time.sleep(POLL_SECONDS)
        url = log.read_text().partition("listening")[2].split("/v1")[0].strip()
        if model.name not in run(command, "ps", "--url", url, env=env, cwd=home):
            raise CheckError("`twinphase ps` does not name the model.")
        run(command, "stop", "--url", url, env=env, cwd=home)
        if server.wait(LIMIT_SECONDS):
            raise CheckError(f"The server ended with {server.returncode}:\n{log.read_text()}")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def version_of_source() -> str:
    """`__version__`, without importing the package."""
    lines = (ROOT / "src" / "twinphase" / "__init__.py").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("__version__ = "))
    return line.partition("=")[2].strip().strip('"')


def check(folder: Path, *, with_dependencies: bool) -> tuple[Path, Path]:
    """Build into `folder`, and check everything; the files of both distributions."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny_gguf import write_tiny_gguf

    begin = time.monotonic()

    def done(what: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {what}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    wheel, sdist = build(folder)
    check_contents(wheel, sdist)
    check_metadata(wheel)
    done(f"built {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) and {sdist.name}")
    with tempfile.TemporaryDirectory() as name:
        model = write_tiny_gguf(Path(name) / "tiny.gguf")
        for distribution in (wheel, sdist):
            try_out(distribution, version_of_source(), model, with_dependencies=with_dependencies)
            done(f"{distribution.name} works in a new environment")
    return wheel, sdist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--with-dependencies", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        try:
            check(Path(name), with_dependencies=given.with_dependencies)
        except CheckError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
