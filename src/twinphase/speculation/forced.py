"""Tokens that a grammar, or the end of a thinking budget, leaves no choice about."""

from __future__ import annotations

from twinphase.request import Request
from twinphase.speculation.proposer import Draft


class ForcedProposer:
    """Asks the request's constraint, if it can tell; such a draft is always right."""

    def propose(self, request: Request, limit: int) -> list[Draft]:
        """See `Proposer`."""
        if request.constraint is None or not limit:
            return []
        forced = request.constraint.forced(request.output_token_ids, limit)
        return [Draft("forced", forced, certain=len(forced))] if forced else []

    def forget(self, request: Request) -> None:
        """Nothing was kept."""
