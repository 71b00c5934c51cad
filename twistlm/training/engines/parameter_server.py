"""The parameter server: the central model on rank 0 of torchrun, subnets to the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ...model.central import cut_subnet
from ...transport import wire
from ..aggregator import Result, Stats, aggregate_
from ..assignments import Assignments
from ..run import Progress, Run
from .engine import Engine, Outcome


class ParameterServer(Engine):
    """Every rank deals for itself, so that only weights travel. A death ends the run."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.kind, self.dtype = run.cfg.run.wire, run.cut.dtype
        self._sent: dict[int, Tensor] = {}  # worker -> the centre's copy of what it trains

    def round(self, progress: Progress) -> Outcome:
        """The paper's round: all subnets have left before rank 0 trains its own, if it has one."""
        run, cluster = self.run, self.run.cluster
        work = self.assign(progress)
        before = cluster.n_sent + cluster.n_received
        source = self._dispatch(work)
        trained = [self.train(work, worker, source) for worker in cluster.workers]
        stats = self.share(sum((result.stats for result in trained), Stats(0.0, 0, 0)))
        results = self._gather(work, trained, source)
        if run.central is not None:
            aggregate_(run.central, results, work.deal.holders, run.cfg.train.nesterov())
        wired = cluster.n_sent + cluster.n_received - before
        return Outcome(stats, work.traffic(wired), work.committed())

    def _dispatch(self, work: Assignments) -> Tensor:
        """What this rank's worker is cut from: the central buffer, or what came from it."""
        run, cluster, blueprints = self.run, self.run.cluster, work.deal.blueprints
        sizes = [0] * cluster.world_size
        if run.central is None:
            (mine,) = cluster.workers
            widths = run.block_map.widths(blueprints[mine])
            shape = run.rows, run.full.narrowed(run.block_map, widths).n_params
            sizes[0] = wire.down_bytes(self.kind, shape, self.dtype)
            payload = cluster.exchange(self._nothing(), sizes)()[0]
            return wire.read_down(self.kind, payload, shape, self.dtype)
        down = self._nothing()
        for worker, rank in enumerate(cluster.placement.ranks):
            if rank != 0:
                self._sent[worker] = cut_subnet(run.central, blueprints[worker])
                down[rank] = wire.down(self.kind, self._sent[worker])
        cluster.exchange(down, sizes)()
        return run.central.buffer

    def _gather(self, work: Assignments, trained: list[Result], source: Tensor) -> list[Result]:
        """All results in worker order on the central rank."""
        cluster, ranks = self.run.cluster, self.run.cluster.placement.ranks
        up, sizes = self._nothing(), [0] * cluster.world_size
        if self.run.central is None:
            up[0] = wire.up(self.kind, trained[0].buffer, source[0])
        shapes = {worker: (sent.shape[0], sent.shape[1]) for worker, sent in self._sent.items()}
        for worker, shape in shapes.items():
            sizes[ranks[worker]] = wire.up_bytes(self.kind, shape, self.dtype)
        came = cluster.exchange(up, sizes)()
        for worker, sent in self._sent.items():
            buffer = wire.read_up(self.kind, came[ranks[worker]], shapes[worker], sent[0])
            trained.append(Result(worker, buffer, work.deal.indices[worker], Stats(0.0, 0, 0)))
        return trained

    def _nothing(self) -> list[Tensor]:
        cluster = self.run.cluster
        return [torch.empty(0, dtype=torch.uint8, device=cluster.device)] * cluster.world_size
