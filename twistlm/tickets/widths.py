"""What widths cost, and those that a budget buys: even ones, or by what blocks are worth.

Parameters and bytes are spent exactly: the result fits, and one more block anywhere would not.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import groupby
from typing import Any

from transformers import PreTrainedModel

from ..model import depth, huggingface
from ..model.blocks import BlockGroup, BlockMap, Shapes, Widths, widths_of_ratio
from ..model.families import n_cached
from .requests import Budget

Cost = Callable[[Widths], float]
LossOfWidths = Callable[[Widths], float]
STEPS = (4, 8)  # the n-th part of a layer's blocks that is taken or added, pass by pass
# in a safetensors file: name and bytes
STORED = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def cost_of(
    budget: Budget, model: PreTrainedModel, block_map: BlockMap, dtype: str, decode_ms: Cost | None
) -> Cost:
    """What a budget limits, of a ticket of any widths: counted, or measured by `decode_ms`."""
    if budget.kind == "latency" and decode_ms is not None:
        return decode_ms
    shapes, n_bytes = huggingface.shapes(model), STORED[dtype][1]

    def cost(widths: Widths) -> int:
        narrow = block_map.narrowed(shapes, widths)
        if budget.kind == "size":  # a file holds names, too
            return weights_bytes(depth.renumbered(model, narrow), dtype)
        n_params = sum(map(math.prod, narrow.values()))
        if budget.kind == "params":
            return n_params
        return n_bytes * (n_params + n_cached(model, narrow, budget.context))

    return cost


def weights_bytes(shapes: Shapes, dtype: str = "float32") -> int:
    """Bytes of a safetensors file of these tensors: 8 + JSON header, padded to 8, + the numbers."""
    name_in_file, itemsize = STORED[dtype]
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):  # the file's own order: it decides how long the offsets are
        start, end = end, end + math.prod(shapes[name]) * itemsize
        header[name] = {"dtype": name_in_file, "shape": shapes[name], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + math.ceil(len(text) / 8) * 8 + end


def uniform_widths(block_map: BlockMap) -> list[Widths]:
    """The same share in all layers, from the fewest blocks to all: each has a kind's block more."""
    groups = block_map.groups
    shares = sorted({Fraction(k + 1, g.n_blocks) for g in groups for k in range(g.n_blocks)})
    each = ({g.name: max(g.least, math.floor(s * g.n_blocks)) for g in groups} for s in shares)
    return [widths for widths, _ in groupby(each)]


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
            if not (within := [widths for widths in legal if cost(widths) <= budget.limit]):
                raise budget.impossible(min(map(cost, legal)))
            # the kind that is cut most decides, then all blocks
            return [max(within, key=lambda w: (_smallest_share(block_map, w), sum(w.values())))]
        uniform = _evenest(block_map, legal)
    cost_at = cache(lambda i: cost(uniform[i]))  # a latency is measured, of few widths
    n_within = bisect_right(range(len(uniform)), budget.limit, key=cost_at)
    if n_within == 0:
        raise budget.impossible(cost_at(0))
    if budget.kind == "latency":
        return uniform[:n_within][::-1]
    return [grow_evenly(block_map, uniform[n_within - 1], budget.limit, cost)]


def _evenest(block_map: BlockMap, legal: list[Widths]) -> list[Widths]:
    """Legal widths from few blocks to all: for each share of the kind that is cut most, the fewest.

    Each is wider than the one before, so that a latency is found in few measurements.
    """
    narrowest: dict[Fraction, Widths] = {}
    for widths in sorted(legal, key=lambda w: -sum(w.values())):
        narrowest[_smallest_share(block_map, widths)] = widths
    return [narrowest[share] for share in sorted(narrowest)]


def _smallest_share(block_map: BlockMap, widths: Widths) -> Fraction:
    """Of the kind that is cut most; layers without blocks do not count."""
    most = block_map.full_widths()
    return min(Fraction(k, most[name]) for name, k in widths.items() if k)


def grow(
    widths: Widths, most: Widths, limit: float, cost: Cost, priority: Callable[[str, int], Any]
) -> Widths:
    """Add blocks while any fits: next is the group whose `priority(name, width)` is the smallest.

    A layer that is left out (width 0) stays so.
    """
    growing = [name for name, k in widths.items() if 0 < k < most[name]]
    while growing:
        name = min(growing, key=lambda name: priority(name, widths[name]))
        wider = widths | {name: widths[name] + 1}
        fits = cost(wider) <= limit
        if fits:
            widths = wider
        if not fits or widths[name] == most[name]:  # cost only grows: it will never fit
            growing.remove(name)
    return widths


def grow_evenly(block_map: BlockMap, widths: Widths, limit: float, cost: Cost) -> Widths:
    """Add blocks first where the kept share is smallest, then spread over depth."""
    most = block_map.full_widths()
    # reversed bits put layers in the order 0, 8, 4, 12, 2, ...: any beginning is spread evenly
    place = {g.name: int(f"{g.layer:032b}"[::-1], 2) for g in block_map.groups}
    return grow(widths, most, limit, cost, lambda name, k: (Fraction(k, most[name]), place[name]))


def measured_widths(
    block_map: BlockMap, even: Widths, limit: float, cost: Cost, loss: LossOfWidths
) -> Widths:
    """The best measured widths of at most `limit`, found from `even` ones."""
    found = [even]
    for part in STEPS:
        found.append(_spend_anew(block_map, found[-1], part, limit, cost, loss))
    return min(found, key=loss)


def _spend_anew(
    block_map: BlockMap, centre: Widths, part: int, limit: float, cost: Cost, loss: LossOfWidths
) -> Widths:
    """From the lowest tried widths up: the block with the most loss saved per cost comes first."""
    stay = [group for group in block_map.groups if centre[group.name]]
    slopes = {group.name: _slopes(group, centre, part, loss) for group in stay}
    low = centre | {name: slope.low for name, slope in slopes.items()}
    high = centre | {name: slope.high for name, slope in slopes.items()}
    spent = cost(low)  # blocks of a layer cost the same, but for a few bytes of a file's header
    price = {n: max(cost(low | {n: low[n] + 1}) - spent, 1e-9) for n in low if low[n] < high[n]}

    def priority(name: str, k: int) -> tuple[float, str]:
        slope = slopes[name]
        return -(slope.below if k < centre[name] else slope.above) / price[name], name

    grown = grow(low, high, limit, cost, priority)
    return grow_evenly(block_map, grown, limit, cost)  # what is left


@dataclass(frozen=True)
class Slopes:
    """The widths of a layer to choose from, and the loss that a block saves below and above k."""

    low: int
    high: int
    below: float
    above: float


def _slopes(group: BlockGroup, centre: Widths, part: int, loss: LossOfWidths) -> Slopes:
    """A layer tried with a part of its blocks fewer, and more, than k, those of the centre."""
    k, step, here = centre[group.name], max(1, group.n_blocks // part), loss(centre)
    low, high = max(group.least, k - step), min(group.n_blocks, k + step)
    below = (loss(centre | {group.name: low}) - here) / (k - low) if low < k else 0.0
    above = (here - loss(centre | {group.name: high})) / (high - k) if high > k else 0.0
    if above > below:  # noise, or a layer that needs many: one slope for all, so that order is kept
        below = above = (below * (k - low) + above * (high - k)) / (high - low)
    return Slopes(low, high, below, above)


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
