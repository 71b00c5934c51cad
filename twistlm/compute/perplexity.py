"""Perplexity of the full model, of one subnet, and of n random subnets."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..config import RunConfig
from ..data.token_file import TokenFile
from ..model import generator
from ..model.blocks import BlockMap, Blueprint, count, widths_of_ratio
from ..model.central import Central, cut_subnet
from ..model.depth import with_all_layers
from ..model.huggingface import Model
from ..model.layout import Layout
from ..model.masks import Order, prefixes
from ..model.subnet import Gates, Means, Rho, Subnet, add_means_, build, scales
from ..system.device import autocast, to_device
from .attention import causal_
from .loss import Loss, loss_for


@dataclass(frozen=True)
class Spread:
    ratio: str
    n_params: int
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def __str__(self) -> str:
        """`mean ± sd (worst)`; a single subnet has a mean alone."""
        mean, sd, worst, _ = summarize(self.values).values()
        return f"{mean:.2f}" if sd is None else f"{mean:.2f} ± {sd:.2f} ({worst:.2f})"


def summarize(values: Sequence[float]) -> dict[str, float | int | None]:
    """What tables show of perplexities."""
    n, sd = len(values), statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "worst": max(values), "n": n}


@dataclass(frozen=True)
class Text:
    """What perplexity is measured on: `max_tokens` tokens (0: all) in non-overlapping windows."""

    file: TokenFile
    seq_len: int
    max_tokens: int = 0
    batch: int = 16
    first: int = 0  # the window that it begins with

    @property
    def n_sequences(self) -> int:
        n = self.file.n_sequences(self.seq_len) - self.first
        return min(n, max(1, self.max_tokens // self.seq_len)) if self.max_tokens else n

    @property
    def n_tokens(self) -> int:
        return self.n_sequences * self.seq_len


@torch.no_grad()
def perplexity(
    model: Model, text: Text, precision: str = "auto", loss: Loss | None = None
) -> float:
    """exp of the mean next-token loss over all windows (seq_len - 1 predictions in each)."""
    device, loss = model.device, loss or loss_for(model)
    precision = precision if model.dtype == torch.float32 else "float32"  # it is rounded already
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, text.n_sequences, text.batch):
        rows = list(range(first, min(first + text.batch, text.n_sequences)))
        windows = [text.first + row for row in rows]
        ids = to_device(text.file.sequences(windows, text.seq_len), device)
        with autocast(precision, device):
            total += loss(model, ids).double() * len(rows)
    return math.exp(min(float(total) / text.n_sequences, 700.0))  # exp overflows beyond 709


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a central model, as it is now, and subnets of it: one model per width, refilled."""

    template: Model
    block_map: BlockMap
    central: Central
    text: Text
    scale: str  # `train.scale`
    precision: str = "auto"
    rho: Rho = field(default_factory=dict)  # for the measured scale
    means: Means = field(default_factory=dict)  # of absent blocks, which output biases make up for
    device: torch.device | None = None  # for copies, where the central model is elsewhere
    models: dict[tuple[int, ...], tuple[Subnet, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def loss(self) -> Loss:
        return loss_for(self.full.model)  # where the weights are: a GPU tries it in no time

    def _model(
        self, key: tuple[int, ...], where: Layout, gates: Gates = "cut"
    ) -> tuple[Subnet, torch.Tensor]:
        """The model of these widths, built once, and the memory that its weights lie in."""
        if key not in self.models:
            own = self.central.weights
            if key or self.device is not None:
                own = torch.empty(where.n_params, dtype=own.dtype, device=self.device or own.device)
            made = build(self.template, self.block_map, where, own, gates=gates)
            causal_(made.model)
            self.models[key] = made, own
        return self.models[key]

    @property
    def full(self) -> Subnet:
        """The whole model over the central weights."""
        whole, weights = self._model((), self.central.layout)
        if self.device is not None:
            weights.copy_(self.central.weights)
        return whole

    def full_perplexity(self) -> float:
        """The full model, with no mask and no scale."""
        return perplexity(self.full.model, self.text, self.precision, self.loss)

    def refill_(self, blueprint: Blueprint) -> Subnet:
        """A physical subnet as it is now, scaled; the next call with equal widths overwrites it."""
        self.block_map.check_blueprint(blueprint)
        widths = self.block_map.widths(blueprint)
        key, factors = tuple(widths.values()), scales(self.block_map, widths, self.scale, self.rho)
        blueprint = with_all_layers(blueprint)
        where = self.central.layout.narrowed(self.block_map, self.block_map.widths(blueprint))
        subnet, weights = self._model(key, where, "cut" if all(key) else "all")
        weights.copy_(cut_subnet(self.central, blueprint, 1)[0])
        subnet.keep_(blueprint, factors)
        add_means_(where.views(weights), self.block_map, blueprint, factors, self.means)
        return subnet

    def subnet_perplexity(self, blueprint: Blueprint) -> float:
        """A subnet, scaled."""
        return perplexity(self.refill_(blueprint).model, self.text, self.precision, self.loss)

    def all_sizes(
        self, ratios: Sequence[str], n: int, seed: int, order: Order, tick: Callable[[], None]
    ) -> tuple[float, list[Spread], list[float]]:
        """The full model, n random subnets of each ratio, and with an order a nested one of each.

        `tick` follows the full model and every random subnet.
        """
        widths = {ratio: widths_of_ratio(self.block_map, ratio) for ratio in ratios}
        full, spreads, nested = self.full_perplexity(), [], []
        tick()
        for ratio, each in widths.items():
            values = []
            for blueprint in generator.draws(self.block_map, each, seed=seed, n=n):
                values.append(self.subnet_perplexity(blueprint))
                tick()
            n_params = count(self.block_map, self.central.layout.shapes, each)
            spreads.append(Spread(ratio, n_params, tuple(values)))
            if order:
                nested.append(self.subnet_perplexity(prefixes(self.block_map, order, each)))
        return full, spreads, nested

    def scores(
        self, cfg: RunConfig, order: Order, tick: Callable[[], None]
    ) -> tuple[dict[str, Any], str]:
        """Perplexities of all sizes while it trains: for metrics, and a line for a person."""
        asked = cfg.eval_ratios, cfg.eval_n, cfg.seed
        full, spreads, nested = self.all_sizes(*asked, order, tick)
        scores: dict[str, Any] = {"full": full}
        line = f"perplexity full {full:.2f}"
        for i, spread in enumerate(spreads):
            scores[spread.ratio] = summarize(spread.values)
            line += f"   {spread.ratio} {spread}"
            if nested:
                scores[spread.ratio] |= {"nested": nested[i]}
                line += f" nested {nested[i]:.2f}"
        return scores, line
