"""The operations between linear layers, each in one pass over its rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 512


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    add_ptr,
    out_ptr,
    stride,
    width,
    eps,
    scale,
    HAS_ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of out = (add + scale *) x / sqrt(mean(x^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    root = tl.sqrt(tl.sum(x * x, 0) / width + eps)
    out = x / root * tl.load(weight_ptr + at, mask=inside, other=0.0)
    if HAS_ADD:
        out = tl.load(add_ptr + row * width + at, mask=inside, other=0.0) + scale * out
    tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    add: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """RMSNorm of each row of x [rows, width]; with `add`, add + scale * norm in float32."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=dtype if add is None else torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(rows,)](
            x,
            weight,
            add,
            out,
            x.stride(0),
            width,
            eps,
            scale,
            HAS_ADD=add is not None,
            BLOCK=block,
            num_warps=4 if block <= 4096 else 8,
        )
    return out


@triton.jit
def gate_mul_kernel(gate_up_ptr, out_ptr, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A part of a row of out = activation(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == "swiglu_oai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1
        gate = gate * tl.sigmoid(1.702 * gate)
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * width + at, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


def gate_mul(gate_up: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """activation(gate) * up of [rows, 2 * width] = (gate, up), [rows, width]."""
    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, GATE_BLOCK))
        gate_mul_kernel[grid](
            gate_up, out, width, ACTIVATION=activation, BLOCK=GATE_BLOCK, num_warps=4
        )
    return out
