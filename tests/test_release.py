"""What a release checks of versions, the changelog and the built files."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(ROOT / "release"))
    import check
    import release

    yield check, release
    sys.path.remove(str(ROOT / "release"))


def test_the_first_section_of_the_changelog_is_dated_once(tools):
    _, release = tools
    text = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- New.\n\n## 0.1.0 (2026-01-01)\n\n- Old.\n"
    dated = release.date_changelog(text, "0.2.0", "2026-12-01")
    assert "## 0.2.0 (2026-12-01)\n\n- New." in dated
    assert release.date_changelog(dated, "0.2.0", "2026-12-02") == dated
    assert release.notes(dated, "0.2.0") == "- New.\n"
    assert release.notes(dated, "0.1.0") == "- Old.\n"
    with pytest.raises(tools[0].CheckError, match=r"is 0\.2\.0; write `## 0\.3\.0 \(unreleased\)`"):
        release.date_changelog(text, "0.3.0", "2026-12-01")
    with pytest.raises(tools[0].CheckError, match="has no entry"):
        release.date_changelog(text.replace("- New.\n\n", ""), "0.2.0", "2026-12-01")


def test_the_version_is_set_in_one_line(tools):
    check, release = tools
    source = release.SOURCE.read_text()
    changed = release.set_version(source, "9.8.7rc1")
    differing = [
        new
        for old, new in zip(source.splitlines(), changed.splitlines(), strict=True)
        if old != new
    ]
    assert differing == ['__version__ = "9.8.7rc1"']
    assert check.version_of_source() in source
    with pytest.raises(check.CheckError, match="is not a version"):
        release.release("next", kernels=False)


def test_a_wheel_without_a_file_is_refused(tools, tmp_path):
    check, _ = tools
    wheel, sdist = check.build(tmp_path)
    check.check_contents(wheel, sdist)
    check.check_metadata(wheel)
    short = tmp_path / "short.whl"
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(short, "w") as target:
        for name in full.namelist():
            if not name.endswith("py.typed"):
                target.writestr(name, full.read(name))
    with pytest.raises(check.CheckError, match=r"differs from src: \['twinphase/py.typed'\]"):
        check.check_contents(short, sdist)
    with tarfile.open(tmp_path / "empty.tar.gz", "w:gz"):
        pass
    with pytest.raises(check.CheckError, match="lacks"):
        check.check_contents(wheel, tmp_path / "empty.tar.gz")
