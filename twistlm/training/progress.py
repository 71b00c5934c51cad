"""Where a run stands: the small numbers that change together with the weights, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..data.stream import Leases
from ..model.blocks import BlockMap
from ..model.generator import Held
from ..model.masks import Order
from ..model.subnet import Rho
from ..transport.ranks import Cluster


@dataclass(frozen=True)
class Progress:
    """The state of a run after a committed round, beside the central tensors.

    A round makes a new one from it; who keeps the old one can go back to it.
    """

    round: int = 0  # rounds done
    leases: Leases = field(default_factory=Leases)  # which sequences these rounds have trained
    held: Held = field(default_factory=dict)  # how often each block was dealt
    rho: Rho = field(default_factory=dict)  # per layer, where `train.scale` is measured
    order: Order = field(default_factory=dict)  # of each layer's blocks, where masks are nested
    teacher: str = ""  # a name of its weights, where there is one


def beginning(block_map: BlockMap) -> Progress:
    """No round done, nothing dealt."""
    return Progress(held={group.name: (0,) * group.n_blocks for group in block_map.groups})


def share(progress: Progress, block_map: BlockMap, cluster: Cluster) -> Progress:
    """The central rank's progress on every rank; rho and skipped sequences stay there."""
    counts = [float(count) for group in block_map.groups for count in progress.held[group.name]]
    leases = progress.leases
    values = cluster.broadcast([progress.round, leases.next, len(leases.returned), *counts])
    done, next_, n_returned = (int(value) for value in values[:3])
    returned = [float(place) for place in leases.returned] or [0.0] * n_returned
    if returned:
        returned = cluster.broadcast(returned)
    rest = iter(values[3:])
    held = {
        group.name: tuple(int(next(rest)) for _ in range(group.n_blocks))
        for group in block_map.groups
    }
    ledger = replace(leases, next=next_, returned=tuple(int(place) for place in returned))
    order = _share_order(progress, block_map, cluster)
    return replace(progress, round=done, leases=ledger, held=held, order=order)


def _share_order(progress: Progress, block_map: BlockMap, cluster: Cluster) -> Order:
    """The central rank's order of blocks, where it has one."""
    ranked = [progress.order.get(g.name, (-1,) * g.n_blocks) for g in block_map.groups]
    values = iter(cluster.broadcast([float(block) for blocks in ranked for block in blocks]))
    order = {g.name: tuple(int(next(values)) for _ in range(g.n_blocks)) for g in block_map.groups}
    return order if all(block >= 0 for blocks in order.values() for block in blocks) else {}
