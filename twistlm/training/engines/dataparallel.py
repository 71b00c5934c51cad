"""The controls: data parallel, plain or with structured dropout, over the same workers and batches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...data import stream
from ...data.stream import Slot
from ...model import masks
from ...model.masks import Order, Turn
from ...model.subnet import Rho, scale_of
from ...system.device import to_device
from ...transport.traffic import Bytes, Traffic
from .. import dispatcher
from ..aggregator import Stats
from ..assignments import measured_rho
from ..progress import Progress
from ..run import Run
from ..worker import Seat, learning_rate
from .protocol import Outcome


class DataParallel:
    """Every step takes the mean gradient over all workers' batches; every rank holds the whole model.

    With structured dropout (`train.method = "dropout"`) a fresh random mask is drawn for each step, the
    same for all workers, or, with `blocks.masks = "sequence"`, for every sequence: then it is the synchronous
    twin of workers that hold the whole model.
    """

    is_whole, events = True, None

    def __init__(self, run: Run, progress: Progress):
        self.run, self.drops = run, run.cfg.train.method == "dropout"
        seat = run.seats.new(run.full, "physical", fresh=self.drops)
        source = run.central.buffer if run.central is not None else seat.buffer[: run.rows].clone()
        whole = dispatcher.prepare(run.segments, progress.round, [run.block_map.full()])
        parcel = dispatcher.parcel(whole, 0, run.segments, run.cluster.broadcast_(source))
        whole_gates = torch.ones(1, 1, sum(run.block_map.full_widths().values()))
        seat.load(parcel, whole_gates, progress.round * run.cfg.train.interval)
        self.seat: Seat = seat

    def round(self, progress: Progress) -> Outcome:
        """`interval` steps of everyone together; the central rank's seat is copied back at the end."""
        run, t = self.run, self.run.cfg.train
        rho = measured_rho(run, progress) if self.drops else progress.rho
        slots, after = stream.take(progress.leases, t.interval * t.n_workers, t.batch)
        if self.drops:
            self.seat.gate(self._gates(progress.round, rho, progress.order))
        stats = self._steps(progress.round, slots)
        gradients = run.full.n_params * self.seat.grad.element_size() * t.interval * t.n_workers
        moved = Bytes(shared=gradients)
        traffic = Traffic(moved, moved, 2 * gradients if run.cluster.world_size > 1 else 0)
        now = replace(progress, round=progress.round + 1, leases=after, rho=rho)
        return Outcome(stats, traffic, now)

    def _steps(self, round: int, slots: tuple[Slot, ...]) -> Stats:
        """A rank's workers are one larger batch: that is what data parallel means in one process."""
        run, seat, t, cluster = self.run, self.seat, self.run.cfg.train, self.run.cluster
        seat.losses.zero_()
        first, mine = round * t.interval, cluster.workers
        for i, step in enumerate(range(first, first + t.interval)):
            ids = torch.cat([run.batches.slot(slots[i * t.n_workers + worker]) for worker in mine])
            seat.backward(to_device(ids, seat.device), share=len(mine) / t.n_workers)
            cluster.sum_(seat.grad)
            seat.apply(learning_rate(t, step, run.total_steps))
        losses = cluster.sum_(seat.losses * len(mine))
        if run.central is not None:
            run.central.buffer.copy_(seat.buffer[: run.central.buffer.shape[0]])
        n_steps = t.interval * t.n_workers
        return Stats(losses, n_steps, n_steps * run.batches.batch * run.batches.seq_len)

    def _gates(self, round: int, rho: Rho, order: Order) -> Tensor:
        """The factors of a round's steps: the masks that these workers would draw if they held all blocks."""
        run, t, blocks = self.run, self.run.cfg.train, self.run.cfg.blocks
        factor = scale_of(t.scale, rho)
        rows = masks.n_rows(blocks, t.batch)
        mine = run.cluster.workers if blocks.masks == "sequence" else [0]
        turns = [Turn(run.cfg.run.seed, round, place, t.interval, rows) for place in mine]
        full = run.block_map.full()
        drawn = [
            masks.draw(run.block_map, full, blocks, turn, order, t.method, factor) for turn in turns
        ]
        return torch.cat(drawn, 1)

    def collect_(self) -> None:
        pass

    @property
    def stops(self) -> bool:
        return self.run.stop.wished

    def close(self, crashed: bool) -> None:
        pass
