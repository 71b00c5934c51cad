"""One-shot repair of a ticket: blocks that stay take over what removed ones wrote, no gradients.

Per output projection: x = its inputs when the layer is whole, kept blocks S, y = W x + b:

  bias     s W_S x_S + b'            b' = the best constant
  rescale  sum_b a_b W_b x_b + b'    one factor per kept block in place of the activation scale s
  lstsq    W' x_S + b'               all weights of the projection

Each minimises the mean of |y - y'|^2 over the calibration tokens in closed form, and the ticket
without repair is among the candidates. Inputs of a layer come from the repaired layers before it.
A projection without bias keeps none, and its factors and weights are fitted without b'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..model.blocks import BlockGroup, Blueprint, positions
from ..model.central import create
from ..model.subnet import build
from ..tickets.parent import Parent
from . import REPAIRS
from .walk import Linear, Tick, linears, walk_

DAMP = 1e-4  # of the mean square input: weights that the data say nothing about stay as they are


@dataclass(frozen=True)
class Fit:
    """One output projection in float64: what is known when it is repaired."""

    whole: Tensor  # [out, in]
    moments: Tensor  # [in, in]: mean of x x^T; where there is a bias of (x - mean)(x - mean)^T
    kept: Tensor  # inputs of the kept blocks, by block: [K, inputs of a block]
    scale: float

    @property
    def at(self) -> Tensor:
        return self.kept.flatten()

    @property
    def start(self) -> Tensor:
        """The ticket's weights without repair: [out, kept inputs]."""
        return self.scale * self.whole[:, self.at]


def same(fit: Fit) -> Tensor:
    """The ticket's own weights: the bias alone is fitted."""
    return fit.start


def rescale(fit: Fit) -> Tensor:
    """Weights by factors a = M^+ v: M_bc = mean <W_b x_b, W_c x_c>, v_b = mean <W_b x_b, W x>."""
    products = fit.whole.T @ fit.whole * fit.moments  # [in, in]: of what single inputs write
    rows = products[fit.kept].sum(1)  # [K, in]
    factors = torch.linalg.pinv(rows[:, fit.kept].sum(2), hermitian=True) @ rows.sum(1)
    return fit.whole[:, fit.at] * factors.repeat_interleave(fit.kept.shape[1])


def lstsq(fit: Fit) -> Tensor:
    """min |W x - W' x_S|^2 + damp |W' - start|^2: no worse than `start`."""
    moments = fit.moments[fit.at]  # [kept inputs, in]
    normal, goal = moments[:, fit.at].clone(), fit.whole @ moments.T
    damp = DAMP * normal.diagonal().mean()
    normal.diagonal().add_(damp)
    return torch.linalg.solve(normal, (goal + damp * fit.start).T).T


METHODS: dict[str, Callable[[Fit], Tensor]] = {  # `baselines.REPAIRS`
    "bias": same,
    "rescale": rescale,
    "lstsq": lstsq,
}


def check_repair(parent: Parent, how: str) -> None:
    """An unknown repair, or one that a family has no place for."""
    if how not in REPAIRS:
        raise ValueError(f"--repair {how!r}: use one of {', '.join(REPAIRS)}")
    if how == "bias" and not any(_has_bias(group) for group in parent.block_map.groups):
        raise ValueError(
            f"--repair bias: no output projection of this {parent.template.config.model_type} "
            "has a bias; use rescale or lstsq"
        )


def repair_parent(
    parent: Parent, blueprint: Blueprint, how: str, ids: Tensor, tick: Tick = lambda: None
) -> Parent:
    """A parent whose ticket `blueprint` is the repaired one; its scale is in the weights (`none`).

    `ids` [n_sequences, seq_len] is the calibration text. Other tickets of it mean nothing.
    """
    check_repair(parent, how)
    block_map, old = parent.block_map, parent.central
    block_map.check_blueprint(blueprint)
    factors = parent.scales(block_map.widths(blueprint))
    new = create(
        old.layout.views(old.weights),
        old.layout.shapes,
        block_map,
        carry=False,
        outer=False,
        device=old.weights.device,
    )
    model = build(parent.template, block_map, new.layout, new.weights).model
    outs = [
        linear
        for linear in linears(model, block_map)
        if linear.param == block_map[linear.group].out[0]
    ]

    def some_(alike: list[Linear], mean: Tensor) -> None:
        if not mean.isfinite().all():
            raise ValueError(f"what the model feeds into {alike[0].param} is not finite")
        for linear in alike:
            group = block_map[linear.group]
            if len(blueprint[group.name]) == group.n_blocks:
                continue  # a whole layer lacks nothing
            bias = model.get_parameter(group.out[1]).detach() if _has_bias(group) else None
            kept = by_block(group, blueprint[group.name]).to(mean.device)
            scale = factors[group.name]
            _repair_(linear.weight(model), bias, mean / mean[-1, -1], kept, scale, how)

    walk_(model, outs, ids, observe, some_, tick)
    train = replace(parent.cfg.train, scale="none")
    return replace(parent, central=new, cfg=replace(parent.cfg, train=train), means={})


def observe(inputs: Tensor) -> Tensor:
    """Sums over tokens of z z^T with z = (x, 1), float64 [in + 1, in + 1]."""
    z = torch.nn.functional.pad(inputs.double(), (0, 1), value=1.0)
    return z.T @ z


def by_block(group: BlockGroup, kept: tuple[int, ...]) -> Tensor:
    """The inputs of the output projection that each kept block feeds: [K, inputs of a block]."""
    part = group.out_part
    at = positions(group, part, kept).view(part.sections, len(kept), part.chunk)
    return at.movedim(1, 0).flatten(1)


def _repair_(
    weight: Tensor,  # [out, in]: repaired where blocks are kept, 0 elsewhere
    bias: Tensor | None,
    mean: Tensor,  # of z z^T
    kept: Tensor,
    scale: float,
    how: str,
) -> None:
    moments, centre = mean[:-1, :-1], mean[:-1, -1]
    if bias is not None:  # the best constant takes the means out of everything else
        moments = moments - centre[:, None] * centre
    fit = Fit(weight.double(), moments, kept, scale)
    new = METHODS[how](fit)
    if bias is not None:
        bias += fit.whole @ centre - new @ centre[fit.at]
    weight.zero_()
    weight[:, fit.at] = new.to(weight.dtype)


def _has_bias(group: BlockGroup) -> bool:
    return len(group.out) > 1
