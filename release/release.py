"""Make a release: version, changelog, kernels, wheel, source distribution, checked.

    python release/release.py 0.2.0     # or: make release VERSION=0.2.0

Sets the version, dates its section of CHANGELOG.md, compiles the kernels that the wheel brings
along, builds both distributions into dist/, and tries them in new environments with all their
dependencies. It publishes nothing: it ends with the commands that do. It may be run again; what is
done already is left as it is.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys

from check import ROOT, CheckError, check, version_of_source

VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
SOURCE = ROOT / "src" / "twinphase" / "__init__.py"
CHANGELOG = ROOT / "CHANGELOG.md"
KERNELS = ROOT / "release" / "build_kernels.py"
DIST = ROOT / "dist"
# What this command changes; anything else that is not committed is refused.
OWN_FILES = {"CHANGELOG.md", "src/twinphase/__init__.py"}


def check_tree(version: str) -> None:
    """Everything is committed, and no release has this version yet.

    Raises:
        CheckError: it is not so.
    """
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    others = {line[3:] for line in status.stdout.splitlines()} - OWN_FILES
    if others:
        raise CheckError(f"These files are not committed: {', '.join(sorted(others)[:10])}.")
    at = subprocess.run(
        ["git", "rev-list", "-n", "1", f"v{version}"], cwd=ROOT, capture_output=True, text=True
    )
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if at.returncode == 0 and at.stdout != head.stdout:
        raise CheckError(f"The tag v{version} exists on another commit. Choose the next version.")


def set_version(text: str, version: str) -> str:
    """The source of the package with this version."""
    return re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', text, flags=re.MULTILINE)


def date_changelog(text: str, version: str, today: str) -> str:
    """The changelog with a date for its section of this version, unless it has one.

    Raises:
        CheckError: the first section is of another version, or has no entry.
    """
    heading = re.search(r"^## (\S+) \((.*)\)$", text, re.MULTILINE)
    if heading is None or heading[1] != version:
        found = heading[1] if heading else "none"
        raise CheckError(
            f"The first section of CHANGELOG.md is {found}; write `## {version} (unreleased)` and "
            "what has changed."
        )
    if not re.match(r"\s*- \S", text[heading.end() :]):
        raise CheckError(f"The section {version} of CHANGELOG.md has no entry.")
    if heading[2] != "unreleased":
        return text
    return f"{text[: heading.start()]}## {version} ({today}){text[heading.end() :]}"


def notes(text: str, version: str) -> str:
    """A version's section of the changelog, without its heading."""
    found = re.search(rf"^## {re.escape(version)} \(.*\)$", text, re.MULTILINE)
    if found is None:
        raise CheckError(f"CHANGELOG.md has no section {version}.")
    return text[found.end() :].partition("\n## ")[0].strip() + "\n"


def release(version: str, *, kernels: bool) -> None:
    """Do it all, up to publishing."""
    if not VERSION.fullmatch(version):
        raise CheckError(f"{version!r} is not a version such as 0.2.0 or 0.2.0rc1.")
    check_tree(version)
    changelog = date_changelog(
        CHANGELOG.read_text(encoding="utf-8"), version, datetime.date.today().isoformat()
    )
    CHANGELOG.write_text(changelog, encoding="utf-8")
    SOURCE.write_text(set_version(SOURCE.read_text(encoding="utf-8"), version), encoding="utf-8")
    if version_of_source() != version:
        raise CheckError(f"{SOURCE} has no line `__version__ = ...`.")
    if kernels and KERNELS.exists():
        print("Compiling the kernels that the wheel brings along ...", flush=True)
        if subprocess.run([sys.executable, str(KERNELS)], cwd=ROOT).returncode:
            raise CheckError("The kernels could not be compiled.")
    for old in DIST.glob("twinphase-*"):
        old.unlink()
    wheel, sdist = check(DIST, with_dependencies=True)
    (DIST / "NOTES.md").write_text(notes(changelog, version), encoding="utf-8")
    print(f"\n{wheel.relative_to(ROOT)} and {sdist.relative_to(ROOT)} are ready. To publish:\n")
    print(f"    git commit -am 'Release {version}' && git tag v{version}")
    print(f"    git push origin HEAD v{version}")
    print(f"    gh workflow run publish.yml --ref v{version}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", help="default: the version of the source")
    parser.add_argument(
        "--no-kernels", action="store_true", help="do not compile kernels for the wheel"
    )
    given = parser.parse_args()
    try:
        release(given.version or version_of_source(), kernels=not given.no_kernels)
    except CheckError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
