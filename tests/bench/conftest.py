"""A browser for whoever looks at a page."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.bench.browser import Browser, find_browser


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
