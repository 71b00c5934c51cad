"""How much each block matters: scores per block, the same for every family.

A score is a number per block of every group, read through the `(sections, n_blocks, chunk)` view.
The loss of an example (one sequence) is its mean next-token loss under the full parent, float32.
Masks on blocks (`compute.slopes`): dl/dm_b = <C_b, dl/dC_b>, C_b the block's rows of the output
projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..compute import slopes
from ..compute.loss import next_token_loss
from ..model.blocks import BlockGroup, BlockMap, Blueprint, Partition, Widths
from ..model.subnet import build
from . import NEEDS_TEXT
from .parent import Parent

BlockScores = dict[str, Tensor]  # group name -> float64 [n_blocks]
Tick = Callable[[], None]  # called after every example


def fisher(parent: Parent, ids: Tensor, seed: int, tick: Tick) -> BlockScores:
    """F_b = mean over examples of the sum over the block's weights of (dl/dw)^2."""
    block_map, central = parent.block_map, parent.central
    grads = torch.zeros_like(central.weights)
    full = build(parent.template, block_map, central.layout, central.weights, grads)
    views, scores = central.layout.views(grads), _zeros(parent)
    for example in ids.split(1):  # the square of a batch's gradient is no sum of squares
        grads.zero_()
        next_token_loss(full.model, example.to(grads.device)).backward()
        for group in block_map.groups:
            for part in group.parts:
                squares = views[part.param].detach().square()
                scores[group.name] += sum_blocks(group, part, squares) / len(ids)
        tick()
    return scores


def mask_fisher(parent: Parent, ids: Tensor, seed: int, tick: Tick) -> BlockScores:
    """Mean over examples of (dl/dm_b)^2."""
    return slopes.mask_fisher(_slopes(parent, ids), len(ids), tick)


def taylor(parent: Parent, ids: Tensor, seed: int, tick: Tick) -> BlockScores:
    """Mean over tokens of |dl/dm_b|, with a mask of its own for every token."""
    scores = _zeros(parent)
    for each in _slopes(parent, ids):
        for name, slope in each.items():
            scores[name] += slope.abs().mean(0) / len(ids)
        tick()
    return scores


def magnitude(parent: Parent, ids: Tensor | None, seed: int, tick: Tick) -> BlockScores:
    """The L2 norm of all weights of a block."""
    views, scores = parent.central.layout.views(parent.central.weights), _zeros(parent)
    for group in parent.block_map.groups:
        for part in group.parts:
            squares = views[part.param].detach().square()
            scores[group.name] += sum_blocks(group, part, squares)
        scores[group.name].sqrt_()
    return scores


def uniform(parent: Parent, ids: Tensor | None, seed: int, tick: Tick) -> BlockScores:
    """Random scores: keeping the best of them is the paper's random extraction (SE)."""
    draw = torch.Generator().manual_seed(seed)
    return {
        group.name: torch.rand(group.n_blocks, dtype=torch.float64, generator=draw)
        for group in parent.block_map.groups
    }


METHODS: dict[str, Callable[..., BlockScores]] = {  # `tickets.IMPORTANCES`
    "fisher": fisher,
    "mask-fisher": mask_fisher,
    "taylor": taylor,
    "magnitude": magnitude,
    "random": uniform,
}


def score(
    parent: Parent, method: str, ids: Tensor | None, seed: int = 0, tick: Tick = lambda: None
) -> BlockScores:
    """Scores of every block by one of `METHODS`; `ids` are calibration sequences [n, seq_len]."""
    if method not in METHODS:
        raise ValueError(f"importance {method!r}: use one of {', '.join(METHODS)}")
    if method in NEEDS_TEXT and (ids is None or not len(ids)):
        raise ValueError(f"importance {method!r} needs text: give --data STEM")
    scores = {n: values.cpu() for n, values in METHODS[method](parent, ids, seed, tick).items()}
    for name, values in scores.items():
        if not values.isfinite().all():
            raise FloatingPointError(f"importance {method!r} of {name} is not finite")
    return scores


def keep_best(block_map: BlockMap, scores: BlockScores, widths: Widths) -> Blueprint:
    """The common blocks and each group's highest scores; of equal ones the first."""
    blueprint = {}
    for group in block_map.groups:
        order = scores[group.name].argsort(descending=True, stable=True).tolist()
        rest = [block for block in order if block not in group.common]
        best = rest[: widths[group.name] - len(group.common)]
        blueprint[group.name] = tuple(sorted([*group.common, *best]))
    return blueprint


def sum_blocks(group: BlockGroup, part: Partition, values: Tensor) -> Tensor:
    """Sums over each block's part of a parameter-shaped tensor: float64 [n_blocks]."""
    rows = values.movedim(part.dim, 0).reshape(part.sections, group.n_blocks, -1)
    return rows.sum((0, 2), dtype=torch.float64)


def _slopes(parent: Parent, ids: Tensor) -> Iterator[dict[str, Tensor]]:
    return slopes.mask_slopes(parent.template, parent.block_map, parent.central, ids)


def _zeros(parent: Parent) -> BlockScores:
    device = parent.central.weights.device
    return {
        group.name: torch.zeros(group.n_blocks, dtype=torch.float64, device=device)
        for group in parent.block_map.groups
    }
