"""A checkpoint that multiplies some small tensors by factors when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.quant import dequantize, tensor_nbytes

# For each tensor by name: (number of rows, factor), starting at the first row.
Factors = Mapping[str, list[tuple[int, float]]]


@dataclass(frozen=True, kw_only=True)
class MultipliedCheckpoint(Checkpoint):
    """A checkpoint with multiplied tensors, which are float32.

    Attributes:
        original: the checkpoint without factors.
    """

    original: Checkpoint
    factors: Factors
    products: dict[str, Any] = field(default_factory=dict)

    def raw(self, name: str) -> Any:
        if name not in self.factors:
            return self.original.raw(name)
        if name not in self.products:
            stored = self.original.tensors[name]
            values = dequantize(self.original.raw(name), stored.shape, stored.type)
            counts, factors = zip(*self.factors[name], strict=True)
            rows = np.repeat(np.array(factors, np.float32), counts)
            product = values.reshape(len(rows), -1) * rows[:, None]
            self.products[name] = product.reshape(-1).view(np.uint8)
        return self.products[name]

    def release(self, name: str) -> None:
        self.products.pop(name, None)
        self.original.release(name)


def multiplied_tensors(checkpoint: Checkpoint, factors: Factors) -> Checkpoint:
    """The checkpoint with the tensors in `factors` multiplied."""
    tensors = dict(checkpoint.tensors)
    for name in factors:
        info = tensors[name]
        tensors[name] = replace(info, type="F32", nbytes=tensor_nbytes(info.shape, "F32"))
    own = vars(checkpoint) | {"tensors": tensors}
    base = {name: own[name] for name in Checkpoint.__dataclass_fields__}
    return MultipliedCheckpoint(**base, original=checkpoint, factors=factors)
