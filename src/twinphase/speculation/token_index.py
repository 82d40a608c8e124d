"""Where in a text the last tokens stood before, and for how many tokens both agree.

The longest match that a suffix automaton would find, as long as it is among the last places of its last four tokens;
a look-up touches few tokens whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LONGEST_MATCH", "TokenIndex"]

LONG, SHORT = 4, 2  # tokens that places are found by
PLACES = 4  # kept of each run of LONG tokens, the last ones
LONGEST_MATCH = 32  # tokens; more are as good


class TokenIndex:
    """A text that grows, and where its runs of tokens end."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._long: dict[tuple[int, ...], list[int]] = {}  # by a run, where it was followed by a token
        self._short: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text; a run becomes known when a token follows it."""
        text, long, short = self.token_ids, self._long, self._short
        start = len(text)
        text += token_ids
        for at in range(max(start, SHORT), len(text)):
            short[tuple(text[at - SHORT : at])] = at
            if at >= LONG:
                places = long.setdefault(tuple(text[at - LONG : at]), [])
                places.append(at)
                if len(places) > PLACES:
                    del places[0]

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """Where the text goes on as after `context`, and how many tokens before that agree; (0, 0) if nowhere.

        Of the longest matches the last one. At least two tokens have to agree.
        """
        text, best, longest = self.token_ids, 0, 0
        for at in reversed(self._long.get(tuple(context[-LONG:]), ())):
            length, most = LONG, min(len(context), at, LONGEST_MATCH)
            while length < most and text[at - 1 - length] == context[-1 - length]:
                length += 1
            if length > longest:
                best, longest = at, length
        if not longest and (at := self._short.get(tuple(context[-SHORT:]), 0)):
            best, longest = at, SHORT
            if at > SHORT and len(context) > SHORT and text[at - 1 - SHORT] == context[-1 - SHORT]:
                longest += 1
        return best, longest
