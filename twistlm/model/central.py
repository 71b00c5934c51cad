"""The central model: weights, moments and outer momentum as flat buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..system.device import BufferPool
from .blocks import BlockMap, Blueprint, Shapes, State
from .layout import Layout, Segments, cut_segments, gather_, layout

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


def cut_subnet(
    central: Central,
    blueprint: Blueprint,
    rows: int | None = None,
    buffers: BufferPool | None = None,
) -> Tensor:
    """A subnet's buffer out of the central one (its first `rows` rows); `buffers` are reused."""
    source = central.buffer[:rows]
    index = central.segments.index(blueprint)
    n_params = central.layout.n_shared + index.numel() * central.segments.grain
    shape = (source.shape[0], n_params)
    if buffers is not None and source.device.type == "cpu":
        place = buffers.get("down", math.prod(shape) * source.element_size())
        return gather_(place.view(source.dtype).view(shape), source, central.segments, index)
    out = torch.empty(shape, dtype=source.dtype, device=source.device)
    return gather_(out, source, central.segments, index)


@dataclass(frozen=True)
class SubnetBuffer:
    """A worker's weights and moments on their way to its trainer.

    `source` is the subnet's own buffer, as it came over a wire, or the central one it is cut from.
    """

    worker: int
    blueprint: Blueprint
    layout: Layout
    index: Tensor  # its blocks' segments in the central buffer
    source: Tensor  # [rows, n_subnet] or [rows, n_params]
    segments: Segments

    @property
    def rows(self) -> int:
        return self.source.shape[0]

    def copy_to_(self, out: Tensor, low: Tensor | None = None) -> None:
        """Fill `out` [rows, n_subnet], and `low` [n_subnet] with its weights, rounded."""
        if self.source.shape[1] == self.segments.full.n_params:
            gather_(out, self.source, self.segments, self.index, low)
            return
        out.copy_(self.source)
        if low is not None:
            low.copy_(out[0])


def subnet_buffer(
    segments: Segments,
    worker: int,
    blueprint: Blueprint,
    source: Tensor,
    index: Tensor | None = None,
) -> SubnetBuffer:
    """A worker's subnet out of `source`."""
    where = segments.full.narrowed(segments.block_map, segments.block_map.widths(blueprint))
    index = segments.index(blueprint) if index is None else index
    return SubnetBuffer(worker, blueprint, where, index, source, segments)
