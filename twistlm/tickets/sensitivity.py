"""Widths by measured sensitivity: blocks stay where losing them would cost the most loss.

From widths that spend a budget evenly, every layer is tried with a quarter of its blocks fewer and
more, the others as they are. That gives each layer two slopes, loss per block. The budget is then
spent anew, greedily by slope / cost, within the tried range; one more pass starts from there with
half the step. Of all widths that were measured the best are kept, so that they are never worse than
even ones on this text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compute.attention import causal_
from ..compute.loss import loss_for
from ..model.blocks import BlockGroup, BlockMap, Blueprint, Widths
from ..model.subnet import add_means_, build
from ..system.device import autocast, to_device
from . import budget, importance
from .parent import Parent
from .pick import NESTED, Pick

Cost = Callable[[Widths], float]
Loss = Callable[[Widths], float]
STEPS = (4, 8)  # the n-th part of a layer's blocks that is taken or added, pass by pass
N_RANDOM = 2  # nested random choices of blocks behind a loss, where blocks are not picked by scores


@dataclass(frozen=True)
class MeasuredWidths:
    """What a budget bought, and the mean loss of even and of these widths on the text."""

    widths: Widths
    even: float
    loss: float

    def to_dict(self) -> dict[str, Any]:
        return {"how": "measured", "loss": self.loss, "loss_of_even_widths": self.even}


def measured_widths(
    block_map: BlockMap, even: Widths, limit: float, cost: Cost, loss: Loss
) -> MeasuredWidths:
    """The best measured widths of at most `limit`, found from `even` ones."""
    best = even
    found = {_key(even): loss(even)}
    centre = even
    for part in STEPS:
        prices: dict[str, tuple[range, float, float]] = {}  # range, loss per block below and above
        here = found[_key(centre)]
        for group in block_map.groups:
            prices[group.name] = _slopes(group, centre, here, part, loss)
        centre = _greedy(block_map, centre, prices, limit, cost)
        if _key(centre) not in found:
            found[_key(centre)] = loss(centre)
        if found[_key(centre)] < found[_key(best)]:
            best = centre
    return MeasuredWidths(best, found[_key(even)], found[_key(best)])


def n_losses(block_map: BlockMap) -> int:
    """How many losses `measured_widths` measures, at most."""
    return 1 + len(STEPS) * (1 + 2 * len(block_map.groups))


def _slopes(
    group: BlockGroup, centre: Widths, here: float, part: int, loss: Loss
) -> tuple[range, float, float]:
    """Widths to choose from, and what a block is worth below and above the centre."""
    k, step = centre[group.name], max(1, group.n_blocks // part)
    low, high = max(group.least, k - step), min(group.n_blocks, k + step)
    below = (loss(centre | {group.name: low}) - here) / (k - low) if low < k else 0.0
    above = (here - loss(centre | {group.name: high})) / (high - k) if high > k else 0.0
    if above > below:  # noise, or a layer that needs many: one price for all, so that order is kept
        below = above = (below * (k - low) + above * (high - k)) / (high - low)
    return range(low, high + 1), below, above


def _greedy(
    block_map: BlockMap,
    centre: Widths,
    prices: dict[str, tuple[range, float, float]],
    limit: float,
    cost: Cost,
) -> Widths:
    """From the lowest widths up: the block with the most loss saved per cost, while it fits."""
    widths = {name: tried[0] for name, (tried, _, _) in prices.items()}
    growing = {name for name, (tried, _, _) in prices.items() if len(tried) > 1}
    spent = cost(widths)  # blocks of a layer cost the same, but for a few bytes of a file's header
    costs = {n: max(cost(widths | {n: widths[n] + 1}) - spent, 1e-9) for n in growing}

    def worth(name: str) -> float:
        _, below, above = prices[name]
        return (below if widths[name] < centre[name] else above) / costs[name]

    while growing:
        name = max(sorted(growing), key=worth)
        if cost(widths | {name: widths[name] + 1}) > limit:
            growing.remove(name)
            continue
        widths[name] += 1
        if widths[name] == prices[name][0][-1]:
            growing.remove(name)
    return budget.add_blocks(block_map, widths, limit, cost)  # what is left


class Sensitivity:
    """The mean loss of a parent's subnets on text: one masked model serves all widths."""

    def __init__(self, parent: Parent, ids: Tensor, scores: list[importance.BlockScores]):
        self.parent, self.ids, self.scores = parent, ids, scores
        central = parent.central
        self._weights = central.weights.clone() if parent.means else central.weights
        self._masked = build(
            parent.template, parent.block_map, central.layout, self._weights, gates="all"
        )
        causal_(self._masked.model)
        self._loss = loss_for(parent.template)

    def loss(self, widths: Widths) -> float:
        """Of nested choices: a wider subnet holds all blocks of a narrower one."""
        blueprints = [importance.keep_best(self.parent.block_map, s, widths) for s in self.scores]
        return sum(map(self._of, blueprints)) / len(blueprints)

    @torch.no_grad()
    def _of(self, blueprint: Blueprint) -> float:
        parent, central = self.parent, self.parent.central
        factors = parent.scales(parent.block_map.widths(blueprint))
        self._masked.keep_(blueprint, factors)
        if parent.means:
            self._weights.copy_(central.weights)
            views = central.layout.views(self._weights)
            add_means_(views, parent.block_map, blueprint, factors, parent.means)
        total, device = 0.0, self._weights.device
        for batch in self.ids.split(16):
            with autocast(parent.cfg.train.precision, device):
                found = self._loss(self._masked.model, to_device(batch, device))
            total += float(found) * len(batch)
        return total / len(self.ids)


def scores_for(parent: Parent, how: Pick, ids: Tensor, seed: int) -> list[importance.BlockScores]:
    """Orders of blocks that a pick goes by: the parent's own, scores, or random ones."""
    if how == NESTED:
        order = parent.progress.order
        return [{name: -torch.tensor(blocks).argsort().double() for name, blocks in order.items()}]
    if how.method is not None:
        return [importance.score(parent, how.method, ids, seed)]
    return [importance.uniform(parent, None, seed + i, lambda: None) for i in range(N_RANDOM)]


def _key(widths: Widths) -> tuple[int, ...]:
    return tuple(widths.values())
