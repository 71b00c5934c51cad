"""The local engine: one process plays all workers, one after the other."""

from __future__ import annotations

from .. import aggregator, dispatcher
from ..assignments import assign, committed, deal, everyone, measured_rho, traffic, train_here
from ..dispatcher import Deal
from ..progress import Progress
from ..run import Run
from .protocol import Outcome


class Local:
    """Rounds in one process; the next round is dealt while a GPU still works on this one."""

    is_whole, events = True, None

    def __init__(self, run: Run):
        self.run = run
        self._ahead: Deal | None = None

    def round(self, progress: Progress) -> Outcome:
        """One round of the paper: generate, dispatch, train, aggregate."""
        run, present = self.run, everyone(self.run)
        assert run.central is not None
        rho = measured_rho(run, progress)
        dealt = self._ahead
        if dealt is None or dealt.round != progress.round:
            dealt = deal(run, progress, present)
        work = assign(run, progress, dealt, present, rho)
        source = run.central.buffer
        results = (  # trained as they are added up: workers may share a seat
            train_here(run, work, i, dispatcher.parcel(dealt, i, run.segments, source))
            for i in range(len(present))
        )
        outer = run.cfg.train.nesterov()
        stats = aggregator.aggregate_(run.central, results, dealt.holders, outer)
        after = committed(progress, work.leases, dealt.blueprints, rho)
        self._ahead = deal(run, after, present)
        return Outcome(stats, traffic(run, dealt.blueprints, dealt.blueprints, 0), after)

    def collect_(self) -> None:
        pass

    @property
    def stops(self) -> bool:
        return self.run.stop.wished

    def close(self, crashed: bool) -> None:
        pass
