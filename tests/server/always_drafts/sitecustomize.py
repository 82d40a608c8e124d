"""On the path of a server, this makes it verify every draft, whether or not that pays."""

from typing import Any

from twinphase.speculation import speculator


class AlwaysDrafts(speculator.Speculator):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, always=True)


speculator.Speculator = AlwaysDrafts  # type: ignore[misc]
