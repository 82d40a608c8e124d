"""A child process never outlives its parent, even if it is stopped or holds the GIL."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from children import child
from twinphase import lifeline

# It ignores SIGTERM, and holds the interpreter's lock for good.
BUSY = (
    "import ctypes, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(flush=True); ctypes.PyDLL(None).pause()"
)
PARENT = f"""
import subprocess, sys, threading, time
from twinphase import lifeline
def start():
    global process
    process = lifeline.start([sys.executable, "-c", {BUSY!r}], stdout=subprocess.PIPE)
    process.stdout.readline()
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(process.pid, process.poll(), flush=True)
time.sleep(600)
"""
# The engine's process is stopped at a stage of loading, so that no code of its own can end it.
ENGINE = """
import os, signal, sys, time
from twinphase.config import EngineConfig
from twinphase.engine.process.messages import FromEngine, Load, Loading
from twinphase.engine.process.start import start_process
from twinphase.engine.process.wire import Decoder, encode
process, link = start_process("twinphase.engine.process.child")
stage = "started"
decoder = Decoder(FromEngine)
link.sendall(encode(Load(sys.argv[1], EngineConfig(backend="reference", num_kv_blocks=8))))
while stage != sys.argv[2]:
    for message in decoder.feed(link.recv(1 << 16)):
        stage = message.stage if isinstance(message, Loading) else "ready"
        if stage == sys.argv[2]:
            break
os.kill(process.pid, signal.SIGSTOP)
print(process.pid, process.poll(), flush=True)
time.sleep(600)
"""


def wait_for_end(pid: int) -> None:
    """Wait for a process that is not ours to reap; the test's own time limit ends this."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(3000):
        try:
            if status.read_text().rpartition(")")[2].split()[0] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} outlives its parent")


def kill_parent(*command: str) -> None:
    with child([sys.executable, "-c", *command], stdout=subprocess.PIPE) as parent:
        pid, state = parent.stdout.readline().split()
        assert state == b"None"
        parent.kill()
        parent.wait()
        wait_for_end(int(pid))


def test_a_busy_child_ends_with_its_parents_process_but_not_with_its_thread():
    kill_parent(PARENT)


@pytest.mark.parametrize("stage", ["started", "importing", "warming up", "ready"])
def test_a_stopped_engine_ends_with_its_parent_at_each_stage(tiny_path, stage):
    kill_parent(ENGINE, str(tiny_path), stage)


def test_a_child_that_has_ended_leaves_no_descriptor():
    def run() -> None:
        assert lifeline.start(["true"]).wait() == 0

    run()
    gc.collect()  # Earlier tests of this process may have left descriptors to collect.
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        run()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
