"""Embedding gradients as the rows that were looked up, added to a dense gradient in place.

Autograd's own is a dense table of zeros and a few thousand rows, which then is added to the gradient of the
tied head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Lookup:
    """An embedding's forward pass that cuts the graph at its output."""

    def __init__(self, name: str, table: nn.Embedding):
        self.name, self.table = name, table

    def __call__(self, ids: Tensor) -> Tensor:
        self.ids = ids
        self.out = F.embedding(ids, self.table.weight.detach()).requires_grad_()
        return self.out

    def add_(self, grad: Tensor, d_out: Tensor) -> None:
        """Add to the table's gradient [n, d] what came back for `out`."""
        if self.table.padding_idx is not None:  # it learns nothing, by torch's definition
            d_out = d_out.masked_fill((self.ids == self.table.padding_idx)[..., None], 0.0)
        add_rows_(grad, self.ids.flatten(), d_out.flatten(0, -2))


def intercept_(model: nn.Module) -> list[Lookup]:
    """Put lookups into all plain embeddings of a model that is to be trained by `torch.autograd.grad`."""
    lookups = [
        Lookup(f"{name}.weight", module)
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and module.max_norm is None
    ]
    for lookup in lookups:
        lookup.table.forward = lookup  # type: ignore[method-assign,assignment]
    return lookups


def add_rows_(grad: Tensor, ids: Tensor, rows: Tensor) -> None:
    """grad[ids] += rows; in low precision the rows of one id are summed in float32 and rounded once."""
    if grad.element_size() >= 4:
        grad.index_add_(0, ids, rows)
        return
    grad.index_add_(0, ids, sums_by_id(ids, rows, len(grad)).to(grad.dtype))


def sums_by_id(ids: Tensor, rows: Tensor, n_ids: int) -> Tensor:
    """float32 [n, d]: where an id comes first, the sum of all its rows; where it comes again, 0."""
    places = torch.arange(len(ids), device=ids.device)
    first = torch.full((n_ids,), len(ids), device=ids.device)
    first = first.scatter_reduce_(0, ids, places, "amin")[ids]
    return torch.zeros(rows.shape, device=rows.device).index_add_(0, first, rows.float())
