"""Drafts the tokens that a grammar, or the end of a thinking budget, forces."""

from __future__ import annotations

from twinphase.request import Request
from twinphase.speculation.proposer import Draft


class ForcedProposer:
    """Drafts the tokens that the request's constraint forces; they are always accepted."""

    def propose(self, request: Request, limit: int) -> list[Draft]:
        if request.constraint is None or not limit:
            return []
        forced = request.constraint.forced(request.output_token_ids, limit)
        return [Draft("forced", forced, certain=len(forced))] if forced else []

    def forget(self, request: Request) -> None:
        """Do nothing: this proposer has no state."""
