"""The central model: weights, moments and outer momentum as flat buffers, and what a run remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data.leases import Leases
from .blocks import BlockMap, Shapes, State
from .generator import Held
from .layout import Layout, Runs, layout, runs
from .subnet import Rho

ROWS = ("weights", "m", "v")


@dataclass
class Central:
    """Lives as long as the run; `aggregator` alone changes `buffer` and `velocity`."""

    runs: Runs
    buffer: Tensor  # [rows, n_params]: weights, and with carried moments Adam's m and v
    velocity: Tensor | None  # [n_params]: the outer optimizer's momentum
    held: Held
    rho: Rho = field(default_factory=dict)
    round: int = 0  # rounds done
    leases: Leases = field(default_factory=Leases)  # the data of these rounds
    sums: Tensor | None = None  # [rows, n_params]: the aggregator's scratch, kept between rounds

    @property
    def layout(self) -> Layout:
        return self.runs.full

    @property
    def weights(self) -> Tensor:
        return self.buffer[0]


def create(
    params: State,
    shapes: Shapes,
    block_map: BlockMap,
    *,
    carry: bool,
    outer: bool,
    device: torch.device,
) -> Central:
    """A central model that starts from `params`, with zero moments."""
    where = layout(block_map, shapes)
    dtype = next(iter(params.values())).dtype
    buffer = torch.zeros(len(ROWS) if carry else 1, where.n_params, dtype=dtype, device=device)
    for name, view in where.views(buffer[0]).items():
        view.copy_(params[name].detach())
    velocity = torch.zeros_like(buffer[0]) if outer else None
    held = {group.name: [0] * group.n_blocks for group in block_map.groups}
    return Central(runs(where, block_map, device), buffer, velocity, held)
