"""A chat on a real terminal: pasted text, Ctrl-C in an answer, and what comes back with -c."""

from __future__ import annotations

import re
import signal

import pytest

from test_cli import SMALL, terminal
from tiny_gguf import write_tiny_gguf

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.timeout(120)]
# The line editor asks for pasted text in brackets.
READY = b"\x1b[?2004h"
OPTIONS = [*SMALL, "--ignore-eos", "--max-tokens", "8", "--verbose"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048))


def test_a_paste_is_one_message_and_each_turn_computes_only_what_is_new(model):
    with terminal("run", model, *OPTIONS, tty_stdin=True) as shown:
        shown.wait_for(READY)
        shown.type("\x1b[200~hello the world\nand the world\nand three lines\x1b[201~")
        shown.type("\r")
        shown.wait_for(b"wall ")
        shown.type("and then?\r")
        shown.wait_for(b" cached)")
        shown.wait_for(b"wall ")
        shown.type("/bye\r")
        done = shown.finish()
    assert done.code == 0 and "Traceback" not in done.err
    found = re.findall(r"prefill +(\d+) tokens(?: \((\d+) cached\))?", done.err)
    assert len(found) == 2 and found[0][1] == "" and int(found[1][1]) > 0
    with terminal("run", "-c", *OPTIONS, tty_stdin=True) as shown:
        shown.wait_for(READY)
        # Between two prompts, the terminal takes control keys, not the editor.
        shown.type_and_wait_for_new("/show\r", READY)
        shown.wait_for(b"Messages: 4")
        shown.type("\x04")
        assert shown.finish().code == 0


def test_ctrl_c_cuts_an_answer_and_the_chat_goes_on(tmp_path):
    path = write_tiny_gguf(tmp_path / "slow.gguf", context=8192, hidden=256, ffn=512, layers=4)
    given = ["run", str(path), *SMALL, "--ignore-eos"]
    with terminal(*given, tty_stdin=True) as shown:
        shown.wait_for(READY)
        shown.type("hello\r")
        assert shown.process.stdout.read(20)
        shown.type("typed ahead")
        shown.process.send_signal(signal.SIGINT)
        shown.wait_for(b"tok/s")
        # Not shown within the answer, but at the next prompt.
        assert b"typed" not in shown.seen.partition(b"tok/s")[0]
        shown.wait_for(b"typed")
        shown.type_and_wait_for_new("\x15/show\r", READY)
        shown.wait_for(b"Messages: 2")
        shown.type_and_wait_for_new("\x03", READY)
        shown.wait_for(b"again")
        shown.type("\x03")
        done = shown.finish()
    assert done.code == 130 and "Traceback" not in done.err
