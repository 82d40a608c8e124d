"""Where in a text the last tokens stood before, and for how many tokens both agree.

The longest match that a suffix automaton would find, as long as it is among the last places of its
last four tokens; a look-up touches few tokens whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

# tokens that places are found by
LONG = 4
SHORT = 2
PLACES = 4  # of each run of LONG tokens that are looked at, the last ones
LONGEST_MATCH = 32  # tokens; more are as good
BITS = 24  # of a token in a run, which is a number: one object for the garbage collector to pass by
LONG_MASK = (1 << LONG * BITS) - 1
SHORT_MASK = (1 << SHORT * BITS) - 1


class TokenIndex:
    """A text that grows, and where its runs of tokens end.

    Tokens are ids, or -1, which no run contains.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._run = 0  # the last LONG tokens
        self._long: dict[int, int] = {}  # by a run, the last place where it was followed by a token
        self._short: dict[int, int] = {}
        self._before: list[
            int
        ] = []  # by place, the place before of the same long run; 0 if there is none

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text; a run becomes known when a token follows it."""
        run = self._run
        long = self._long
        short = self._short
        before = self._before
        for at, token_id in enumerate(token_ids, len(self.token_ids)):
            before.append(long.get(run, 0))
            long[run] = short[run & SHORT_MASK] = at
            run = (run << BITS | token_id + 1) & LONG_MASK  # so that 0 is no token
        self._run = run
        self.token_ids += token_ids

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """Where the text goes on as after `context`, and how many tokens before that agree; (0, 0) if nowhere.

        Of the longest matches the last one. At least two tokens have to agree.
        """
        text = self.token_ids
        best = 0
        longest = 0
        run = 0
        for token_id in context[-LONG:]:
            run = run << BITS | token_id + 1
        at = self._long.get(run, 0) if len(context) >= LONG else 0
        places = PLACES
        while at and places:
            length = LONG
            most = min(len(context), at, LONGEST_MATCH)
            while length < most and text[at - 1 - length] == context[-1 - length]:
                length += 1
            if length > longest:
                best = at
                longest = length
            at = self._before[at]
            places = places - 1
        if not longest and len(context) >= SHORT and (at := self._short.get(run & SHORT_MASK, 0)):
            best = at
            longest = SHORT
            if at > SHORT and len(context) > SHORT and text[at - 1 - SHORT] == context[-1 - SHORT]:
                longest += 1
        return best, longest
