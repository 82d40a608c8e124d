"""On the path of a server, this sends every prompt to the prefill pool."""

from typing import Any

from twinphase.cluster import routing


class AlwaysMoves(routing.Routing):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "policy": "random"})


routing.Routing = AlwaysMoves  # type: ignore[misc]
