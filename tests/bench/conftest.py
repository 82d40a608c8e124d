"""A browser for whoever looks at a page, a server with known delays for whoever asks one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.bench.browser import Browser, find_browser

from bench.stub_server import RunningStub


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
