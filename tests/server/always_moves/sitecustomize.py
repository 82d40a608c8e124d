"""On a server's path: every prompt goes to the prefill pool, whether or not that pays."""

from typing import Any

from twinphase.cluster import routing


class AlwaysMoves(routing.Routing):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "policy": "random"})


routing.Routing = AlwaysMoves  # type: ignore[misc]
