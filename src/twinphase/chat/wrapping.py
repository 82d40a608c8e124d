"""Wraps streamed text between words, so that the terminal does not break words."""

from __future__ import annotations

import re
import shutil
import sys
from typing import TextIO

# Stands for a terminal that breaks lines itself.
UNWRAPPED = sys.maxsize


class WrappedOutput:
    """Writes streamed text with lines as wide as the terminal; elsewhere without changes.

    A word is held back until it is complete. A word that is wider than the terminal is not divided.
    """

    def __init__(self, stream: TextIO | None = None, columns: int | None = None) -> None:
        """Write to `stream` (stdout) in lines of `columns`, by default the terminal's."""
        self._stream = stream or sys.stdout
        self._columns = columns
        if columns is None and self._stream.isatty():
            self._columns = shutil.get_terminal_size().columns
        self._column = 0
        self._word = ""
        self._space = ""

    def write(self, text: str) -> None:
        """Add text, and write its complete words."""
        if self._columns is None:
            self._stream.write(text)
        else:
            for piece in re.findall(r"\n|[^\S\n]+|\S+", text):
                self._take(piece)
        self._stream.flush()

    def close(self, *, with_newline: bool = False) -> None:
        """Write the last word."""
        self._put_word()
        if with_newline:
            self._stream.write("\n")
        self._stream.flush()

    def _take(self, piece: str) -> None:
        if not piece.isspace():
            self._word += piece
            return
        self._put_word()
        if piece == "\n":
            self._stream.write(piece)
            self._column = 0
            self._space = ""
        else:
            self._space += piece

    def _put_word(self) -> None:
        if not self._word or self._columns is None:
            return
        width = text_width(self._word)
        # Spaces at the start of a line are indentation, and are kept.
        if self._column and self._column + len(self._space) + width > self._columns:
            self._stream.write("\n")
            self._column = 0
            self._space = ""
        self._stream.write(self._space + self._word)
        self._column += len(self._space) + width
        self._word = self._space = ""


def text_width(text: str) -> int:
    """Columns that a text takes; some characters take two or none."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth

    return max(wcswidth(text), 0) or len(text)
