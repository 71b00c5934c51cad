"""(3) The dispatcher: blueprint -> one contiguous buffer -> seat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Blueprint
from .central import Central
from .cluster import Cluster
from .flat import Layout, Runs, gather_, holders


@dataclass(frozen=True)
class Parcel:
    """What one worker gets: its subnet's buffer, and where its blocks lie in the central one.

    Here the buffer is still part of the central one and is cut into the seat itself; what came over
    the wire is cut already.
    """

    worker: int
    blueprint: Blueprint
    layout: Layout
    index: Tensor  # its blocks' runs in the central buffer
    source: Tensor  # [rows, n_subnet], or [rows, n_params] of the central model
    runs: Runs

    @property
    def rows(self) -> int:
        return self.source.shape[0]

    def unpack_(self, out: Tensor, low: Tensor | None = None) -> None:
        """Fill `out` [rows, n_subnet], and `low` [n_subnet] with its weights, rounded."""
        if self.source.shape[1] == self.runs.full.n_params:
            gather_(out, self.source, self.runs, self.index, low)
            return
        out.copy_(self.source)
        if low is not None:
            low.copy_(out[0])


def cut(central: Central, blueprint: Blueprint, rows: int | None = None) -> Tensor:
    """A subnet's buffer out of the central one (its first `rows` rows)."""
    source = central.buffer[:rows]
    index = central.runs.index(blueprint)
    n_params = central.layout.n_shared + index.numel() * central.runs.grain
    out = torch.empty(source.shape[0], n_params, dtype=source.dtype, device=source.device)
    return gather_(out, source, central.runs, index)


@dataclass(frozen=True)
class Deal:
    """What follows from a round's number alone: who holds what."""

    round: int
    blueprints: list[Blueprint]
    indices: list[Tensor]  # each worker's `Runs.index`
    holders: Tensor


def prepare(runs: Runs, round: int, blueprints: list[Blueprint]) -> Deal:
    indices = [runs.index(blueprint) for blueprint in blueprints]
    return Deal(round, blueprints, indices, holders(runs, blueprints))


def dispatch(
    central: Central | None,
    runs: Runs,
    deal: Deal,
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
                cluster.post(rank, cut(central, deal.blueprints[worker]))
    for worker in cluster.workers:
        blueprint = deal.blueprints[worker]
        where = runs.full.narrowed(runs.block_map, runs.block_map.widths(blueprint))
        if central is not None:
            source = central.buffer
        else:
            source = cluster.receive(0, (rows, where.n_params), dtype)
        yield Parcel(worker, blueprint, where, deal.indices[worker], source, runs)
