"""Text of generated tokens as they come: whole characters only, and never a part of a stop string.

One per request; ended and thrown away with it. Not for decoding at once (`Tokenizer.decode`).
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from twinphase.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into a stream of text.

    What `append` and `flush` return, joined, is `Tokenizer.decode` of all ids, cut before the first
    stop string.

    Attributes:
        stopped: True once a stop string was completed; later tokens have no text.
        stop_string: the one that was, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        keep_special: Collection[int] = (),
        keep_stop: bool = False,
        continuation: bool = False,
    ) -> None:
        """Starts an empty stream; `skip_special_tokens`, `continuation` as in `Tokenizer.decode`.

        A string of `stop` ends the text and is part of it with `keep_stop` only. The control tokens
        in `keep_special` always are.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        self._skip_special_tokens = skip_special_tokens
        self._keep_special = keep_special
        self._keep_stop = keep_stop
        self._strip_space = tokenizer.strips_leading_space and not continuation
        # Holds back bytes of an unfinished character, and replaces invalid ones as bytes.decode.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # the text that could be the beginning of a stop string
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    @property
    def holds_back(self) -> bool:
        """Whether part of a character, or of what may be a stop string, is not out yet."""
        return bool(self._held or self._decoder.getstate()[0])

    @property
    def num_held(self) -> int:
        """Characters of whole text that may be the beginning of a stop string."""
        return len(self._held)

    def append(self, token_id: int) -> str:
        """Takes one token and returns the text that is certain now, often empty."""
        if self.stopped or self._skips(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._release(self._decoder.decode(data))

    def _skips(self, token_id: int) -> bool:
        special = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        return special and token_id not in self._keep_special

    def flush(self) -> str:
        """Ends the stream and returns what was held back."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        held = self._held
        self._held = ""
        return text + held

    def _release(self, text: str) -> str:
        """Adds text to what is held, and returns the part that cannot become a stop string."""
        if not self._stop:
            return text
        text = self._held + text
        self._held = ""
        # The match that is complete first, and of two that end together the longer: so it does not
        # matter how the text was cut into tokens.
        matches = [
            (at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0
        ]
        if matches:
            end, at, self.stop_string = min(matches)
            return text[: end if self._keep_stop else at]
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, shorter than `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
