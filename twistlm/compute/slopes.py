"""How the loss changes when a block is turned down: the gradient by a factor on what it adds.

From it follow the order of blocks, and that of the neurons that they are made of.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..model.blocks import BlockGroup, BlockMap
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


def _by_neurons(group: BlockGroup) -> BlockGroup:
    """An FFN layer in blocks of one neuron; attention as it is."""
    if group.kind == "attn":
        return group
    parts = tuple(replace(part, chunk=1) for part in group.parts)
    n_neurons = group.n_blocks * group.out_part.chunk
    return replace(group, n_blocks=n_neurons, parts=parts, common=())


def sort_neurons_(
    template: Model,
    block_map: BlockMap,
    central: Central,
    ids: Tensor,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, tuple[int, ...]]:
    """Put every FFN layer's neurons in falling order of importance; the order of all blocks.

    The model computes what it did, but the first block of a layer has its most important neurons. A
    neuron's score is the sum over tokens of (dl/dm)^2; attention's blocks keep their places.
    """
    single = BlockMap(tuple(_by_neurons(group) for group in block_map.groups))
    ffn = [group.name for group in single.groups if group.kind == "ffn"]
    squares: dict[str, Any] = {}
    slopes = mask_slopes(template, single, central, ids)

    def added() -> Iterator[dict[str, Tensor]]:
        for each in slopes:
            for name in ffn:
                squares[name] = squares.get(name, 0) + each.pop(name).square().sum(0)
            yield each

    order = order_of(mask_fisher(added(), len(ids), tick))
    views = central.layout.views(central.weights)
    for group in map(block_map.__getitem__, ffn):
        order[group.name] = tuple(range(group.n_blocks))
        places = squares[group.name].argsort(descending=True, stable=True)
        for part in group.parts:
            rows = views[part.param].detach().unflatten(part.dim, (part.sections, -1))
            rows.copy_(rows.index_select(part.dim + 1, places))
    return order


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
