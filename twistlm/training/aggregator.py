"""(5) The aggregator: the mean over those who held a parameter, then the outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.central import Central
from ..model.layout import mean_


@dataclass(frozen=True)
class Stats:
    """What a worker tells about its local steps."""

    loss_sum: Tensor | float = 0.0  # stays on the device until the round is over: no sync inside it
    n_steps: int = 0
    n_tokens: int = 0

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.loss_sum + other.loss_sum,
            self.n_steps + other.n_steps,
            self.n_tokens + other.n_tokens,
        )


@dataclass(frozen=True)
class Result:
    """What came back from one worker."""

    buffer: Tensor  # [rows, n_subnet]
    index: Tensor  # its blocks' segments in the central buffer
    stats: Stats = Stats()


@dataclass
class Mean:
    """The mean over those who bring a copy of each central parameter and moment, worker by worker.

    `holders` (of `layout.holders`) is about the workers whose results are added. They come in
    worker order everywhere, so one process and many give the same bits. A parameter that nobody
    held keeps weight, moments and outer momentum.

    Where results are missing, weights and moments go that `share` of the way to the mean: a
    sequence then moves them as far as in a full round, and its noise is no larger.
    """

    central: Central
    holders: Tensor
    outer: tuple[float, float] | None = None
    share: float = 1.0
    n_results: int = 0
    stats: Stats = Stats()

    @property
    def in_place(self) -> bool:
        """The mean is the new state: it is written as soon as a block's last holder came."""
        return self.outer is None and self.share == 1.0

    def add(self, *results: Result) -> Mean:
        """Take in the next workers' results; a buffer is free afterwards."""
        for result in results:
            self.stats += result.stats
            central = self.central
            if result.buffer.data_ptr() == central.buffer.data_ptr():  # it was trained in place
                continue
            sums = central.scratch()[: len(result.buffer)]
            mean = central.buffer if self.in_place else sums
            where = (central.segments, result.index.to(sums.device), self.holders, self.n_results)
            # row by row where the result is moved to the host, which so has one of them twice
            n_rows = len(sums) if result.buffer.device == sums.device else 1
            pieces = (rows.split(n_rows) for rows in (mean, sums, result.buffer))
            for to, total, part in zip(*pieces, strict=True):
                mean_(to, total, part.to(sums.device), *where)
            self.n_results += 1
        return self

    def commit_(self) -> Stats:
        """The central model takes the mean, or the outer optimizer's step towards it."""
        if self.in_place:
            return self.stats
        central, grain = self.central, self.central.segments.grain
        is_held = self.holders[central.segments.block_of, 2:] > 0  # [n_segments, 1]
        old = central.buffer.unflatten(1, (-1, grain))  # [rows, n_segments, grain]
        new = central.scratch()[: len(old)].unflatten(1, (-1, grain))
        if self.share < 1:  # one operation at a time: the same bits in every range
            new.sub_(old).mul_(self.share).add_(old)
        if self.outer is not None:
            velocity = central.velocity.view(-1, grain)
            new[0] = nesterov_(old[0], new[0], velocity, is_held, *self.outer)
        torch.where(is_held, new, old, out=old)
        return self.stats


def nesterov_(
    old: Tensor, mean: Tensor, velocity: Tensor, is_held: Tensor, lr: float, momentum: float
) -> Tensor:
    """One outer step on g = old - mean: u = mu*u + g, new = old - lr*(g + mu*u).

    Written as a correction of the mean, so that lr = 1, momentum = 0 is the mean bit for bit.
    """
    gradient = old - mean
    torch.where(is_held, momentum * velocity + gradient, velocity, out=velocity)
    return mean + ((1 - lr) * gradient - lr * momentum * velocity)
