"""The gradient of a model's loss, written into the views of one flat buffer.

`plain` asks autograd for everything and copies, `hooked` copies one by one (not in a CUDA
graph: hooks may run on another stream). `direct` lets the head's matrix products write
into the buffer: for GPT-2 124M that is a third of all parameters.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model.blocks import State
from ..model.huggingface import Model
from . import graphs
from .loss import AnyTeacher, HeadGrads, Loss, chunked_loss

# (ids [batch, seq_len], share, teacher_topk, add) -> the loss; the views then have the gradient of
# share * loss, and with `add` what they had before and that
Gradient = Callable[[Tensor, float, Tensor | None, bool], Tensor]


def gradient_of(
    model: Model,
    loss: Loss,
    grads: State,
    compile: bool,
    teacher: AnyTeacher | None = None,
    recompute: bool = False,
) -> Gradient:
    """How this model's loss is differentiated; `grads` has a view for every trainable parameter."""
    if recompute:
        graphs.recompute_layers_(model)
    if compile and loss is chunked_loss and graphs.compile_layers_(model):
        return direct(model, grads, teacher)
    if teacher is not None:
        loss = partial(loss, teacher=teacher)
    return plain(model, graphs.compiled(loss), grads) if compile else hooked(model, loss, grads)


def plain(model: Model, loss: Loss, grads: State) -> Gradient:
    named = dict(model.named_parameters())
    params = [named[name] for name in grads]

    def gradient(ids: Tensor, share: float, teacher_topk: Tensor | None, add: bool) -> Tensor:
        value = loss(model, ids, teacher_topk=teacher_topk)
        found = torch.autograd.grad(value * share, params)
        _put_(list(grads.values()), found, add)
        return value.detach()

    return gradient


def hooked(model: Model, loss: Loss, grads: State) -> Gradient:
    """As `plain`, but each gradient is copied and let go as it comes, 4 bytes a parameter less."""
    named, adds = dict(model.named_parameters()), False

    def move(view: Tensor, param: Tensor) -> None:
        assert param.grad is not None
        _put_([view], [param.grad], adds)
        param.grad = None

    for name, view in grads.items():
        named[name].register_post_accumulate_grad_hook(partial(move, view))

    def gradient(ids: Tensor, share: float, teacher_topk: Tensor | None, add: bool) -> Tensor:
        nonlocal adds
        adds = add
        value = loss(model, ids, teacher_topk=teacher_topk)
        (value * share).backward(inputs=[named[name] for name in grads])
        return value.detach()

    return gradient


@torch.no_grad()
def _put_(views: list[Tensor], found: Iterable[Tensor], add: bool) -> None:
    (torch._foreach_add_ if add else torch._foreach_copy_)(views, list(found))


def direct(model: Model, grads: State, teacher: AnyTeacher | None = None) -> Gradient:
    """For the chunked loss: it fills the head's gradient, to which a tied table's is added."""
    named = dict(model.named_parameters())
    names = {id(named[name]): name for name in grads}
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    weight, bias = (names.get(id(getattr(head, leaf, None)), "") for leaf in ("weight", "bias"))
    buffers = HeadGrads(grads[weight], grads.get(bias))
    inner = [name for name in grads if name not in (weight, bias)]
    tied = [weight] if table.weight is head.weight else []

    def gradient(ids: Tensor, share: float, teacher_topk: Tensor | None, add: bool) -> Tensor:
        head = replace(buffers, share=share, add=add)
        value = chunked_loss(model, ids, head, teacher=teacher, teacher_topk=teacher_topk)
        found = torch.autograd.grad(value, [named[name] for name in inner + tied])
        _put_([grads[name] for name in inner], found[: len(inner)], add)
        for name, of_table in zip(tied, found[len(inner) :], strict=True):
            grads[name].add_(of_table)
        return value.detach()

    return gradient
