"""How the loss changes when a block is turned down: the gradient by a factor on what it adds."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..model.blocks import BlockMap
from ..model.central import Central
from ..model.huggingface import Model
from ..model.subnet import build
from .loss import next_token_loss


def mask_slopes(
    template: Model, block_map: BlockMap, central: Central, ids: Tensor
) -> Iterator[dict[str, Tensor]]:
    """For every sequence and group dl/dm of a mask for each token: float64 [seq_len, n_blocks]."""
    weights = central.weights
    full = build(template, block_map, central.layout, weights, gates="all")
    full.model.requires_grad_(False)
    for gate in full.gates.values():
        gate.values = gate.values.repeat(1, ids.shape[1], 1).requires_grad_()
    for example in ids.split(1):
        loss = next_token_loss(full.model, example.to(weights.device))
        grads = torch.autograd.grad(loss, [gate.values for gate in full.gates.values()])
        yield {name: grad[0].double() for name, grad in zip(full.gates, grads, strict=True)}


def mask_fisher(
    slopes: Iterator[dict[str, Tensor]], n: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Mean over n sequences of (dl/dm_b)^2: float64 [n_blocks] for every group."""
    scores: dict[str, Tensor] = {}
    for each in slopes:
        for name, slope in each.items():
            square = slope.sum(0).square() / n
            scores[name] = scores[name] + square if name in scores else square
        tick()
    return scores


def order_of(scores: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Every group's blocks by falling score; of equal ones the first comes first."""
    return {
        name: tuple(values.argsort(descending=True, stable=True).tolist())
        for name, values in scores.items()
    }


@torch.no_grad()
def order_of_layers(
    template: Model, block_map: BlockMap, central: Central, ids: Tensor
) -> tuple[int, ...]:
    """The layers that are cut by falling loss of the model without each."""
    full, losses = build(template, block_map, central.layout, central.weights, gates="all"), {}
    for layer in block_map.layers:
        kept = block_map.full() | {g.name: () for g in block_map.groups if g.layer == layer}
        full.keep_(kept)
        examples = (each.to(central.weights.device) for each in ids.split(1))
        losses[layer] = sum(float(next_token_loss(full.model, each)) for each in examples)
    return tuple(sorted(losses, key=losses.__getitem__, reverse=True))
