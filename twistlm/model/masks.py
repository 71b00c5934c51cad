"""Masks inside a round: which of the blocks that a worker holds each local step, or sequence, uses.

A worker holds its K blocks for a round; with `blocks.masks` it trains smaller subnets inside them,
so no block gets used to the same neighbours. A share of the masks are prefixes of one order of
blocks, so that tickets cut along this order are trained more than random ones. All draws are pure
functions of (seed, round, place).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import BlocksConfig, Method
from .blocks import KINDS, BlockGroup, BlockMap, Blueprint, Widths
from .generator import Order

FIRST_NESTED = 0.75  # share of masks along the order of a worker that holds its first K


@dataclass(frozen=True)
class WorkerRound:
    """Whose masks, and how many: one worker's local steps of one round."""

    seed: int
    round: int
    place: int  # of the worker among all S
    n_steps: int
    n_rows: int  # masks in a step: one for each sequence, or one for all


def draw(
    block_map: BlockMap,
    held: Blueprint,
    blocks: BlocksConfig,
    turn: WorkerRound,
    order: Order,
    method: Method,
    scale: Callable[[BlockGroup, int], float],
) -> Tensor:
    """Factors for all gates of a subnet: float64 [n_steps, n_rows, held blocks of all groups].

    A mask of width w keeps the common blocks and w - |C| others: random ones, or, in a share
    `nested` of all masks, the first of `order` that are held. `scale(group, w)` is what kept ones
    are multiplied by. With `blocks.deal = "order"` the worker that holds the first K takes more of
    its masks along the order, and one that holds everything takes widths that others cannot.
    """
    shape = (turn.n_steps, turn.n_rows)
    name = f"masks/{turn.seed}/{turn.round}/{turn.place}"
    # numpy promises that the numbers of this generator never change
    random = np.random.RandomState(list(hashlib.sha256(name.encode()).digest()))
    by_order = blocks.deal == "order"
    first = by_order and _holds_first(block_map, held, order)
    nested = random.random_sample(shape) < (FIRST_NESTED if first else blocks.nested)
    steps = turn.round * turn.n_steps + np.arange(turn.n_steps)
    at = (steps + turn.place)[:, None] * turn.n_rows + np.arange(turn.n_rows)  # in `sizes`
    pieces = []
    for group in block_map.groups:
        mine = held[group.name]
        keys = random.random_sample((*shape, group.n_blocks))
        if blocks.nested > 0:
            ranks = np.argsort(order[group.name])  # [block]: its place in the order
            keys = np.where(nested[..., None], ranks / group.n_blocks, keys)
        keys[..., list(group.common)] = -1.0
        usual = blocks.k(group.kind) if method == "dropout" else (len(mine),)
        sizes = np.array(blocks.mask(group.kind) or usual)
        if by_order and len(mine) == group.n_blocks and any(sizes > min(blocks.k(group.kind))):
            sizes = sizes[sizes > min(blocks.k(group.kind))]  # what smaller workers cannot train
        sizes = np.minimum(sizes, len(mine))
        factors = np.array([scale(group, int(w)) for w in sizes])
        place = keys[..., mine].argsort(-1, kind="stable").argsort(-1)  # 0 is kept first
        pick = at % len(sizes)
        pieces.append((place < sizes[pick][..., None]) * factors[pick][..., None])
    return torch.from_numpy(np.concatenate(pieces, -1))


def _holds_first(block_map: BlockMap, held: Blueprint, order: Order) -> bool:
    """Whether a worker holds the first K of the order, and not everything."""
    widths = block_map.widths(held)
    return widths != block_map.full_widths() and held == prefixes(block_map, order, widths)


def prefixes(block_map: BlockMap, order: Order, widths: Widths) -> Blueprint:
    """The nested subnet of these widths: common blocks, then the first of each layer's order."""
    nested = {}
    for group in block_map.groups:
        rest = [block for block in order[group.name] if block not in group.common]
        first = rest[: widths[group.name] - len(group.common)]
        nested[group.name] = tuple(sorted([*group.common, *first]))
    return nested


def check(block_map: BlockMap, blocks: BlocksConfig, method: Method) -> None:
    """Refuse masks that no subnet can have."""
    cut = [kind for kind in KINDS if block_map.n_blocks(kind)]
    for kind in cut:
        n_blocks, least = block_map.n_blocks(kind), max(1, len(blocks.common(kind)))
        if bad := [width for width in blocks.mask(kind) if not least <= width <= n_blocks]:
            raise ValueError(
                f"blocks.mask_{kind} = {bad[0]}: a mask keeps {least}..{n_blocks} {kind} blocks"
            )
    given = {f"blocks.mask_{kind}": list(blocks.mask(kind)) for kind in cut if blocks.mask(kind)}
    if len({len(widths) for widths in given.values()}) > 1:
        both = " and ".join(f"{name} = {widths}" for name, widths in given.items())
        raise ValueError(f"{both}: give both as many widths, since a mask takes a pair of them")
    if blocks.masks != "round" and method == "twist" and not given:
        keys = " or ".join(f"blocks.mask_{kind}" for kind in cut)
        raise ValueError(f"blocks.masks = {blocks.masks!r} needs the widths of the masks: {keys}")
    if blocks.masks == "round" and method == "twist" and (given or blocks.nested):
        name, value = next(iter(given.items()), ("blocks.nested", blocks.nested))
        raise ValueError(f"{name} = {value} needs blocks.masks = 'step' or 'sequence'")
    if blocks.deal == "order" and not blocks.nested:
        raise ValueError("blocks.deal = 'order' needs an order of blocks: blocks.nested above 0")
