"""A draft, and the interface of proposers; each of them drafts in one way.

A proposer does not decide how many of its tokens are verified (`draft_lengths.py`), and does not
learn which are accepted (`verify.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twinphase.request import Request


@dataclass(frozen=True)
class Draft:
    """Draft tokens.

    Attributes:
        source: name of the proposer's method; acceptance rates are learned per source.
        match: length of the matching context, in tokens; longer matches are accepted more often.
        certain: number of leading tokens that are always accepted.
    """

    source: str
    token_ids: list[int]
    match: int = 0
    certain: int = 0


class Proposer(Protocol):
    """Drafts for one request at a time, and keeps state between drafts."""

    def propose(self, request: Request, limit: int) -> list[Draft]:
        """Return drafts of at most `limit` tokens after the last known token; maybe none.

        A request may skip steps. A `limit` of 0 only updates the state.

        Raises:
            Exception: the proposer failed; it is not called again for this request.
        """

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended; the request may be unknown."""
