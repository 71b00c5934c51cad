"""How a budget is spent: which layers a ticket keeps, and how wide they are.

Even widths come first. Where there is text to measure on, tickets without one layer, without two,
and so on are tried as long as the loss falls, then widths by sensitivity: every layer is tried with
a quarter of its blocks fewer and more, the others as they are. That gives each layer two slopes,
loss per block. The budget is then spent anew, greedily by slope / cost, within the tried range; one
more pass starts from there with half the step. Of all widths that were measured the best are kept,
so that they are never worse than even ones on this text.
"""

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from ..compute import speed
from ..compute.attention import causal_
from ..compute.loss import loss_for
from ..compute.slopes import order_of, order_of_layers
from ..model import depth
from ..model.blocks import KINDS, BlockGroup, BlockMap, Widths, widths_of_ratio
from ..model.families import n_cached
from ..model.generator import for_deployment
from ..model.huggingface import n_positions
from ..model.masks import Order, layer_order, prefixes
from ..system.device import autocast, to_device
from ..system.terminal import console
from . import deploy, importance
from .budget import Budget, Cost, fit, grow, grow_evenly, predicted
from .importance import NESTED, Pick
from .parent import Parent
from .requests import TicketRequest
from .stock import stock_widths
from .text import calibrate_on_tokens

Loss = Callable[[Widths], float]
STEPS = (4, 8)  # the n-th part of a layer's blocks that is taken or added, pass by pass
N_RANDOM = 2  # nested random choices of blocks behind a loss, where blocks are not picked by scores
LONG = 10.0  # seconds of measurement that are announced
PATIENCE = 2  # numbers of layers in a row that are no better: fewer are not tried any more


def choose_widths(
    parent: Parent, request: TicketRequest, budget: Budget, how: Pick, bar: Progress
) -> list[tuple[Widths, dict[str, Any]]]:
    """Widths that the budget buys, each with how it was spent.

    The best come first; smaller ones, for a latency that turns out too long, follow.
    """
    block_map, cost, legal = parent.block_map, cost_of(parent, budget, request.dtype), None
    if request.stock:
        asked = widths_of_ratio(block_map, budget.asked) if budget.kind == "ratio" else None
        legal = stock_widths(parent, asked)
    even = cache(lambda left_out: fit(budget, block_map, cost, legal, left_out))

    def evenly(found: list[Widths]) -> list[tuple[Widths, dict[str, Any]]]:
        return [(each, {"how": "even"}) for each in found]

    measures = budget.kind != "ratio" and not request.stock and request.spend == "measured"
    tries_depth = measures and request.layers is None and not why_whole(parent)
    layers = tuple(sorted({group.layer for group in block_map.groups}))
    order, n_left_out = layer_order(block_map, parent.progress.order), _n_left_out(parent, request)
    first: list[Widths] = []
    refused = None
    if order or not n_left_out:  # nothing has to be measured to know which layers stay
        try:
            first = even(order[len(order) - n_left_out :])
        except ValueError as error:
            if not tries_depth:
                raise
            refused = error
            even(layers[1:])  # too large with a single one, too?
        if first and (not measures or first[0] == block_map.full_widths()):
            return evenly(first)
    try:
        ids = calibrate_on_tokens(parent, request.data, request.tokens, request.seed).ids
    except ValueError as error:
        if not first:
            raise refused or error from None
        console.print(f"the budget is spent evenly: {error}")
        return evenly(first)
    if not order and (tries_depth or n_left_out):
        order = order_of_layers(parent.template, block_map, parent.central, ids)
    n_losses = 2 * len(STEPS) * (1 + 2 * len(block_map.groups)) + len(layers)  # at most
    task = bar.add_task("sensitivity", total=n_losses, note="")
    orders = orders_for(parent, how, ids, request.seed)
    loss = loss_on(parent, ids, orders, lambda x: bar.update(task, advance=1, note=f"loss {x:.3f}"))
    began = time.monotonic()
    loss(first[0] if first else block_map.full_widths())
    if (seconds := n_losses * (time.monotonic() - began)) > LONG:
        console.print(
            f"measuring what each layer is worth: up to {n_losses} losses, about {seconds:.0f} s; "
            "--spend even needs none of them, fewer --tokens less time"
        )
    best, worse = first, 0  # how many layers stay: fewer of them, as long as the loss falls
    numbers = range(len(layers)) if tries_depth else range(n_left_out, n_left_out + 1)
    for n in numbers:
        try:
            tried = even(order[len(order) - n :])
        except ValueError:  # too large still
            if n == numbers[-1] and not best:
                raise
            continue
        if not best or loss(tried[0]) < loss(best[0]):
            best, worse = tried, 0
        elif best is not tried and (worse := worse + 1) == PATIENCE:
            break
    if not measures:
        return evenly(best)
    found = []  # how wide each of them is
    for tried in (first, best) if first and best is not first else (best,):
        price = predicted(block_map, cost, tried[0]) if budget.kind == "latency" else cost
        widths = measured_widths(block_map, tried[0], budget.limit, price, loss)
        found.append((widths, tried))
    bar.update(task, completed=n_losses)
    widths, tried = min(found, key=lambda each: loss(each[0]))
    spent = {"loss": loss(widths), "loss_of_even_widths": loss((first or best)[0])}
    return [
        (widths, {"how": "measured", **spent}),
        *evenly([each for each in tried if each != widths]),
    ]


def cost_of(parent: Parent, budget: Budget, dtype: str) -> Cost:
    """Parameters, bytes or ms of a ticket."""
    block_map, template = parent.block_map, parent.template
    if budget.context > (most := n_positions(template)):
        raise ValueError(f"--context {budget.context}: {parent.source} has {most} positions")

    def cost(widths: Widths) -> float:
        if budget.kind == "latency":
            some = for_deployment(block_map, widths, seed=0)  # any blocks: equal shapes
            model = deploy.cut_ticket(parent, some).to(getattr(torch, dtype))
            return speed.measure_all([model])[0].decode_ms
        shapes = block_map.narrowed(parent.central.layout.shapes, widths)
        if budget.kind == "size":  # a file holds names, too
            shapes = depth.renumbered(template, shapes)
        return budget.count(shapes, dtype, partial(n_cached, template))

    return cost


def why_whole(parent: Parent) -> str:
    """Why no layer of a parent can be left out; empty if it can."""
    if {group.kind for group in parent.block_map.groups} != set(KINDS):
        return "one kind of layer is not cut (blocks.setting = 'both' cuts both)"
    if any(group.common for group in parent.block_map.groups):
        return "its common blocks stay in every ticket"
    try:
        depth.check(parent.template, ())
    except ValueError as error:
        return str(error)
    return ""


def _n_left_out(parent: Parent, request: TicketRequest) -> int:
    """How many layers `--layers` leaves out."""
    n_layers = parent.template.config.num_hidden_layers
    asked = n_layers if request.layers is None else request.layers
    n_cut = len({group.layer for group in parent.block_map.groups})
    least = n_layers - n_cut + 1
    if not least <= asked <= n_layers:
        raise ValueError(
            f"--layers {asked}: {parent.source} has {n_layers}, of which {n_cut} are cut; legal "
            f"are {least}..{n_layers}"
        )
    if asked < n_layers and (why := why_whole(parent)):
        raise ValueError(f"--layers {asked}: {why}")
    return n_layers - asked


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
    prices = {g.name: _slopes(g, centre, part, loss) for g in stay}
    low = centre | {name: tried[0] for name, (tried, _, _) in prices.items()}
    high = centre | {name: tried[-1] for name, (tried, _, _) in prices.items()}
    spent = cost(low)  # blocks of a layer cost the same, but for a few bytes of a file's header
    each = {n: max(cost(low | {n: low[n] + 1}) - spent, 1e-9) for n in low if low[n] < high[n]}

    def turn(name: str, k: int) -> tuple[float, str]:
        _, below, above = prices[name]
        return -(below if k < centre[name] else above) / each[name], name

    grown = grow(low, high, limit, cost, turn)
    return grow_evenly(block_map, grown, limit, cost)  # what is left


def _slopes(group: BlockGroup, centre: Widths, part: int, loss: Loss) -> tuple[range, float, float]:
    """Widths to choose from, and what a block is worth below and above the centre."""
    k, step, here = centre[group.name], max(1, group.n_blocks // part), loss(centre)
    low, high = max(group.least, k - step), min(group.n_blocks, k + step)
    below = (loss(centre | {group.name: low}) - here) / (k - low) if low < k else 0.0
    above = (here - loss(centre | {group.name: high})) / (high - k) if high > k else 0.0
    if above > below:  # noise, or a layer that needs many: one price for all, so that order is kept
        below = above = (below * (k - low) + above * (high - k)) / (high - low)
    return range(low, high + 1), below, above


def loss_on(
    parent: Parent, ids: Tensor, orders: list[Order], tick: Callable[[float], None]
) -> Loss:
    """The mean loss of a parent's subnets on text `ids`, by widths; each is measured once.

    Blocks are kept by `orders`: a wider subnet holds all blocks of a narrower one.
    """
    block_map, precision = parent.block_map, parent.cfg.train.precision
    masked, loss = parent.whole(gates="all"), loss_for(parent.template)
    model, device = masked.model, masked.model.device
    causal_(model)

    @cache
    @torch.no_grad()
    def measure(kept: tuple[int, ...]) -> float:
        widths, total = dict(zip(block_map.full_widths(), kept, strict=True)), 0.0
        for order in orders:
            masked.keep_(prefixes(block_map, order, widths), parent.scales(widths))
            for batch in ids.split(16):
                with autocast(precision, device):
                    total += float(loss(model, to_device(batch, device))) * len(batch)
        found = total / len(ids) / len(orders)
        tick(found)
        return found

    return lambda widths: measure(tuple(widths.values()))


def orders_for(parent: Parent, how: Pick, ids: Tensor, seed: int) -> list[Order]:
    """Orders of blocks that a pick goes by: the parent's own, by score, or random ones."""
    if how == NESTED:
        return [parent.progress.order]
    methods = [how.method] if how.method else ["random"] * N_RANDOM
    scores = (importance.score(parent, m, ids, seed + i) for i, m in enumerate(methods))
    return [order_of(each) for each in scores]
