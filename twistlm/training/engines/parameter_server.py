"""The parameter server engine: torchrun's ranks in one group, the central model on rank 0, subnets to the others and back."""

from __future__ import annotations

import torch
from torch import Tensor

from ...transport import wire
from .. import aggregator, dispatcher
from ..aggregator import Result, Stats
from ..assignments import assign, committed, deal, everyone, measured_rho, traffic, train_here
from ..dispatcher import Deal
from ..progress import Progress
from ..run import Run
from ..shards import share_stats
from .protocol import Outcome


class ParameterServer:
    """Rounds in which every rank deals for itself, so that only weights travel. A death ends the run."""

    is_whole, events = True, None

    def __init__(self, run: Run):
        self.run, self.stops = run, False
        self.kind, self.dtype = run.cfg.run.wire, run.cut.dtype
        self._sent: dict[int, Tensor] = {}  # worker -> the centre's copy of what it trains

    def round(self, progress: Progress) -> Outcome:
        """The paper's round: all subnets have left before rank 0 trains its own, if it has one."""
        run, cluster, present = self.run, self.run.cluster, everyone(self.run)
        rho = measured_rho(run, progress)
        dealt = deal(run, progress, present)
        work = assign(run, progress, dealt, present, rho)
        before = cluster.n_sent + cluster.n_received
        source = self._dispatch(dealt)
        trained = [
            train_here(run, work, i, dispatcher.subnet_buffer(dealt, i, run.segments, source))
            for i in cluster.workers
        ]
        mine = sum((result.stats for result in trained), Stats(0.0, 0, 0))
        stats, signal = share_stats(mine, run.stop.signal, cluster)
        run.stop.signal, self.stops = run.stop.signal or signal, signal != 0
        results = self._gather(dealt, trained, source)
        if run.central is not None:
            aggregator.aggregate_(run.central, results, dealt.holders, run.cfg.train.nesterov())
        after = committed(progress, work.leases, dealt.blueprints, rho)
        wired = cluster.n_sent + cluster.n_received - before
        return Outcome(stats, traffic(run, dealt.blueprints, dealt.blueprints, wired), after)

    def _shape(self, dealt: Deal, worker: int) -> tuple[int, int]:
        widths = self.run.block_map.widths(dealt.blueprints[worker])
        return self.run.rows, self.run.full.narrowed(self.run.block_map, widths).n_params

    def _nothing(self) -> list[Tensor]:
        cluster = self.run.cluster
        return [torch.empty(0, dtype=torch.uint8, device=cluster.device)] * cluster.world_size

    def _dispatch(self, dealt: Deal) -> Tensor:
        """What this rank's worker is cut from: the central buffer, or what came from it."""
        run, cluster, down = self.run, self.run.cluster, self._nothing()
        sizes = [0] * cluster.world_size
        if run.central is None:
            (mine,) = cluster.workers
            sizes[0] = wire.down_bytes(self.kind, self._shape(dealt, mine), self.dtype)
            return wire.read_down(
                self.kind, cluster.exchange(down, sizes)()[0], self._shape(dealt, mine), self.dtype
            )
        for worker, rank in enumerate(cluster.placement.ranks):
            if rank != 0:
                cut = dispatcher.cut(run.central, dealt.blueprints[worker])
                down[rank] = wire.down(self.kind, cut)
                self._sent[worker] = cut
        cluster.exchange(down, sizes)()
        return run.central.buffer

    def _is(self, buffer: Tensor) -> tuple[tuple[int, int], torch.dtype]:
        return (buffer.shape[0], buffer.shape[1]), buffer.dtype

    def _gather(self, dealt: Deal, trained: list[Result], source: Tensor) -> list[Result]:
        """All results in worker order on the central rank."""
        cluster, up, sizes = self.run.cluster, self._nothing(), [0] * self.run.cluster.world_size
        if self.run.central is None:
            up[0] = wire.up(self.kind, trained[0].buffer, source[0])
        for worker, sent in self._sent.items():
            sizes[cluster.placement.ranks[worker]] = wire.up_bytes(self.kind, *self._is(sent))
        came = cluster.exchange(up, sizes)()
        for worker, sent in self._sent.items():
            payload, (shape, _) = came[cluster.placement.ranks[worker]], self._is(sent)
            buffer = wire.read_up(self.kind, payload, shape, sent[0])
            trained.append(Result(worker, buffer, dealt.indices[worker], Stats(0.0, 0, 0)))
        return trained

    def collect_(self) -> None:
        pass

    def close(self, crashed: bool) -> None:
        pass
