"""What a guess is, and the seam of those who make them.

A proposer knows one way to guess what a request says next. Whether its guess is worth a step's time
is not its business (`choose.py`), and whether it was right neither (`verify.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twinphase.request import Request


@dataclass(frozen=True)
class Draft:
    """Guessed tokens.

    Attributes:
        source: who guesses; acceptance is learned for each by itself.
        match: how many of the last known tokens speak for it; the more, the surer.
        certain: leading tokens that cannot be wrong.
    """

    source: str
    token_ids: list[int]
    match: int = 0
    certain: int = 0


class Proposer(Protocol):
    """Guesses for one request at a time; keeps what it needs for the next guess."""

    def propose(self, request: Request, limit: int) -> list[Draft]:
        """Guesses at what follows the last known token, `limit` tokens long at most; none is an answer too.

        Steps may pass in which a request is not asked about. With a `limit` of 0 no guess is
        wanted.

        Raises:
            Exception: it cannot go on; it is not asked about this request again.
        """

    def forget(self, request: Request) -> None:
        """The request has ended, or never was."""
