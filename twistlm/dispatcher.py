"""(3) The dispatcher: blueprint -> one contiguous buffer -> seat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import BlockMap, Blueprint
from .central import Central
from .cluster import Cluster
from .flat import Layout, block_index, gather_


@dataclass(frozen=True)
class Parcel:
    """What one worker gets: its subnet's buffer, and where its blocks lie in the central one."""

    worker: int
    blueprint: Blueprint
    layout: Layout
    buffer: Tensor  # [rows, n_subnet]
    index: Tensor


def cut(
    central: Central, block_map: BlockMap, blueprint: Blueprint, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """A subnet's buffer out of the central one (its first `rows` rows), and the index of its blocks."""
    source = central.buffer[:rows]
    index = block_index(central.layout, block_map, blueprint, source.device)
    shape = (source.shape[0], central.layout.n_shared + index.numel())
    buffer = torch.empty(shape, dtype=source.dtype, device=source.device)
    for part, row in zip(buffer, source, strict=True):
        gather_(part, row, central.layout.n_shared, index)
    return buffer, index


def dispatch(
    central: Central | None,
    full: Layout,
    block_map: BlockMap,
    blueprints: list[Blueprint],
    cluster: Cluster,
    rows: int,
    dtype: torch.dtype,
) -> Iterator[Parcel]:
    """Send every remote worker its buffer, then yield this rank's own parcels one by one.

    All remote buffers have been cut before the first local one is yielded: a central seat trains the
    central weights in place.
    """
    seating = cluster.seating
    if central is not None:
        for worker, rank in enumerate(seating.ranks):
            if rank != cluster.rank:
                cluster.post(rank, cut(central, block_map, blueprints[worker])[0])
    for worker in cluster.workers:
        blueprint = blueprints[worker]
        where = full.narrowed(block_map, block_map.widths(blueprint))
        if central is not None:
            buffer, index = cut(central, block_map, blueprint)
        else:
            buffer = cluster.receive(0, (rows, where.n_params), dtype)
            index = block_index(full, block_map, blueprint, cluster.device)
        yield Parcel(worker, blueprint, where, buffer, index)
