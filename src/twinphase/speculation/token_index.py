"""An index of a growing text that finds the last occurrence of its final tokens.

It finds the same longest match as a suffix automaton, if that is among the most recent occurrences
of its last four tokens. The cost of a look-up does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Sequence

# Length of the long runs of tokens that the index has positions for.
LONG_RUN = 4
SHORT_RUN = 2
# Number of most recent occurrences of a long run that are compared.
MAX_PLACES = 4
# Longer matches count as this number of tokens.
LONGEST_MATCH = 32
# A run is packed into one integer, which the garbage collector does not track.
BITS_PER_TOKEN = 24
LONG_MASK = (1 << LONG_RUN * BITS_PER_TOKEN) - 1
SHORT_MASK = (1 << SHORT_RUN * BITS_PER_TOKEN) - 1


class TokenIndex:
    """A growing text, and the positions at which its runs of tokens end.

    Tokens are ids, or -1, which is not part of any run.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        # The last LONG_RUN tokens.
        self._run = 0
        # The last position after each run, if a token follows there.
        self._long: dict[int, int] = {}
        self._short: dict[int, int] = {}
        # For each position, the previous position after the same long run; 0 if there is none.
        self._previous: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text; a run is indexed when a token follows it."""
        run = self._run
        long = self._long
        short = self._short
        previous = self._previous
        for at, token_id in enumerate(token_ids, len(self.token_ids)):
            previous.append(long.get(run, 0))
            long[run] = short[run & SHORT_MASK] = at
            run = (run << BITS_PER_TOKEN | token_id + 1) & LONG_MASK  # 0 stands for no token.
        self._run = run
        self.token_ids += token_ids

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """The position after the longest match of the end of `context`, and the match's length.

        Among equally long matches the last one is returned. A match has at least two tokens; (0, 0)
        means that there is none.
        """
        text = self.token_ids
        best = 0
        longest = 0
        run = 0
        for token_id in context[-LONG_RUN:]:
            run = run << BITS_PER_TOKEN | token_id + 1
        at = self._long.get(run, 0) if len(context) >= LONG_RUN else 0
        places = MAX_PLACES
        while at and places:
            length = LONG_RUN
            most = min(len(context), at, LONGEST_MATCH)
            while length < most and text[at - 1 - length] == context[-1 - length]:
                length += 1
            if length > longest:
                best = at
                longest = length
            at = self._previous[at]
            places -= 1
        if longest or len(context) < SHORT_RUN:
            return best, longest
        at = self._short.get(run & SHORT_MASK, 0)
        if not at:
            return 0, 0
        third = at > SHORT_RUN and len(context) > SHORT_RUN
        if third and text[at - 1 - SHORT_RUN] == context[-1 - SHORT_RUN]:
            return at, SHORT_RUN + 1
        return at, SHORT_RUN
