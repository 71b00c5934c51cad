"""The controls: data parallel, plain or with structured dropout, over the same workers and batches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...data.stream import Slot
from ...model import masks
from ...model.masks import Order, WorkerRound
from ...model.subnet import Rho, scale_of
from ...system.device import to_device
from ...transport.traffic import Bytes, Traffic
from .. import dispatcher
from ..aggregator import Stats
from ..assignments import measured_rho, take
from ..progress import Progress
from ..run import Run
from ..shards import share_stats
from ..worker import LocalTrainer, learning_rate
from .protocol import Outcome


def ring_bytes(n_bytes: int, n_workers: int, world_size: int) -> tuple[int, int]:
    """What an all-reduce of a gradient moves: all workers together per direction, one rank both ways.

    A ring scatters the sums and gathers them again; in each half every one of S workers passes on
    (S - 1) / S of the gradient: 2 (S - 1) M in all.
    """
    each_half = 2 * (world_size - 1) * n_bytes // world_size  # a rank's own links, out and in
    return (n_workers - 1) * n_bytes, 2 * each_half


class DataParallel:
    """Every step takes the mean gradient over all workers' batches; every rank holds the whole model.

    With structured dropout (`train.method = "dropout"`) a fresh random mask is drawn for each step, the
    same for all workers, or, with `blocks.masks = "sequence"`, for every sequence: then it is the synchronous
    twin of workers that hold the whole model.
    """

    is_whole, events = True, None

    def __init__(self, run: Run, progress: Progress):
        self.run, self.drops = run, run.cfg.train.method == "dropout"
        self._told = False  # whether another rank or this one had a signal by the last exchange
        trainer = run.trainers.get(run.full, "physical", fresh=self.drops)
        source = (
            run.central.buffer if run.central is not None else trainer.buffer[: run.rows].clone()
        )
        whole = dispatcher.prepare(run.segments, progress.round, [run.block_map.full()])
        part = dispatcher.subnet_buffer(whole, 0, run.segments, run.cluster.broadcast_(source))
        whole_gates = torch.ones(1, 1, sum(run.block_map.full_widths().values()))
        trainer.load(part, whole_gates, progress.round * run.cfg.train.interval)
        self.trainer: LocalTrainer = trainer

    def round(self, progress: Progress) -> Outcome:
        """`interval` steps of everyone together; the central rank's trainer is copied back at the end."""
        run, t = self.run, self.run.cfg.train
        rho = measured_rho(run, progress) if self.drops else progress.rho
        slots, after = take(run, progress, t.interval * t.n_workers)
        if self.drops:
            self.trainer.gate(self._gates(progress.round, rho, progress.order))
        stats = self._steps(progress.round, slots)
        if run.cluster.world_size > 1:  # ranks must agree; one alone waits for no GPU here
            signal = share_stats(Stats(0.0, 0, 0), run.stop.signal, run.cluster)[1]
            run.stop.signal, self._told = run.stop.signal or signal, signal != 0
        moved, wired = ring_bytes(self.trainer.grad.nbytes, t.n_workers, run.cluster.world_size)
        both = Bytes(shared=moved * t.interval)
        traffic = Traffic(both, both, wired * t.interval)
        now = replace(progress, round=progress.round + 1, leases=after, rho=rho)
        return Outcome(stats, traffic, now)

    def _steps(self, round: int, slots: tuple[Slot, ...]) -> Stats:
        """A rank's workers are one larger batch: that is what data parallel means in one process."""
        run, trainer, t, cluster = self.run, self.trainer, self.run.cfg.train, self.run.cluster
        trainer.losses.zero_()
        first, mine = round * t.interval, cluster.workers
        for i, step in enumerate(range(first, first + t.interval)):
            taken = [slots[i * t.n_workers + worker] for worker in mine]
            batch = tuple(place for slot in taken for place in slot)
            ids, teacher_topk = run.batches.slot(batch), run.batches.teacher_topk(batch)
            teacher_topk = None if teacher_topk is None else to_device(teacher_topk, trainer.device)
            trainer.backward(to_device(ids, trainer.device), len(mine) / t.n_workers, teacher_topk)
            cluster.sum_(trainer.grad)
            trainer.apply(learning_rate(t, step, run.total_steps))
        losses = cluster.sum_(trainer.losses * len(mine))
        if run.central is not None:
            run.central.buffer.copy_(trainer.buffer[: run.central.buffer.shape[0]])
        n_steps = t.interval * t.n_workers
        return Stats(losses, n_steps, n_steps * run.batches.batch * run.batches.seq_len)

    def _gates(self, round: int, rho: Rho, order: Order) -> Tensor:
        """The factors of a round's steps: the masks that these workers would draw if they held all blocks."""
        run, t, blocks = self.run, self.run.cfg.train, self.run.cfg.blocks
        factor = scale_of(t.scale, rho)
        rows = masks.n_rows(blocks, t.batch)
        mine = run.cluster.workers if blocks.masks == "sequence" else [0]
        turns = [WorkerRound(run.cfg.run.seed, round, place, t.interval, rows) for place in mine]
        full = run.block_map.full()
        drawn = [
            masks.draw(run.block_map, full, blocks, turn, order, t.method, factor) for turn in turns
        ]
        return torch.cat(drawn, 1)

    def collect_(self) -> None:
        pass

    @property
    def stops(self) -> bool:
        return self._told if self.run.cluster.world_size > 1 else self.run.stop.requested

    def close(self, crashed: bool) -> None:
        pass
