"""Hints that install an extra name the source of this copy."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace

import pytest

from twinphase import installed


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """This copy lies in no clone; its distribution came from what the returned function gets."""

    def came_from(url: str | None) -> None:
        text = None if url is None else json.dumps({"url": url})
        monkeypatch.setattr(
            metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text)
        )

    monkeypatch.setattr(installed, "ROOT", tmp_path / "lib")
    monkeypatch.setattr(installed.sys, "prefix", str(tmp_path / "no environment"))
    return came_from


def test_a_clone_is_installed_again_with_the_extra(tmp_path, monkeypatch, elsewhere):
    monkeypatch.setattr(installed, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    assert installed.install_command("bench") == f"pip install -e '{tmp_path}[bench]'"
    monkeypatch.chdir(tmp_path)
    assert installed.install_command("bench") == "pip install -e '.[bench]'"


def test_a_wheel_is_named_while_it_exists(tmp_path, elsewhere):
    wheel = tmp_path / "my wheels" / "twinphase-1-py3-none-any.whl"
    elsewhere(wheel.as_uri())
    assert installed.install_command("otel") == "pip install 'twinphase[otel]'"
    wheel.parent.mkdir()
    wheel.touch()
    assert installed.install_command("otel") == f"pip install '{wheel}[otel]'"
    elsewhere(None)
    assert installed.install_command("otel") == "pip install 'twinphase[otel]'"


def test_pip_of_this_environment_is_named_where_another_comes_first(
    tmp_path, monkeypatch, elsewhere
):
    elsewhere(None)
    own = tmp_path / ".venv" / "bin" / "pip"
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.setattr(installed.sys, "prefix", str(tmp_path / ".venv"))
    assert installed.install_command("x") == f"{own} install 'twinphase[x]'"
    monkeypatch.chdir(tmp_path)
    assert installed.install_command("x") == ".venv/bin/pip install 'twinphase[x]'"
    monkeypatch.setenv("PATH", str(own.parent))
    assert installed.install_command("x") == "pip install 'twinphase[x]'"
