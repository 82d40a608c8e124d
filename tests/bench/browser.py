"""Headless Chromium, driven over a pipe by the Chrome DevTools protocol.

(https://chromedevtools.github.io/devtools-protocol/) No driver program and no package beside the
browser itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # as root there is no other way; the pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE = 60.0  # seconds for anything; a busy machine is slow, not wrong


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def opened_browser(*flags: str) -> Browser:
    """A browser, or a skipped test where there is none and nothing asks for one."""
    program = find_browser()
    if program is None and os.environ.get("TWINPHASE_REQUIRE_BROWSER"):
        pytest.fail("no Chromium, and TWINPHASE_REQUIRE_BROWSER asks for one")
    if program is None:
        pytest.skip("no Chromium here (apt install chromium); no page is opened in a browser")
    return Browser(program, *flags)


class Browser:
    """One browser process with a profile of its own, and one page at a time."""

    def __init__(self, program: str, *flags: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        # The browser reads commands on descriptor 3 and writes to 4; ours must not be in their way.
        reads, self._out = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in os.pipe())
        self._in, writes = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in os.pipe())
        log = os.open(os.path.join(self._profile, "log"), os.O_WRONLY | os.O_CREAT)
        places = [(reads, 3), (writes, 4), (log, 1), (log, 2)]
        self._pid = os.posix_spawn(
            program,
            [program, *FLAGS, *flags, f"--user-data-dir={self._profile}", "about:blank"],
            {**os.environ, "HOME": self._profile},
            file_actions=[(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in places],
            setpgroup=0,
        )
        for descriptor in (reads, writes, log):
            os.close(descriptor)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + PATIENCE
        while True:
            reply = self._message(deadline)
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return dict(reply["result"])
            self.events.append(reply)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {PATIENCE:.0f} s"
            data = os.read(self._in, 1 << 16)
            assert data, (
                "the browser has ended: "
                f"{Path(self._profile, 'log').read_text(errors='replace')[-2000:]}"
            )
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def look(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, **media: str
    ) -> None:
        """The size of the window, which colours the reader prefers, and more such media features.

        A feature's name has `_` for `-`: `prefers_reduced_motion="reduce"`.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        wanted = {"prefers_color_scheme": "dark" if dark else "light", **media}
        features = [
            {"name": name.replace("_", "-"), "value": value} for name, value in wanted.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str, text: str = "") -> None:
        """Press a key as the keyboard does; `text` is what it types."""
        event = {"key": key, "text": text} if text else {"key": key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def open(self, page: Path | str, ready: str = "document.readyState == 'complete'") -> None:
        """Load a file or an address, and wait until the expression `ready` is true."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href == 'about:blank'")  # or the page before might pass for this one
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.wait(
            "location.href != 'about:blank' && document.documentElement !== null && "
            f"document.readyState == 'complete' && {ready}"
        )

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"not within {PATIENCE:.0f} s: {expression}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression; returns its value, or the value of its promise."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors, warnings and violations of the page's policy in the console."""
        found = []
        for event in self.events:
            method = event.get("method")
            parameters = event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"])[:500])
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(json.dumps(parameters["args"])[:500])
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in (
                "error",
                "warning",
            ):
                found.append(parameters["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that the page asked for, its own included."""
        sent = [
            event for event in self.events if event.get("method") == "Network.requestWillBeSent"
        ]
        return [event["params"]["request"]["url"] for event in sent]
