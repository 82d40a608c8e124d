"""The device of the reference backend, which has neither memory of its own nor ceilings."""

from __future__ import annotations

from collections.abc import Set

from twinphase.backends.base import MeasuredRates, Units


class ReferenceDevice:
    """The reference backend's device: float32, NumPy's own threads, no ceilings."""

    name = "reference"
    isa = ""
    threads = 1
    ceilings = ""
    best_isa: str | None = None
    prompt_isa: str | None = None

    def units(self, weights: Set[tuple[str, int]]) -> Units:
        """Float32 for all weights."""
        return Units("float32", "float32", "float32")

    def kv_head_bytes(self, head_dim: int, dtype: str) -> float:
        """2 d b, with b = 4."""
        return 8 * head_dim

    def free_memory(self) -> None:
        """None: the backend computes in the host's memory."""

    def measure(self) -> MeasuredRates:
        """Raise: the reference backend has no ceilings."""
        raise NotImplementedError("the reference backend has no ceilings")
