"""The controls: data parallel, plain or with structured dropout, over the same workers and batches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...config import TrainConfig
from ...data.leases import Slot
from ...data.stream import Batches
from ...model.central import Central
from ...system.device import to_device
from ...transport.ranks import Cluster
from ..aggregator import Stats
from ..worker import Seat, learning_rate


def round_(
    central: Central | None,
    seat: Seat,
    cluster: Cluster,
    batches: Batches,
    slots: tuple[Slot, ...],
    cfg: TrainConfig,
    round: int,
    total_steps: int,
    mask_: Callable[[int], None] = lambda step: None,
) -> Stats:
    """`interval` steps, each with the mean gradient over all workers' batches.

    A rank's workers are one larger batch: that is what data parallel means in one process. Every
    rank holds the full seat; the one on the central rank is copied back at the end. `mask_` is called
    before each step: structured dropout chooses the blocks of all workers there.
    """
    seat.losses.zero_()
    first = round * cfg.interval
    mine = cluster.workers
    for i, step in enumerate(range(first, first + cfg.interval)):
        mask_(step)
        ids = torch.cat([batches.slot(slots[i * cfg.n_workers + worker]) for worker in mine])
        seat.backward(to_device(ids, seat.device), share=len(mine) / cfg.n_workers)
        cluster.sum_(seat.model_grad)  # a masked seat gathers it in `apply`
        seat.apply(learning_rate(cfg, step, total_steps))
    losses = cluster.sum_(seat.losses * len(cluster.workers))
    if central is not None:
        central.buffer.copy_(seat.buffer[: central.buffer.shape[0]])
    n_steps = cfg.interval * cfg.n_workers
    return Stats(losses, n_steps, n_steps * batches.batch * batches.seq_len)
