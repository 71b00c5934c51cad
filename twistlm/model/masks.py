"""Masks inside a round: which of the blocks that a worker holds each local step, or sequence, uses.

With `blocks.masks` a worker trains smaller subnets inside its K blocks, so no block gets used to
the same neighbours. A share of the masks are prefixes of one order of blocks, so that tickets cut
along it are trained more than random ones. All draws are pure functions of (seed, round, worker).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import BlocksConfig, Method
from .blocks import KINDS, BlockGroup, BlockMap, Blueprint, Widths
from .generator import ALONG, LAYERS, Order, first_blocks

FIRST_NESTED = 0.75  # most of the masks that follow the order where a worker holds its first K


@dataclass(frozen=True)
class WorkerRound:
    """Whose masks, and how many: one worker's local steps of one round."""

    seed: int
    round: int
    number: int  # of the worker among all S
    n_steps: int
    n_rows: int  # masks in a step: one for each sequence, or one for all


def draw(
    block_map: BlockMap,
    held: Blueprint,
    blocks: BlocksConfig,
    worker: WorkerRound,
    order: Order,
    method: Method,
    scale: Callable[[BlockGroup, int], float],
) -> Tensor:
    """Factors for all gates of a subnet: float64 [n_steps, n_rows, held blocks of all groups].

    A mask of width w keeps the common blocks and w - |C| others, times `scale(group, w)`: random
    ones, or, in a share `nested` of all masks, the first of `order` that are held.
    `blocks.mask_depth` drops whole layers in the same two ways.
    """
    name = f"masks/{worker.seed}/{worker.round}/{worker.number}"
    # numpy promises that the numbers of this generator never change
    random = np.random.RandomState(list(hashlib.sha256(name.encode()).digest()))
    shape = (worker.n_steps, worker.n_rows)
    is_nested = random.random_sample(shape) < _nested_share(block_map, held, blocks, order)
    entries = _entries(block_map, held, blocks, worker)

    def keys(things: Sequence[int], ordered: Sequence[int]) -> np.ndarray:
        """[steps, rows, things]: a mask keeps the lowest, which are random or follow an order."""
        drawn = random.random_sample((*shape, len(things)))
        ranks = np.array([ordered.index(thing) for thing in things])
        return np.where(is_nested[..., None], ranks / len(things), drawn)

    factors = []
    for group in block_map.groups:
        every, mine = range(group.n_blocks), held[group.name]
        of_blocks = keys(every, order[group.name] if blocks.nested else every)
        of_blocks[..., list(group.common)] = -1.0
        usual = blocks.k(group.kind) if method == "dropout" else (len(mine),)
        widths = np.minimum(blocks.mask(group.kind) or usual, len(mine))
        scales, entry = np.array([scale(group, int(w)) for w in widths]), entries % len(widths)
        kept = _lowest(of_blocks[..., mine], widths[entry])
        factors.append(kept * scales[entry][..., None])
    if any(blocks.mask_depth):
        layers, n_dropped = block_map.layers, np.array(blocks.mask_depth)
        n_kept = len(layers) - n_dropped[entries % len(n_dropped)]
        stays = _lowest(keys(layers, layer_order(block_map, order) or layers), n_kept)
        for i, group in enumerate(block_map.groups):
            factors[i] = factors[i] * stays[..., [layers.index(group.layer)]]
    return torch.from_numpy(np.concatenate(factors, -1))


def _lowest(keys: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Which of the keys [steps, rows, things] are among the n [steps, rows] lowest."""
    return keys.argsort(-1, kind="stable").argsort(-1) < n[..., None]


def _nested_share(
    block_map: BlockMap, held: Blueprint, blocks: BlocksConfig, order: Order
) -> float:
    """The share of a worker's masks that follow the order.

    Along the order a worker that holds the first K takes three times as many.
    """
    share, widths = blocks.nested, block_map.widths(held)
    if blocks.deal not in ALONG or widths == block_map.full_widths():
        return share
    holds_first = held == prefixes(block_map, order, widths)
    return max(share, min(FIRST_NESTED, 3 * share)) if holds_first else share


def _entries(
    block_map: BlockMap, held: Blueprint, blocks: BlocksConfig, worker: WorkerRound
) -> np.ndarray:
    """Which entry of the lists of widths each mask takes, in turn: [steps, rows].

    Along the order a worker that holds everything takes widths that others cannot.
    """
    step = worker.round * worker.n_steps + np.arange(worker.n_steps) + worker.number
    entries = step[:, None] * worker.n_rows + np.arange(worker.n_rows)
    if blocks.deal not in ALONG:
        return entries
    whole = {g.kind for g in block_map.groups if len(held[g.name]) == g.n_blocks}
    lists = [(blocks.mask(kind), min(blocks.k(kind))) for kind in whole]
    wide = sorted({i for widths, k in lists for i, width in enumerate(widths) if width > k})
    return np.array(wide)[entries % len(wide)] if wide else entries


def prefixes(block_map: BlockMap, order: Order, widths: Widths) -> Blueprint:
    """The nested subnet of these widths: common blocks, then the first of each layer's order."""
    return {
        group.name: first_blocks(order[group.name], group.common, widths[group.name])
        for group in block_map.groups
    }


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
    if blocks.deal in ALONG and not blocks.nested:
        raise ValueError(
            f"blocks.deal = {blocks.deal!r} needs an order of blocks: blocks.nested above 0"
        )
