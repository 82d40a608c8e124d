"""Fixtures: a report as files, a browser, a server with known delays."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.bench.browser import Browser, find_browser
from tests.bench.sample_report import sample_report

from bench.stub_server import RunningStub
from twinphase_bench.report.render import Written, write_report


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Written:
    return write_report(sample_report(), tmp_path_factory.mktemp("report") / "new" / "folder")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None and os.environ.get("TWINPHASE_REQUIRE_BROWSER"):
        pytest.fail("no Chromium, and TWINPHASE_REQUIRE_BROWSER asks for one")
    if program is None:
        pytest.skip("no Chromium here (apt install chromium); reports are not opened in a browser")
    opened = Browser(program)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def stub() -> Iterator[RunningStub]:
    running = RunningStub()
    yield running
    running.stop()
