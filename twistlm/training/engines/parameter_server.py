"""The parameter server: the central model on rank 0 of torchrun, subnets to the others."""

from __future__ import annotations

from ...model.central import cut_subnet
from ...transport import wire
from ..aggregator import Result, Stats, aggregate_
from ..assignments import Assignments, Outcome
from ..run import Progress
from .engine import Engine


class ParameterServer(Engine):
    """Every rank deals for itself, so that only weights travel. A death ends the run."""

    def round(self, progress: Progress) -> Outcome:
        """The paper's round: all subnets have left before rank 0 trains its own, if it has one."""
        work, cluster = self.assign(progress), self.run.cluster
        before = cluster.n_sent + cluster.n_received
        stats = self._work(work) if self.run.central is None else self._serve(work)
        return work.outcome(stats, cluster.n_sent + cluster.n_received - before)

    def _serve(self, work: Assignments) -> Stats:
        """On the central rank: subnets to all other ranks, its own worker, the mean."""
        run, cluster, kind = self.run, self.run.cluster, self.run.cfg.run.wire
        assert run.central is not None
        down, n_up = [cluster.nothing] * cluster.world_size, [0] * cluster.world_size
        workers = {rank: worker for worker, rank in enumerate(cluster.ranks) if rank != 0}
        cuts = {r: cut_subnet(run.central, work.deal.blueprints[w]) for r, w in workers.items()}
        for rank, cut in cuts.items():
            down[rank] = wire.down(kind, cut)
            n_up[rank] = wire.up_bytes(kind, cut.shape, cut.dtype)
        cluster.exchange(down, [0] * cluster.world_size)()
        results = [self.train(work, worker, run.central.buffer) for worker in cluster.workers]
        stats = self.share(sum((result.stats for result in results), Stats()))
        came = cluster.exchange([cluster.nothing] * cluster.world_size, n_up)()
        for rank, cut in cuts.items():
            buffer = wire.read_up(kind, came[rank], cut.shape, cut[0])
            results.append(Result(workers[rank], buffer, work.deal.indices[workers[rank]]))
        aggregate_(run.central, results, work.deal.holders, run.cfg.train.nesterov())
        return stats

    def _work(self, work: Assignments) -> Stats:
        """On the others: a subnet from the central rank, and what became of it back."""
        run, cluster, kind = self.run, self.run.cluster, self.run.cfg.run.wire
        (worker,), n, dtype = cluster.workers, cluster.world_size, run.cut.dtype
        shape = run.rows, run.cut.segments.layout_of(work.deal.blueprints[worker]).n_params
        sizes = [wire.down_bytes(kind, shape, dtype)] + [0] * (n - 1)
        payload = cluster.exchange([cluster.nothing] * n, sizes)()[0]
        source = wire.read_down(kind, payload, shape, dtype)
        result = self.train(work, worker, source)
        stats = self.share(result.stats)
        up = wire.up(kind, result.buffer, source[0])
        cluster.exchange([up] + [cluster.nothing] * (n - 1), [0] * n)()
        return stats
