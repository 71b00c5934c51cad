"""(5) The aggregator: the mean over those who held a parameter, then the outer optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import TrainConfig
from ..model.central import Central
from ..model.layout import Segments, mean_


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


@dataclass(frozen=True)
class Pool:
    """What `pool_` has to know of the local steps."""

    betas: tuple[float, float]
    n_steps: int


@dataclass(frozen=True)
class Rule:
    """What happens to the mean of the results before it is the central model."""

    outer: tuple[float, float] | None = None  # lr and momentum of the outer optimizer
    pool: Pool | None = None  # where v is freed from the noise of single workers


MEAN = Rule()


def rule_of(t: TrainConfig) -> Rule:
    return Rule(t.nesterov(), Pool(t.betas, t.interval) if t.moments == "pooled" else None)


def aggregate_(
    central: Central, results: Iterable[Result], holders: Tensor, rule: Rule = MEAN
) -> Stats:
    """Set every central parameter (and moment) to the mean of the copies that came back.

    `holders` (of `layout.holders`) is about the workers that bring a result. Copies are added in the order of
    `results`, which is worker order everywhere, so one process and many give the same bits. A
    parameter that nobody held keeps weight, moments and outer momentum.
    """
    if central.sums is None:
        central.sums = torch.empty_like(central.buffer)
    mean = central.buffer if rule.outer is None else central.sums
    segments, stats = central.segments, Stats(0.0, 0, 0)
    if rule.pool is not None:
        before = central.buffer[2].clone()
        squares = torch.zeros(len(segments.block_of), dtype=mean.dtype, device=mean.device)
    for place, result in enumerate(results):
        if rule.pool is not None:
            _square_(squares, result, segments)
        mean_(mean, central.sums, result.buffer, segments, result.index, holders, place)
        stats += result.stats
    if rule.pool is not None:
        pool_(mean[1:], before, squares, holders[segments.block_of, 2], rule.pool)
    if rule.outer is not None:
        assert central.velocity is not None
        held = holders[segments.block_of, 2:] > 0  # [n_segments, 1]
        grain = segments.grain
        old, sums = central.buffer.unflatten(1, (-1, grain)), mean.unflatten(1, (-1, grain))
        sums[0] = nesterov_(old[0], sums[0], central.velocity.view(-1, grain), held, *rule.outer)
        torch.where(held, sums, old, out=old)
    return stats


def _square_(squares: Tensor, result: Result, segments: Segments) -> None:
    """Add the squares of a worker's m to its segments' sums."""
    mine = result.buffer[1].view(-1, segments.grain).square().sum(1)
    n_shared = segments.full.n_shared // segments.grain
    squares[:n_shared] += mine[:n_shared]
    squares.index_add_(0, n_shared + result.index.long(), mine[n_shared:])


def pool_(moments: Tensor, before: Tensor, squares: Tensor, count: Tensor, pool: Pool) -> None:
    """v [row 1 of `moments`, means over n holders] as if these had shared their gradients in every step.

    One worker's squared gradient is mu^2 + s^2, that of n workers' mean gradient is mu^2 + s^2 / n. After h steps from
    one m, those of the workers differ by s^2 (1 - b1)^2 (1 - b1^2h) / (1 - b1^2): so a segment's sum of s^2 is known
    from its sum of `squares` of m over the holders, and what the round has brought to its v shrinks by one
    factor, at least 1 / n. `before`: v at the round's beginning.
    """
    b1, b2 = pool.betas
    grain = moments.shape[1] // len(count)
    m, v = moments.unflatten(1, (-1, grain))
    n = count.to(m.dtype).clamp(min=2)  # of one holder, or none, the noise below is 0
    kept = (1 - b1) ** 2 * (1 - b1 ** (2 * pool.n_steps)) / (1 - b1**2)
    noise = (squares - n * m.square().sum(1)).clamp(min=0) / (n - 1) / kept
    fresh = (v - b2**pool.n_steps * before.view(-1, grain)).clamp(min=0)
    too_much = (1 - b2**pool.n_steps) * (1 - 1 / n) * noise / fresh.sum(1)
    too_much = torch.minimum(too_much.nan_to_num(0.0), 1 - 1 / n)
    v.sub_(fresh * too_much[:, None])


def nesterov_(
    old: Tensor, mean: Tensor, velocity: Tensor, held: Tensor, lr: float, momentum: float
) -> Tensor:
    """One outer step on the pseudo-gradient g = old - mean: u = mu*u + g, new = old - lr*(g + mu*u).

    Written as a correction of the mean, so that lr = 1, momentum = 0 is the mean bit for bit.
    """
    gradient = old - mean
    torch.where(held, momentum * velocity + gradient, velocity, out=velocity)
    return mean + ((1 - lr) * gradient - lr * momentum * velocity)
