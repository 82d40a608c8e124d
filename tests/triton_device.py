"""Where the tests of the Triton kernels run, and what they compare: an interpreter or a GPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

F32 = NDArray[np.float32]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# On a GPU these kernels compute in 16 bits only; compiling float32 products takes minutes.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
WIDEST = "float32" if INTERPRETED else "float16"
MAX_ERROR = 1e-4 if INTERPRETED else 3e-2
CAPABILITY = 0
if not INTERPRETED and torch.cuda.is_available():
    major, minor = torch.cuda.get_device_capability()
    CAPABILITY = 10 * major + minor
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
# Scales are float16, and so are, or bfloat16, the products.
WEIGHT_TOLERANCES = {
    torch.float32: {"rtol": 2e-3, "atol": 1e-4},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 1e-2, "atol": 2e-3},
}


def product(self: object, a: Any, b: Any, added: Any, *_: object) -> Any:
    """`added` + a @ b, in float32."""
    from triton.runtime import interpreter

    left = a.data.astype(np.float32)
    right = b.data.astype(np.float32)
    out = added.data.copy()
    for k in range(left.shape[1]):
        out += left[:, k, None] * right[None, k]
    return interpreter.TensorHandle(out, added.dtype.scalar)


def errors_of(found: F32, expected: F32) -> F32:
    errors: F32 = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return errors


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(DEVICE)


def same_bits(found: F32 | torch.Tensor, expected: F32 | torch.Tensor) -> None:
    found, expected = (
        one.float().cpu().numpy() if isinstance(one, torch.Tensor) else one
        for one in (found, expected)
    )
    differs = (found.view(np.int32) != expected.view(np.int32)).reshape(len(found), -1).any(axis=1)
    assert not differs.any(), f"{differs.sum()} rows differ, the first is {differs.argmax()}"
