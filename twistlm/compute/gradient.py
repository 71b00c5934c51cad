"""The gradient of a model's loss, written into the views of one flat buffer.

`plain` asks autograd for everything and copies. `direct` lets the head's matrix products write into
the buffer and adds the embeddings' gradients there as rows: for GPT-2 124M that is a third of all
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.blocks import State
from . import graphs
from .loss import AnyTeacher, HeadGrads, Loss, chunked_loss

# (ids [batch, seq_len], share, teacher_topk=None) -> loss; the views then hold the gradient of
# share * loss
Gradient = Callable[..., Tensor]


def gradient_of(
    model: PreTrainedModel,
    loss: Loss,
    grads: State,
    compile: bool,
    teacher: AnyTeacher | None = None,
) -> Gradient:
    """How this model's loss is differentiated; `grads` has a view for every trainable parameter."""
    if compile and is_direct(model, loss) and graphs.compile_layers_(model):
        return direct(model, grads, teacher)
    if teacher is not None:
        loss = partial(loss, teacher=teacher)
    return plain(model, graphs.compiled(loss) if compile else loss, grads)


def is_direct(model: PreTrainedModel, loss: Loss) -> bool:
    """Whether head and table are plain ones (Gemma scales what it looks up)."""
    return loss is chunked_loss and type(model.get_input_embeddings()) is nn.Embedding


def plain(model: PreTrainedModel, loss: Loss, grads: State) -> Gradient:
    named = dict(model.named_parameters())
    params = [named[name] for name in grads]

    def gradient(ids: Tensor, share: float, teacher_topk: Tensor | None = None) -> Tensor:
        value = loss(model, ids, teacher_topk=teacher_topk)
        found = torch.autograd.grad(value * share, params)
        torch._foreach_copy_(list(grads.values()), found)
        return value.detach()

    return gradient


def direct(model: PreTrainedModel, grads: State, teacher: AnyTeacher | None = None) -> Gradient:
    """For the chunked loss; the model's embeddings are changed for good."""
    named = dict(model.named_parameters())
    names = {id(named[name]): name for name in grads}
    head: Any = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    of_head = {names[id(param)] for param in (head.weight, bias) if param is not None}
    head_grads = HeadGrads(
        grads[names[id(head.weight)]], None if bias is None else grads[names[id(bias)]]
    )
    lookups = intercept_(model)
    inner = [name for name in grads if name not in of_head | {lookup.name for lookup in lookups}]

    def gradient(ids: Tensor, share: float, teacher_topk: Tensor | None = None) -> Tensor:
        value = chunked_loss(model, ids, replace(head_grads, share=share), teacher, teacher_topk)
        cuts = [lookup.out for lookup in lookups]
        found = torch.autograd.grad(value, [*(named[name] for name in inner), *cuts])
        torch._foreach_copy_([grads[name] for name in inner], found[: len(inner)])
        for lookup, d_out in zip(lookups, found[len(inner) :], strict=True):
            if lookup.name not in of_head:  # nothing has been written there
                grads[lookup.name].zero_()
            lookup.add_(grads[lookup.name], d_out)
        return value.detach()

    return gradient


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
    """Put lookups into all plain embeddings of a model that `torch.autograd.grad` trains."""
    lookups = [
        Lookup(f"{name}.weight", module)
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and module.max_norm is None
    ]
    for lookup in lookups:
        lookup.table.forward = lookup  # type: ignore[method-assign,assignment]
    return lookups


def add_rows_(grad: Tensor, ids: Tensor, rows: Tensor) -> None:
    """grad[ids] += rows; in low precision each id's rows are summed in float32, rounded once."""
    if grad.element_size() < 4:  # to where an id comes first; where it comes again, 0 is added
        places = torch.arange(len(ids), device=ids.device)
        first = torch.full((len(grad),), len(ids), device=ids.device)
        first = first.scatter_reduce_(0, ids, places, "amin")[ids]
        sums = torch.zeros(rows.shape, device=rows.device).index_add_(0, first, rows.float())
        rows = sums.to(grad.dtype)
    grad.index_add_(0, ids, rows)
