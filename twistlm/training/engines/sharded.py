"""The sharded engine: every rank is a worker and the owner of 1/S of the centre."""

from __future__ import annotations

from ..progress import Progress
from ..run import Run
from ..shards import spread
from .engine import Engine, Outcome


class Sharded(Engine):
    """Rounds without a centre: every rank deals for itself, and all agree.

    The central tensors of the central rank are a copy that `collect_` fills. A death ends the run.
    """

    is_whole = False

    def __init__(self, run: Run):
        super().__init__(run)
        outer = run.cfg.train.nesterov() is not None
        kind, dtype = run.cfg.run.wire, run.cut.dtype
        self.shard = spread(run.central, run.segments, run.cluster, run.rows, outer, dtype, kind)

    def round(self, progress: Progress) -> Outcome:
        """The paper's round, with subnets from all owners and results to all owners."""
        run, cluster = self.run, self.run.cluster
        if run.cfg.train.scale == "measured":
            self.collect_()
        work = self.assign(progress)
        before = cluster.n_sent + cluster.n_received
        sent = self.shard.send_down(work.deal)
        result = self.train(work, cluster.rank, sent)
        stats = self.share(result.stats)
        self.shard.send_up_(work.deal, sent, result.buffer, run.cfg.train.nesterov())
        after = work.committed()
        self.deal_ahead(after)
        wired = cluster.n_sent + cluster.n_received - before
        return Outcome(stats, work.traffic(wired), after)

    def collect_(self) -> None:
        self.shard.collect_(self.run.central)
