"""Decodes tokens to text while they stream: whole characters, and no part of a stop string.

There is one detokenizer per request. `Tokenizer.decode` decodes all tokens at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from twinphase.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into a stream of text.

    The joined results of `append` and `flush` equal `Tokenizer.decode` of all ids, cut before the
    first stop string.

    Attributes:
        stopped: True once a stop string was completed; later tokens have no text.
        stop_string: the completed stop string, or None.
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
        """Start an empty stream; `skip_special_tokens`, `continuation` as in `Tokenizer.decode`.

        A string of `stop` ends the text, and is part of it only with `keep_stop`. Control tokens in
        `keep_special` are always part of the text.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        self._skip_special_tokens = skip_special_tokens
        self._keep_special = keep_special
        self._keep_stop = keep_stop
        self._strip_space = tokenizer.strips_leading_space and not continuation
        # This holds back the bytes of an unfinished character, and replaces invalid bytes like
        # bytes.decode.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # Text that may be the start of a stop string.
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    @property
    def holds_back(self) -> bool:
        """Whether part of a character, or a possible start of a stop string, is held back."""
        return bool(self._held or self._decoder.getstate()[0])

    @property
    def num_held(self) -> int:
        """Number of whole characters that may be the start of a stop string."""
        return len(self._held)

    def append(self, token_id: int) -> str:
        """Add a token; return the text that has become final, which is often empty."""
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
        """End the stream; return the text that was held back."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        held = self._held
        self._held = ""
        return text + held

    def _release(self, text: str) -> str:
        """Add text to the held text, and return the part that cannot become a stop string."""
        if not self._stop:
            return text
        text = self._held + text
        self._held = ""
        # The match that is complete first wins, and of two that end together the longer one, so
        # that the result does not depend on how the text is divided into tokens.
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
    """Length of the longest end of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
