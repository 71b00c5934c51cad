"""Masks inside a round: which of the blocks that a worker holds each local step, or sequence, uses.

With `blocks.masks` a worker trains smaller subnets inside its K blocks, so no block gets used to
the same neighbours. A share of the masks are prefixes of one order of blocks, so that tickets cut
along it are trained more than random ones. All draws are pure functions of (seed, round, place).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import BlocksConfig, Method
from .blocks import KINDS, BlockGroup, BlockMap, Blueprint, Widths
from .generator import LAYERS, Order

FIRST_NESTED = 0.75  # most of the masks that follow the order where a worker holds its first K


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

    A mask of width w keeps the common blocks and w - |C| others, times `scale(group, w)`: random
    ones, or, in a share `nested` of all masks, the first of `order` that are held. With
    `blocks.deal = "order"` the worker that holds the first K takes three times that share, and one
    that holds everything takes widths that others cannot. `blocks.mask_depth` drops whole layers in
    the same two ways.
    """
    shape = (turn.n_steps, turn.n_rows)
    name = f"masks/{turn.seed}/{turn.round}/{turn.place}"
    # numpy promises that the numbers of this generator never change
    random = np.random.RandomState(list(hashlib.sha256(name.encode()).digest()))
    by_order, widths = blocks.deal == "order", block_map.widths(held)
    is_cut = widths != block_map.full_widths()
    first = by_order and is_cut and held == prefixes(block_map, order, widths)
    along = blocks.nested
    if first:
        along = max(along, min(FIRST_NESTED, 3 * along))
    nested = random.random_sample(shape) < along
    steps = turn.round * turn.n_steps + np.arange(turn.n_steps)
    at = (steps + turn.place)[:, None] * turn.n_rows + np.arange(turn.n_rows)  # in the lists
    if by_order and (wide := _wide(blocks, block_map, held)):
        at = np.array(wide)[at % len(wide)]
    pieces = []
    for group in block_map.groups:
        mine = held[group.name]
        keys = random.random_sample((*shape, group.n_blocks))
        if blocks.nested > 0:
            ranks = np.argsort(order[group.name])  # [block]: its place in the order
            keys = np.where(nested[..., None], ranks / group.n_blocks, keys)
        keys[..., list(group.common)] = -1.0
        usual = blocks.k(group.kind) if method == "dropout" else (len(mine),)
        sizes = np.minimum(blocks.mask(group.kind) or usual, len(mine))
        factors = np.array([scale(group, int(w)) for w in sizes])
        place = keys[..., mine].argsort(-1, kind="stable").argsort(-1)  # 0 is kept first
        pick = at % len(sizes)
        pieces.append((place < sizes[pick][..., None]) * factors[pick][..., None])
    if any(blocks.mask_depth):
        layers = block_map.layers
        keys = random.random_sample((*shape, len(layers)))
        if blocks.nested > 0:
            ranked = layer_order(block_map, order) or layers
            ranks = np.array([ranked.index(layer) for layer in layers])
            keys = np.where(nested[..., None], ranks / len(layers), keys)
        n_kept = len(layers) - np.array(blocks.mask_depth)[at % len(blocks.mask_depth)]
        stays = keys.argsort(-1).argsort(-1) < n_kept[..., None]  # [steps, rows, layers]
        for i, group in enumerate(block_map.groups):
            pieces[i] = pieces[i] * stays[..., [layers.index(group.layer)]]
    return torch.from_numpy(np.concatenate(pieces, -1))


def _wide(blocks: BlocksConfig, block_map: BlockMap, held: Blueprint) -> list[int]:
    """Places in the lists of widths that smaller workers cannot train, for one that can."""
    whole = {g.kind for g in block_map.groups if len(held[g.name]) == g.n_blocks}
    pairs = {kind: (blocks.mask(kind), min(blocks.k(kind))) for kind in whole}
    return sorted({i for widths, k in pairs.values() for i, w in enumerate(widths) if w > k})


def prefixes(block_map: BlockMap, order: Order, widths: Widths) -> Blueprint:
    """The nested subnet of these widths: common blocks, then the first of each layer's order."""
    nested = {}
    for group in block_map.groups:
        rest = [block for block in order[group.name] if block not in group.common]
        first = rest[: widths[group.name] - len(group.common)]
        nested[group.name] = tuple(sorted([*group.common, *first]))
    return nested


def layer_order(block_map: BlockMap, order: Order) -> tuple[int, ...]:
    """The layers that are cut, those to keep longest first; empty where they have no order."""
    found = order.get(LAYERS, ())
    return found if tuple(sorted(found)) == block_map.layers else ()


def check(block_map: BlockMap, blocks: BlocksConfig, method: Method) -> None:
    """Refuse masks that no subnet can have."""
    cut = block_map.kinds
    for kind in cut:
        n_blocks, least = block_map.n_blocks(kind), max(1, len(blocks.common(kind)))
        if bad := [width for width in blocks.mask(kind) if not least <= width <= n_blocks]:
            legal = f"a mask keeps {least}..{n_blocks} {kind} blocks"
            raise ValueError(f"blocks.mask_{kind} = {bad[0]}: {legal}")
    given = {f"blocks.mask_{kind}": list(blocks.mask(kind)) for kind in cut if blocks.mask(kind)}
    if blocks.mask_depth:
        given["blocks.mask_depth"] = list(blocks.mask_depth)
    if any(blocks.mask_depth):
        n_cut = len(block_map.layers)
        most = n_cut - (blocks.shared_first + blocks.shared_last == 0)
        said = f"blocks.mask_depth = {max(blocks.mask_depth)}"
        if max(blocks.mask_depth) > most:
            raise ValueError(f"{said}: a mask drops 0..{most} of {n_cut} layers that are cut")
        if len(cut) < len(KINDS) or blocks.common_attn or blocks.common_ffn:
            raise ValueError(f"{said} needs blocks.setting = 'both' and no common blocks")
    if len({len(widths) for widths in given.values()}) > 1:
        both = " and ".join(f"{name} = {widths}" for name, widths in given.items())
        raise ValueError(f"{both}: give all as many numbers, since a mask takes one of each")
    if blocks.masks != "round" and method == "twist" and not given:
        keys = " or ".join(f"blocks.mask_{kind}" for kind in cut)
        raise ValueError(f"blocks.masks = {blocks.masks!r} needs the widths of the masks: {keys}")
    if blocks.masks == "round" and method == "twist" and (given or blocks.nested):
        name, value = next(iter(given.items()), ("blocks.nested", blocks.nested))
        raise ValueError(f"{name} = {value} needs blocks.masks = 'step' or 'sequence'")
    if blocks.deal == "order" and not blocks.nested:
        raise ValueError("blocks.deal = 'order' needs an order of blocks: blocks.nested above 0")
