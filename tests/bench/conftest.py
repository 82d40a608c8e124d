"""Fixtures: a report as files, a browser, a server with known delays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.bench.browser import Browser, opened_browser
from tests.bench.sample_report import sample_report

from bench.stub_server import RunningStub
from twinphase_bench.report.render import Written, write_report


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Written:
    return write_report(sample_report(), tmp_path_factory.mktemp("report") / "new" / "folder")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    opened = opened_browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def stub() -> Iterator[RunningStub]:
    running = RunningStub()
    yield running
    running.stop()
