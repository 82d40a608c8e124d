"""What a command of `twinphase` left behind; conftest.py has the fixture that runs one."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Done(NamedTuple):
    code: int
    out: str
    err: str

    def text(self) -> str:
        """Of a command that succeeded: its stdout."""
        assert self.code == 0, self.err
        return self.out

    def json(self) -> Any:
        return json.loads(self.text())

    def error(self) -> str:
        """Of a failed command: one line on stderr, nothing on stdout, no traceback."""
        assert self.code != 0 and self.out == ""
        assert self.err.count("\n") == 1 and self.err.startswith("error: "), self.err
        return self.err
