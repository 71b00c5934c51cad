"""(5) The aggregator: the mean over those who held a parameter, then the outer optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .central import Central
from .flat import scatter_add_


@dataclass(frozen=True)
class Stats:
    """What a worker tells about its local steps."""

    loss_sum: float
    n_steps: int
    n_tokens: int

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.loss_sum + other.loss_sum,
            self.n_steps + other.n_steps,
            self.n_tokens + other.n_tokens,
        )


@dataclass(frozen=True)
class Result:
    """What came back from one worker."""

    worker: int
    buffer: Tensor  # [rows, n_subnet]
    index: Tensor  # its blocks' places in the central buffer
    stats: Stats


def aggregate_(
    central: Central, results: Iterable[Result], outer: tuple[float, float] | None = None
) -> Stats:
    """Set every central parameter (and moment) to the mean of the copies that came back.

    Copies are added in the order of `results`, which is worker order everywhere, so one process and
    many give the same bits. A parameter that nobody held keeps weight, moments and outer momentum.
    """
    total = torch.zeros_like(central.buffer)
    n_shared = central.layout.n_shared
    count = torch.zeros_like(central.weights)
    stats = Stats(0.0, 0, 0)
    for result in results:
        for row, part in zip(total, result.buffer, strict=True):
            scatter_add_(row, part, n_shared, result.index)
        scatter_add_(count, torch.ones_like(result.buffer[0]), n_shared, result.index)
        stats += result.stats
    held = count > 0
    total.div_(count.clamp_(min=1))
    if outer is not None:
        assert central.velocity is not None
        total[0] = nesterov_(central.weights, total[0], central.velocity, held, *outer)
    torch.where(held, total, central.buffer, out=central.buffer)
    return stats


def nesterov_(
    old: Tensor, mean: Tensor, velocity: Tensor, held: Tensor, lr: float, momentum: float
) -> Tensor:
    """One outer step on the pseudo-gradient g = old - mean: u = mu*u + g, new = old - lr*(g + mu*u).

    Written as a correction of the mean, so that lr = 1, momentum = 0 is the mean bit for bit.
    """
    gradient = old - mean
    torch.where(held, momentum * velocity + gradient, velocity, out=velocity)
    return mean + ((1 - lr) * gradient - lr * momentum * velocity)
