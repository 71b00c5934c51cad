"""(3) The dispatcher: blueprint -> one contiguous buffer -> trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.blocks import Blueprint
from ..model.central import Central
from ..model.layout import Layout, Segments, gather_, holders
from ..system.device import BufferPool


@dataclass(frozen=True)
class SubnetBuffer:
    """What one worker gets: its subnet's buffer, and where its blocks lie in the central one.

    Here the buffer is still part of the central one and is cut into the trainer itself; what came over
    the wire is cut already.
    """

    worker: int
    blueprint: Blueprint
    layout: Layout
    index: Tensor  # its blocks' segments in the central buffer
    source: Tensor  # [rows, n_subnet], or [rows, n_params] of the central model
    segments: Segments

    @property
    def rows(self) -> int:
        return self.source.shape[0]

    def unpack_(self, out: Tensor, low: Tensor | None = None) -> None:
        """Fill `out` [rows, n_subnet], and `low` [n_subnet] with its weights, rounded."""
        if self.source.shape[1] == self.segments.full.n_params:
            gather_(out, self.source, self.segments, self.index, low)
            return
        out.copy_(self.source)
        if low is not None:
            low.copy_(out[0])


def cut(
    central: Central,
    blueprint: Blueprint,
    rows: int | None = None,
    buffers: BufferPool | None = None,
) -> Tensor:
    """A subnet's buffer out of the central one (its first `rows` rows), in memory that may be reused."""
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
class Deal:
    """What follows from a round's number alone: who holds what."""

    round: int
    blueprints: list[Blueprint]
    indices: list[Tensor]  # each worker's `Segments.index`
    holders: Tensor


def prepare(segments: Segments, round: int, blueprints: list[Blueprint]) -> Deal:
    indices = [segments.index(blueprint) for blueprint in blueprints]
    return Deal(round, blueprints, indices, holders(segments, blueprints))


def subnet_buffer(deal: Deal, worker: int, segments: Segments, source: Tensor) -> SubnetBuffer:
    """A worker's part out of the central buffer, or out of what came over the wire."""
    blueprint = deal.blueprints[worker]
    where = segments.full.narrowed(segments.block_map, segments.block_map.widths(blueprint))
    return SubnetBuffer(worker, blueprint, where, deal.indices[worker], source, segments)
