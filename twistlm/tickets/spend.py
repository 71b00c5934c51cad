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
from functools import cache
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from ..compute import speed
from ..compute.attention import causal_
from ..compute.loss import loss_for
from ..compute.slopes import order_of, order_of_layers
from ..model import depth
from ..model.blocks import KINDS, BlockMap, Widths, widths_of_ratio
from ..model.generator import for_deployment
from ..model.huggingface import n_positions
from ..model.masks import Order, layer_order, prefixes
from ..system.device import autocast, to_device
from ..system.terminal import console
from . import deploy, importance
from .importance import NESTED, Pick
from .parent import Parent
from .requests import Budget, TicketRequest
from .stock import stock_widths
from .text import calibrate_on_tokens
from .widths import STEPS, Cost, LossOfWidths, cost_of, fit, linear_latency, measured_widths

N_RANDOM = 2  # nested random choices of blocks behind a loss, where blocks are not picked by scores
LONG = 10.0  # seconds of measurement that are announced
PATIENCE = 2  # numbers of layers in a row that are no better: fewer are not tried any more

Spent = tuple[Widths, dict[str, Any]]  # widths, and how they came about: as a proof has it
Fits = Callable[[tuple[int, ...]], list[Widths]]  # even widths without these layers, best first


def choose_widths(
    parent: Parent, request: TicketRequest, budget: Budget, how: Pick, bar: Progress
) -> list[Spent]:
    """Widths that the budget buys, each with how it was spent.

    The best come first; smaller ones, for a latency that turns out too long, follow.
    """
    block_map, cost = parent.block_map, ticket_cost(parent, budget, request.dtype)
    legal = None  # all widths
    if request.stock:
        asked = widths_of_ratio(block_map, budget.asked) if budget.kind == "ratio" else None
        legal = stock_widths(parent, asked)
    even: Fits = cache(lambda left_out: fit(budget, block_map, cost, legal, left_out))
    measures = budget.kind != "ratio" and not request.stock and request.spend == "measured"
    tries_depth = measures and request.layers is None and not why_whole(parent)
    order = layer_order(block_map, parent.progress.order)  # of layers; empty: unknown
    n_left_out = _n_left_out(parent, request)
    first: list[Widths] = []  # even ones of the layers asked for; none: unknown yet, or too large
    refused = None
    if order or not n_left_out:  # nothing has to be measured to know which layers stay
        try:
            first = even(order[len(order) - n_left_out :])
        except ValueError as error:
            if not tries_depth:
                raise
            refused = error
            even(block_map.layers[1:])  # too large with a single one, too?
        if first and (not measures or first[0] == block_map.full_widths()):
            return _evenly(first)
    try:
        ids = calibrate_on_tokens(parent, request.data, request.tokens, request.seed).ids
    except ValueError as error:
        if not first:
            raise refused or error from None
        console.print(f"the budget is spent evenly: {error}")
        return _evenly(first)
    n_losses = 2 * len(STEPS) * (1 + 2 * len(block_map.groups)) + len(block_map.layers)  # at most
    if measures:
        task = bar.add_task("sensitivity", total=n_losses, note="")
        orders = orders_for(parent, how, ids, request.seed)

        def tell(x: float) -> None:
            bar.update(task, advance=1, note=f"loss {x:.3f}")

        loss = loss_on(parent, ids, orders, tell)
        _announce(n_losses, lambda: loss(first[0] if first else block_map.full_widths()))
    if not order and (tries_depth or n_left_out):
        order = order_of_layers(parent.template, block_map, parent.central, ids)
    if n_left_out:
        first = even(order[-n_left_out:])
    if not measures:
        return _evenly(first)
    starts = [first] if first else []
    if tries_depth and (shallow := _fewer_layers(first, order, even, loss)) is not first:
        starts.append(shallow)
    spent = _measured(block_map, budget, cost, starts, loss)
    bar.update(task, completed=n_losses)
    return spent


def _measured(
    block_map: BlockMap, budget: Budget, cost: Cost, starts: list[list[Widths]], loss: LossOfWidths
) -> list[Spent]:
    """The measured widths with the lowest loss, found from the best of each list of even ones."""
    found = []
    for even in starts:
        price = linear_latency(block_map, cost, even[0]) if budget.kind == "latency" else cost
        found.append((measured_widths(block_map, even[0], budget.limit, price, loss), even))
    widths, even = min(found, key=lambda each: loss(each[0]))
    losses = {"loss": loss(widths), "loss_of_even_widths": loss(starts[0][0])}
    smaller = [each for each in even if each != widths]
    return [(widths, {"how": "measured", **losses}), *_evenly(smaller)]


def _evenly(found: list[Widths]) -> list[Spent]:
    return [(widths, {"how": "even"}) for widths in found]


def _announce(n_losses: int, measure: Callable[[], float]) -> None:
    """Measure one loss, and say how long all of them take where that is long."""
    began = time.monotonic()
    measure()
    if (seconds := n_losses * (time.monotonic() - began)) > LONG:
        console.print(
            f"measuring what each layer is worth: up to {n_losses} losses, about {seconds:.0f} s; "
            "--spend even needs none of them, fewer --tokens less time"
        )


def _fewer_layers(
    first: list[Widths], order: tuple[int, ...], even: Fits, loss: LossOfWidths
) -> list[Widths]:
    """The best even widths without the last layers of an order: fewer while the loss falls.

    `first` are those of all layers, none where they are too large.
    """
    best, n_worse = first, 0
    for n in range(1 if first else 0, len(order)):
        try:
            tried = even(order[len(order) - n :])
        except ValueError:  # too large still
            if n == len(order) - 1 and not best:
                raise
            continue
        if not best or loss(tried[0]) < loss(best[0]):
            best, n_worse = tried, 0
        elif (n_worse := n_worse + 1) == PATIENCE:
            break
    return best


def ticket_cost(parent: Parent, budget: Budget, dtype: str) -> Cost:
    """What a budget limits, of a parent's ticket of any widths: counted, or measured here."""
    if budget.context > (most := n_positions(parent.template)):
        raise ValueError(f"--context {budget.context}: {parent.source} has {most} positions")

    def decode_ms(widths: Widths) -> float:
        some = for_deployment(parent.block_map, widths, seed=0)  # any blocks: equal shapes
        model = deploy.cut_ticket(parent, some).to(getattr(torch, dtype))
        return speed.measure_all([model])[0].decode_ms

    return cost_of(budget, parent.template, parent.block_map, dtype, decode_ms)


def why_whole(parent: Parent) -> str:
    """Why no layer of a parent can be left out; empty if it can."""
    if parent.block_map.kinds != KINDS:
        return "one kind of layer is not cut (blocks.setting = 'both' cuts both)"
    if any(group.common for group in parent.block_map.groups):
        return "its common blocks stay in every ticket"
    try:
        depth.check(parent.template, ())
    except ValueError as error:
        return str(error)
    return ""


def _n_left_out(parent: Parent, request: TicketRequest) -> int:
    n_layers, n_cut = parent.template.config.num_hidden_layers, len(parent.block_map.layers)
    asked = n_layers if request.layers is None else request.layers
    least = n_layers - n_cut + 1
    if not least <= asked <= n_layers:
        raise ValueError(
            f"--layers {asked}: {parent.source} has {n_layers}, of which {n_cut} are cut; legal "
            f"are {least}..{n_layers}"
        )
    if asked < n_layers and (why := why_whole(parent)):
        raise ValueError(f"--layers {asked}: {why}")
    return n_layers - asked


def loss_on(
    parent: Parent, ids: Tensor, orders: list[Order], tick: Callable[[float], None]
) -> LossOfWidths:
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
