"""Draw docs/images/terminal.png: `twinphase demo` as it looks in a terminal.

    python release/terminal_picture.py      # on a quiet machine, with Chromium and the test extras

The demo runs in a pseudo-terminal; what it prints becomes a page, and Chromium takes its picture.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.png"
COLUMNS = 116
# As in `PAGE`.
FONT_PIXELS = 15
LINE_PIXELS = 20
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #0c0c0c; }}
pre {{ margin: 16px; color: #d9d9d9; font: 15px/20px "Liberation Mono", monospace; }}
pre {{ white-space: pre-wrap; }}
{stylesheet}</style><pre>{code}</pre>"""


def shown(command: list[str]) -> str:
    """What a command prints on a terminal of `COLUMNS`, without lines that were drawn over.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    controller, end = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    seen = b""
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as process:
        os.close(end)
        while True:
            try:
                data = os.read(controller, 65536)
            except OSError:
                break
            if not data:
                break
            seen += data
    os.close(controller)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, seen)
    text = seen.decode().replace("\r\n", "\n")
    return re.sub(r"[^\n]*\r\x1b\[K", "", text)


def main() -> None:
    text = "$ twinphase demo\n" + shown([sys.executable, "-m", "twinphase_bench.cli", "demo"])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="256")
    console.print(Text.from_ansi(text.rstrip()))
    lines = console.export_text(clear=False).count("\n")
    page = console.export_html(theme=MONOKAI, code_format=PAGE)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("There is no Chromium to take the picture.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "terminal.html"
        path.write_text(page, encoding="utf-8")
        size = f"{COLUMNS * FONT_PIXELS * 3 // 5 + 40},{lines * LINE_PIXELS + 32}"
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                "--force-device-scale-factor=2",
                f"--screenshot={PICTURE}",
                f"--window-size={size}",
                path.as_uri(),
            ],
            check=True,
            capture_output=True,
        )
    print(PICTURE)


if __name__ == "__main__":
    main()
