"""The time of a step's operations on the device, for `twinphase roofline`, not for serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import Forward, StepInputs
from twinphase.backends.torch.device import mark, seconds_between


def execute_in_parts(
    backend: Any, forward: Forward, inputs: StepInputs
) -> tuple[NDArray[np.float32], Mapping[str, float]]:
    """As `execute`, without graphs; also the seconds of linear layers, attention and the rest."""
    marks: list[tuple[str, Any, Any]] = []

    def timed(name: str) -> Any:
        operation = getattr(backend, name)

        def run(*args: Any, **options: Any) -> Any:
            start = mark(backend.device)
            out = operation(*args, **options)
            marks.append((name, start, mark(backend.device)))
            return out

        return run

    own = {name: timed(name) for name in ("linear", "attention")}
    graphs = backend.graphs
    vars(backend).update(own, graphs=None)
    try:
        start = mark(backend.device)
        logits = backend.execute(forward, inputs)
        whole = seconds_between(start, mark(backend.device))
    finally:
        vars(backend)["graphs"] = graphs
        for name in own:
            del vars(backend)[name]
    spent = dict.fromkeys(own, 0.0)
    for name, begin, end in marks:
        spent[name] += seconds_between(begin, end)
    return logits, {**spent, "other": whole - sum(spent.values())}
