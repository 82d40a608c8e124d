"""Feed-forward layers in plain torch; of a mixture, the host counts the rows of each expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinphase.backends.base import Array
from twinphase.blueprint import Experts

if TYPE_CHECKING:
    from twinphase.backends.torch.backend import TorchBackend


def gate_and_up(
    backend: TorchBackend, x: Tensor, weight: Array, *, bias: Tensor | None = None
) -> Tensor:
    """activation(gate) * up of the linear layer of both."""
    return backend.gate_mul(backend.linear(x, weight, bias=bias))


def mixture(
    backend: TorchBackend,
    x: Tensor,
    router: Array,
    gate_up: Array,
    down: Array,
    experts: Experts,
    *,
    router_bias: Tensor | None = None,
    choice_bias: Tensor | None = None,  # Of models with recurrent layers, which are refused.
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Each row through its chosen experts; results are added in the order of rank, float32."""
    hidden = backend.blueprint.span("hidden")
    logits = backend.linear(x, router, bias=router_bias).to(backend.wide)
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, : experts.used]
    p = torch.softmax(logits, -1).gather(1, order)
    if experts.renormalize:
        p = p / p.sum(1, keepdim=True)
    width = hidden.size if hidden else x.shape[1]
    results = torch.zeros(*order.shape, width, dtype=backend.wide, device=backend.device)
    for expert in range(experts.count):
        rows, rank = (order == expert).nonzero(as_tuple=True)
        own = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        h = gate_and_up(backend, x[rows], gate_up[expert], bias=own[0])
        h = backend.gather(h, backend.blueprint.span("experts"))
        results[rows, rank] = backend.linear(h, down[expert], bias=own[1]).to(backend.wide)
    out = torch.zeros_like(results[:, 0])
    for k in range(experts.used):
        out += p[:, k, None] * results[:, k]
    return out
