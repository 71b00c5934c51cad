"""The sharded engine: torchrun's ranks in one group, each of them a worker and the owner of 1/S of the centre."""

from __future__ import annotations

from ..aggregator import Result
from ..assignments import assign, committed, deal, everyone, measured_rho, traffic, train_here
from ..dispatcher import Deal, SubnetBuffer
from ..progress import Progress
from ..run import Run
from ..shards import collect_, round_, spread
from .protocol import Outcome


class Sharded:
    """Rounds without a centre: every rank deals for itself, and all agree.

    The central tensors of the central rank are a copy that `collect_` fills. A death ends the run.
    """

    is_whole, events = False, None

    def __init__(self, run: Run):
        outer = run.cfg.train.nesterov() is not None
        self.run, self.stops = run, False
        wire, dtype = run.cfg.run.wire, run.cut.dtype
        self.shard = spread(run.central, run.segments, run.cluster, run.rows, outer, dtype, wire)
        self._ahead: Deal | None = None

    def round(self, progress: Progress) -> Outcome:
        """The paper's round, with parcels from all owners and results to all owners."""
        run, cluster, present = self.run, self.run.cluster, everyone(self.run)
        if run.cfg.train.scale == "measured":
            self.collect_()
        rho = measured_rho(run, progress)
        dealt = self._ahead
        if dealt is None or dealt.round != progress.round:
            dealt = deal(run, progress, present)
        work = assign(run, progress, dealt, present, rho)
        before = cluster.n_sent + cluster.n_received

        def train(part: SubnetBuffer) -> Result:
            return train_here(run, work, part.worker, part)

        outer = run.cfg.train.nesterov()
        done = round_(self.shard, dealt, cluster, train, outer, run.stop)
        run.stop.signal, self.stops = run.stop.signal or done.signal, done.signal != 0
        after = committed(progress, work.leases, dealt.blueprints, rho)
        self._ahead = deal(run, after, present)
        wired = cluster.n_sent + cluster.n_received - before
        return Outcome(done.stats, traffic(run, dealt.blueprints, dealt.blueprints, wired), after)

    def collect_(self) -> None:
        collect_(self.run.central, self.shard, self.run.cluster)

    def close(self, crashed: bool) -> None:
        pass
