"""Reads user input: lines with history and completion, several lines, and pasted text."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROMPT = "> "
MORE = "... "
QUOTES = '"""'
# A longer paste is shown by its size, because a terminal would take seconds to draw it.
MAX_SHOWN_LINES = 8
MAX_SHOWN_CHARACTERS = 1000
MAX_HISTORY_BYTES = 1 << 20


@contextlib.contextmanager
def hidden_keys() -> Iterator[None]:
    """Hide keys typed during the block; the next prompt gets them."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class Reader:
    """Reads one message after another.

    A message is a line, a pasted text of any size, or several lines between triple quotes.
    """

    def __init__(
        self, commands: Sequence[str], history: Path | None, keeps: Callable[[], bool]
    ) -> None:
        """Complete `commands`, and append lines to the file `history` while `keeps()` is true."""
        self._keeps = keeps
        self._pastes: dict[str, str] = {}
        self._line: Callable[[str], str] = input
        if sys.stdin.isatty() and os.environ.get("TERM") != "dumb":
            self._line = self._session(commands, history)

    def read(self) -> str:
        """The next message, without surrounding spaces.

        Raises:
            EOFError: the input has ended, or Ctrl-D was pressed.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        text = self._line(PROMPT).strip()
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self._line(MORE)
            text = text.rstrip().removesuffix(QUOTES).strip()
        # Pastes are kept, because a line may be recalled from the history.
        for shown, pasted in self._pastes.items():
            text = text.replace(shown, pasted)
        return text

    def _session(self, commands: Sequence[str], history: Path | None) -> Callable[[str], str]:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.output import create_output

        class KeptLines(FileHistory):
            def store_string(lines, string: str) -> None:
                if self._keeps():
                    super().store_string(string)

        # Some terminals never answer the query for the cursor's position.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        kept: History = InMemoryHistory()
        if history is not None:
            with contextlib.suppress(OSError):
                history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if history.exists() and history.stat().st_size > MAX_HISTORY_BYTES:
                    history.unlink()
                history.touch(mode=0o600)
                kept = KeptLines(str(history))
        session: PromptSession[str] = PromptSession(
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            history=kept,
            key_bindings=self._keys(),
            enable_open_in_editor=False,
            enable_suspend=True,
            # stdout is for answers, and may be a file.
            output=create_output(stdout=sys.stderr),
        )
        return session.prompt

    def _keys(self) -> Any:
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys

        keys = KeyBindings()

        @keys.add(Keys.BracketedPaste)
        def paste(event: Any) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            lines = text.count("\n") + 1
            if lines > MAX_SHOWN_LINES or len(text) > MAX_SHOWN_CHARACTERS:
                size = f"{lines:,} line{'s' * (lines > 1)}, {len(text):,} characters"
                shown = f"[pasted text {len(self._pastes) + 1}: {size}]"
                self._pastes[shown] = text
                text = shown
            event.current_buffer.insert_text(text)

        @keys.add("escape", "enter")
        def new_line(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        return keys
