"""The central model: weights, moments and outer momentum as flat buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import BlockMap, Shapes, State
from .layout import Layout, Segments, cut_segments, layout

ROWS = ("weights", "m", "v")


@dataclass
class Central:
    """Lives as long as the run; `aggregator` alone changes `buffer` and `velocity`."""

    segments: Segments
    buffer: Tensor  # [rows, n_params]: weights, and with carried moments Adam's m and v
    velocity: Tensor | None  # [n_params]: the outer optimizer's momentum
    sums: Tensor | None = None  # [rows, n_params]: the aggregator's scratch, kept between rounds

    @property
    def layout(self) -> Layout:
        return self.segments.full

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
    return Central(cut_segments(where, block_map, device), buffer, velocity)
