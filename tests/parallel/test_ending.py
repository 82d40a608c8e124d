"""No rank outlives rank 0: all processes hold the pipes, and the last one closes them."""

from __future__ import annotations

import signal
import sys

import pytest

from children import child, descendants
from steps import own_cache
from tiny_gguf import write_tiny_gguf

COMMAND = [sys.executable, "-c", "from twinphase.cli import main; main()"]
RUN = [
    "run",
    "MODEL",
    "hello",
    "--ignore-eos",
    "--max-tokens",
    "4000",
    "--num-kv-blocks",
    "300",
    "--threads",
    "1",
]
SERVE = ["serve", "MODEL", "--backend", "reference", "--port", "0"]


@pytest.mark.parametrize(
    ("words", "begun", "number", "code"),
    [
        (RUN, "stdout", signal.SIGINT, 130),
        (RUN, "stdout", signal.SIGKILL, -signal.SIGKILL),
        (SERVE, "stderr", signal.SIGINT, 0),
        (SERVE, "stderr", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_all_ranks_end(tmp_path, words, begun, number, code):
    sizes = (
        {"hidden": 128, "ffn": 256, "layers": 16} if words is RUN else {"layers": 1}
    )  # an answer takes long, a start not
    path = write_tiny_gguf(tmp_path / "tiny.gguf", context=4096, tensor_type="Q4_0", **sizes)
    given = [str(path) if word == "MODEL" else word for word in words]
    with (
        own_cache(tmp_path / "cache"),
        child([*COMMAND, *given, "-tp", "2"], stdin=-3, stdout=-1, stderr=-1) as process,
    ):
        lines = b""
        while b"listening" not in lines if begun == "stderr" else not lines:
            pipe = getattr(process, begun)
            lines += pipe.readline() if begun == "stderr" else pipe.read(20)
            assert process.poll() is None, process.communicate()
        assert descendants(process.pid, lambda command: b"twinphase.engine.ranks.rank" in command)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    assert b"Traceback" not in stderr
    if (words, number) == (RUN, signal.SIGINT):
        assert stdout.endswith(b"\n") and b"decode " in stderr
