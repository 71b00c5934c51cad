"""One parent's perplexities: whole, and what is left of it at every size by every way."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor

from ...baselines.methods import METHODS, prune_, sparsities
from ...compute.attention import causal_
from ...compute.perplexity import Text, perplexity, summarize
from ...compute.slopes import order_of
from ...compute.speed import now
from ...config import Setting
from ...model.blocks import Blueprint, widths_of_ratio
from ...model.masks import Order, prefixes
from ...tickets import NEEDS_TEXT, importance
from ...tickets.parent import Parent, recut
from ...tickets.ticket_scale import TicketScales, random_tickets, score_tickets
from .cells import RANDOM, SCORES, WHOLE

Result = dict[str, Any]


class Sweep:
    """A parent at hand: it is cut once for a setting, and its blocks are scored once.

    Perplexities are of `text`, scales of tickets are chosen on `choice`. `calibrate` reads the
    sequences [n, seq_len] that scores and pruners go by; `seed` draws random tickets and scores.
    """

    def __init__(
        self,
        parent: Parent,
        text: Text,
        choice: Text | None,
        precision: str | None = None,
        calibrate: Callable[[], Tensor | None] = lambda: None,
        seed: int = 0,
    ):
        self.parent, self.seed = parent, seed
        self.seconds: dict[str, float] = {}  # that scores took, by importance
        self._texts, self._calibrate = (text, choice, precision), calibrate
        self._cut: tuple[Setting, TicketScales] | None = None
        self._orders: dict[str, Order] = {}  # of the parent's blocks, by importance

    @cached_property
    def ids(self) -> Tensor | None:
        return self._calibrate()

    def cut(self, setting: Setting) -> TicketScales:
        """The parent in a setting, ready to be evaluated; the setting before makes room."""
        if self._cut is None or self._cut[0] != setting:
            self._cut = None
            self._cut = setting, TicketScales(recut(self.parent, setting), *self._texts)
        return self._cut[1]

    def order(self, name: str) -> Order:
        """The parent's blocks by an importance, the best first."""
        if name not in self._orders:
            device = self.parent.central.weights.device
            began, ids = now(device), self.ids if name in NEEDS_TEXT else None
            self._orders[name] = order_of(importance.score(self.parent, name, ids, self.seed))
            self.seconds[name] = now(device) - began
        return self._orders[name]

    def tickets(
        self, what: str, setting: Setting, ratio: str, n: int = 0
    ) -> tuple[list[Blueprint], list[Blueprint]]:
        """n random tickets and others that their scale is chosen on; else the one that is picked:
        by a score, or the first blocks of the parent's own order.
        """
        block_map = self.cut(setting).parent.block_map
        widths = widths_of_ratio(block_map, ratio)
        if what == RANDOM:
            return random_tickets(block_map, widths, n=n, seed=self.seed)
        name = SCORES.get(what)
        order = self.order(name) if name else self.parent.progress.order
        return [prefixes(block_map, order, widths)], []

    def measure(
        self, what: str, setting: Setting, ratio: str = "", n: int = 0
    ) -> tuple[Result, float]:
        """Perplexities of the parent, or of what is left of it; seconds of pruning.

        Single weights are pruned to a sparsity of 1 - ratio, exactly.
        """
        cut = self.cut(setting)
        ready, parent = cut.ready, cut.parent
        if what == WHOLE:
            return one(ready.full_perplexity()), 0.0
        if what not in METHODS:
            return score_tickets(cut, *self.tickets(what, setting, ratio, n)), 0.0
        model = parent.whole(parent.central.weights.clone()).model
        causal_(model)
        ids = self.ids if METHODS[what].observe else None
        began = now(model.device)
        prune_(model, parent.block_map, METHODS[what], sparsities(parent.block_map, ratio), ids)
        seconds = now(model.device) - began
        return one(perplexity(model, ready.text, ready.precision, ready.loss)), seconds


def one(value: float) -> Result:
    """A single perplexity, as points store it."""
    return {"values": [value], **summarize([value])}
