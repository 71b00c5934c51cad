"""Widths that a budget buys: even ones, and ones that go by what each layer's blocks are worth.

Parameters and bytes are spent exactly: the result fits, and one more block anywhere would not.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from ..model.blocks import BlockGroup, BlockMap, Widths, widths_of_ratio
from .budget import Budget
from .cost import Cost

Loss = Callable[[Widths], float]
STEPS = (4, 8)  # the n-th part of a layer's blocks that is taken or added, pass by pass


def uniform_widths(block_map: BlockMap) -> list[Widths]:
    """The same share in all layers, from the fewest blocks to all: each has a kind's block more."""
    shares = sorted(
        {Fraction(k, g.n_blocks) for g in block_map.groups for k in range(1, g.n_blocks + 1)}
    )
    found: list[Widths] = []
    for share in shares:
        widths = {g.name: max(g.least, math.floor(share * g.n_blocks)) for g in block_map.groups}
        if not found or widths != found[-1]:
            found.append(widths)
    return found


def fit(
    budget: Budget,
    block_map: BlockMap,
    cost: Cost,
    legal: list[Widths] | None = None,
    left_out: Sequence[int] = (),
) -> list[Widths]:
    """Even widths that a budget buys; for a latency, which is a measurement, smaller ones follow.

    `legal` are the only ones to choose from (`--stock`); layers `left_out` get no blocks.
    """
    none = {group.name: 0 for group in block_map.groups if group.layer in left_out}
    if budget.kind == "ratio":
        return [widths_of_ratio(block_map, budget.asked) | none]
    uniform = [widths | none for widths in uniform_widths(block_map)]
    if legal is not None:
        legal = [widths | none for widths in legal]
        if budget.kind != "latency":
            return [_least_cut(budget, block_map, cost, legal)]
        uniform = [widths for widths in uniform if widths in legal]
    cost_at = cache(lambda i: cost(uniform[i]))  # a latency is measured, of few widths
    n_within = bisect_right(range(len(uniform)), budget.limit, key=cost_at)
    if n_within == 0:
        raise budget.impossible(cost_at(0))
    if budget.kind == "latency":
        return uniform[:n_within][::-1]
    return [grow_evenly(block_map, uniform[n_within - 1], budget.limit, cost)]


def _least_cut(budget: Budget, block_map: BlockMap, cost: Cost, legal: list[Widths]) -> Widths:
    """Of the legal widths within a budget: the kind that is cut most decides, then all blocks."""
    within = [widths for widths in legal if cost(widths) <= budget.limit]
    if not within:
        raise budget.impossible(min(map(cost, legal)))
    most = block_map.full_widths()

    def kept(widths: Widths) -> tuple[Fraction, int]:
        shares = (Fraction(k, most[name]) for name, k in widths.items() if k)
        return min(shares), sum(widths.values())

    return max(within, key=kept)


def grow(
    widths: Widths, most: Widths, limit: float, cost: Cost, priority: Callable[[str, int], Any]
) -> Widths:
    """Add blocks while any fits: next is the group whose `priority(name, width)` is the smallest.

    A layer that is left out (width 0) stays so.
    """
    widths = dict(widths)
    growing = [name for name, k in widths.items() if 0 < k < most[name]]
    while growing:
        name = min(growing, key=lambda name: priority(name, widths[name]))
        widths[name] += 1
        over = cost(widths) > limit
        widths[name] -= over
        if over or widths[name] == most[name]:  # cost only grows: it will never fit
            growing.remove(name)
    return widths


def grow_evenly(block_map: BlockMap, widths: Widths, limit: float, cost: Cost) -> Widths:
    """Add blocks first where the kept share is smallest, then spread over depth."""
    most = block_map.full_widths()
    # reversed bits put layers in the order 0, 8, 4, 12, 2, ...: any beginning is spread evenly
    place = {g.name: int(f"{g.layer:032b}"[::-1], 2) for g in block_map.groups}
    return grow(widths, most, limit, cost, lambda name, k: (Fraction(k, most[name]), place[name]))


def measured_widths(
    block_map: BlockMap, even: Widths, limit: float, cost: Cost, loss: Loss
) -> Widths:
    """The best measured widths of at most `limit`, found from `even` ones."""
    found = [even]
    for part in STEPS:
        found.append(_spend_anew(block_map, found[-1], part, limit, cost, loss))
    return min(found, key=loss)


def _spend_anew(
    block_map: BlockMap, centre: Widths, part: int, limit: float, cost: Cost, loss: Loss
) -> Widths:
    """From the lowest tried widths up: the block with the most loss saved per cost comes first."""
    stay = [group for group in block_map.groups if centre[group.name]]
    slopes = {group.name: _slopes(group, centre, part, loss) for group in stay}
    low = centre | {name: tried[0] for name, (tried, _, _) in slopes.items()}
    high = centre | {name: tried[-1] for name, (tried, _, _) in slopes.items()}
    spent = cost(low)  # blocks of a layer cost the same, but for a few bytes of a file's header
    price = {n: max(cost(low | {n: low[n] + 1}) - spent, 1e-9) for n in low if low[n] < high[n]}

    def priority(name: str, k: int) -> tuple[float, str]:
        _, below, above = slopes[name]
        return -(below if k < centre[name] else above) / price[name], name

    grown = grow(low, high, limit, cost, priority)
    return grow_evenly(block_map, grown, limit, cost)  # what is left


def _slopes(group: BlockGroup, centre: Widths, part: int, loss: Loss) -> tuple[range, float, float]:
    """Widths to choose from, and what a block is worth below and above the centre."""
    k, step, here = centre[group.name], max(1, group.n_blocks // part), loss(centre)
    low, high = max(group.least, k - step), min(group.n_blocks, k + step)
    below = (loss(centre | {group.name: low}) - here) / (k - low) if low < k else 0.0
    above = (here - loss(centre | {group.name: high})) / (high - k) if high > k else 0.0
    if above > below:  # noise, or a layer that needs many: one slope for all, so that order is kept
        below = above = (below * (k - low) + above * (high - k)) / (high - low)
    return range(low, high + 1), below, above


def linear_latency(block_map: BlockMap, decode_ms: Cost, even: Widths) -> Cost:
    """Milliseconds as a line: those of even widths, and a measured slope for each kind."""
    base, slopes = decode_ms(even), {}
    for kind in block_map.kinds:
        groups = [g for g in block_map.groups if g.kind == kind and even[g.name]]
        n = sum(even[g.name] - g.least for g in groups)
        less = decode_ms(even | {g.name: g.least for g in groups}) if n else 0.0
        # a clock may find less to be slower
        slopes[kind] = max((base - less) / max(1, n), base / 1e4)
    return lambda widths: (
        base + sum(slopes[g.kind] * (widths[g.name] - even[g.name]) for g in block_map.groups)
    )
