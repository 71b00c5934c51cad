"""One-shot repair of a ticket: blocks that stay take over what removed ones wrote, no gradients.

Per output projection: x = its inputs when the layer is whole, kept blocks S, y = W x + b:

  bias     s W_S x_S + b'            b' = the best constant
  rescale  sum_b a_b W_b x_b + b'    one factor per kept block in place of the activation scale s
  lstsq    W' x_S + b'               all weights of the projection

Each minimises the mean of |y - y'|^2 over the calibration tokens in closed form, and the ticket
without repair is among the candidates. Inputs of a layer come from the repaired layers before it.
A projection without bias keeps none, and its factors and weights are fitted without b'.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..model.blocks import Blueprint, positions
from ..model.subnet import build
from ..tickets.parent import Parent, recut
from .walk import Linear, Tick, linears, walk_

DAMP = 1e-4  # of the mean square input: weights that the data say nothing about stay as they are


# Each of these makes the new weights [out, kept inputs] of one output projection, in float64, from
#   whole    its weights [out, in]
#   moments  [in, in]: mean of x x^T; where there is a bias of (x - mean)(x - mean)^T
#   kept     inputs of the kept blocks, by block: [K, inputs of a block]
#   start    the ticket's weights without repair


def rescale(whole: Tensor, moments: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    """Weights by factors a = M^+ v: M_bc = mean <W_b x_b, W_c x_c>, v_b = mean <W_b x_b, W x>."""
    products = whole.T @ whole * moments  # [in, in]: of what single inputs write
    rows = products[kept].sum(1)  # [K, in]
    factors = torch.linalg.pinv(rows[:, kept].sum(2), hermitian=True) @ rows.sum(1)
    return whole[:, kept.flatten()] * factors.repeat_interleave(kept.shape[1])


def lstsq(whole: Tensor, moments: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    """min |W x - W' x_S|^2 + damp |W' - start|^2: no worse than `start`."""
    at = kept.flatten()
    normal, goal = moments[at][:, at], whole @ moments[at].T
    damp = DAMP * normal.diagonal().mean()
    normal.diagonal().add_(damp)
    return torch.linalg.solve(normal, (goal + damp * start).T).T


METHODS: dict[str, Callable[..., Tensor]] = {  # `baselines.REPAIRS`
    "bias": lambda whole, moments, kept, start: start,  # the bias alone is fitted
    "rescale": rescale,
    "lstsq": lstsq,
}


def repair_parent(
    parent: Parent, blueprint: Blueprint, how: str, ids: Tensor, tick: Tick = lambda: None
) -> Parent:
    """A parent whose ticket `blueprint` is the repaired one; its scale is in the weights (`none`).

    `ids` [n_sequences, seq_len] is the calibration text. Other tickets of it mean nothing.
    """
    block_map = parent.block_map
    factors = parent.scales(block_map.widths(blueprint))
    new = recut(parent, parent.cfg.blocks.setting).central
    model = build(parent.template, block_map, new.layout, new.weights).model
    outs = [m for m in linears(model, block_map) if m.param == block_map[m.group].out[0]]

    def repair_(alike: list[Linear], mean: Tensor) -> None:
        if not mean.isfinite().all():
            raise ValueError(f"what the model feeds into {alike[0].param} is not finite")
        mean = mean / mean[-1, -1]
        for linear in alike:
            group, weight = block_map[linear.group], linear.weight(model)
            if len(blueprint[group.name]) == group.n_blocks:
                continue  # a whole layer lacks nothing
            moments, centre = mean[:-1, :-1], mean[:-1, -1]
            if len(group.out) > 1:  # the best constant takes the means out of everything else
                moments = moments - centre[:, None] * centre
            part, blocks, whole = group.out_part, blueprint[group.name], weight.double()
            at = positions(group, part, blocks).view(part.sections, len(blocks), part.chunk)
            kept = at.movedim(1, 0).flatten(1).to(mean.device)
            at = kept.flatten()
            fitted = METHODS[how](whole, moments, kept, factors[group.name] * whole[:, at])
            if len(group.out) > 1:
                bias = model.get_parameter(group.out[1]).detach()
                bias += whole @ centre - fitted @ centre[at]
            weight.zero_()
            weight[:, at] = fitted.to(weight.dtype)

    walk_(model, outs, ids, _observe, repair_, tick)
    train = replace(parent.cfg.train, scale="none")
    return replace(parent, central=new, cfg=replace(parent.cfg, train=train), means={})


def _observe(inputs: Tensor) -> Tensor:
    """Sums over tokens of z z^T with z = (x, 1), float64 [in + 1, in + 1]."""
    z = torch.nn.functional.pad(inputs.double(), (0, 1), value=1.0)
    return z.T @ z
