"""The controls: data parallel, plain or with structured dropout, on the same batches."""

from dataclasses import replace

import numpy as np
import torch

from ...data.stream import Slot
from ...model.central import SubnetBuffer
from ...system.device import to_device
from ..aggregator import Stats
from ..assignments import Outcome, Traffic, drawn_gates, measured_rho, take
from ..run import Progress, Run
from ..worker import learning_rate
from .engine import Engine


class DataParallel(Engine):
    """Every step takes the mean gradient over all workers' batches, on whole models.

    With structured dropout (`train.method = "dropout"`) a fresh random mask is drawn for each step,
    the same for all workers, or, with `blocks.masks = "sequence"`, for every sequence: then it is
    the synchronous twin of workers that hold the whole model.
    """

    def __init__(self, run: Run, progress: Progress):
        super().__init__(run, progress)
        self.drops = run.cfg.train.method == "dropout"
        self.trainer = run.trainers.get(run.cut.full, "physical", fresh=self.drops)
        source = run.cluster.broadcast_(self.trainer.buffer)  # the central one's is the model
        block_map = run.cut.block_map
        part = SubnetBuffer(run.cut.segments, block_map.full(), source)
        gates = torch.ones(1, 1, sum(block_map.full_widths().values()))
        self.trainer.load(part, gates, run.schedule_round(progress) * run.cfg.train.interval)

    def round(self, progress: Progress) -> Outcome:
        """`interval` steps of everyone together, on the central rank in the central model."""
        run, t, n_ranks = self.run, self.run.cfg.train, self.run.cluster.world_size
        if run.central is not None:
            run.central.before_change()
        rho = measured_rho(run, progress) if self.drops else progress.rho
        slots, ids, after = take(run, progress, t.interval * t.n_workers)
        if self.drops:  # as workers that hold all blocks draw them
            full, every = run.cut.block_map.full(), run.cfg.blocks.masks == "sequence"
            mine = run.cluster.workers if every else [0]
            gates = [drawn_gates(run, progress, full, worker, rho) for worker in mine]
            self.trainer.gate(torch.cat(gates, 1))
        stats = self._steps(run.schedule_round(progress), slots, ids)
        if n_ranks > 1:  # ranks must agree; one alone waits for no GPU here
            self.share(Stats())
        # a ring scatters the sums and gathers them again: in each half every one of n workers
        # passes on (n - 1) / n of the gradient
        gradient = self.trainer.grad.nbytes
        both = (t.n_workers - 1) * gradient * t.interval
        wired = 2 * (2 * (n_ranks - 1) * gradient // n_ranks) * t.interval
        now = replace(progress, round=progress.round + 1, leases=after, rho=rho)
        return Outcome(stats, Traffic(both, both, wired), now)

    def _steps(self, round: int, slots: tuple[Slot, ...], ids: np.ndarray) -> Stats:
        """A rank's workers are one larger batch: that is data parallel in one process."""
        run, trainer, t, cluster = self.run, self.trainer, self.run.cfg.train, self.run.cluster
        trainer.losses.zero_()
        mine = cluster.workers
        for i in range(t.interval):
            taken = [i * t.n_workers + worker for worker in mine]
            tokens = torch.from_numpy(ids[taken].astype(np.int64)).flatten(0, 1)
            topk = run.batches.teacher_topk(tuple(place for j in taken for place in slots[j]))
            topk = None if topk is None else to_device(topk, trainer.device)
            trainer.backward(to_device(tokens, trainer.device), len(mine) / t.n_workers, topk)
            cluster.sum_(trainer.grad)
            trainer.apply(learning_rate(t, round * t.interval + i, run.total_steps))
        losses = cluster.sum_(trainer.losses * len(mine))
        n_steps = t.interval * t.n_workers
        return Stats(losses, n_steps, n_steps * run.batches.batch * run.batches.seq_len)
