"""(5) The aggregator: the mean over those who held a parameter, then the outer optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.central import Central
from ..model.layout import mean_


@dataclass(frozen=True)
class Stats:
    """What a worker tells about its local steps."""

    loss_sum: Tensor | float  # stays on the device until the round is over: no sync inside it
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
    index: Tensor  # its blocks' segments in the central buffer
    stats: Stats


def aggregate_(
    central: Central,
    results: Iterable[Result],
    holders: Tensor,
    outer: tuple[float, float] | None = None,
) -> Stats:
    """Set every central parameter (and moment) to the mean of the copies that came back.

    `holders` (of `layout.holders`) is about the workers that bring a result. Copies are added in the order of
    `results`, which is worker order everywhere, so one process and many give the same bits. A
    parameter that nobody held keeps weight, moments and outer momentum.
    """
    if central.sums is None:
        central.sums = torch.empty_like(central.buffer)
    mean = central.buffer if outer is None else central.sums
    stats = Stats(0.0, 0, 0)
    for place, result in enumerate(results):
        mean_(mean, central.sums, result.buffer, central.segments, result.index, holders, place)
        stats += result.stats
    if outer is not None:
        assert central.velocity is not None
        held = holders[central.segments.block_of, 2:] > 0  # [n_segments, 1]
        grain = central.segments.grain
        old, sums = central.buffer.unflatten(1, (-1, grain)), mean.unflatten(1, (-1, grain))
        sums[0] = nesterov_(old[0], sums[0], central.velocity.view(-1, grain), held, *outer)
        torch.where(held, sums, old, out=old)
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
