"""The local engine: one process plays all workers, one after the other."""

from __future__ import annotations

from dataclasses import replace

from ...transport import wire
from .. import aggregator, dispatcher
from ..aggregator import Result
from ..assignments import (
    Assignments,
    assign,
    committed,
    deal,
    everyone,
    measured_rho,
    traffic,
    train_here,
)
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
        # trained as they are added up: workers may share a trainer
        results = (self._trained(work, i) for i in range(len(present)))
        outer = run.cfg.train.nesterov()
        stats = aggregator.aggregate_(run.central, results, dealt.holders, outer)
        after = committed(progress, work.leases, dealt.blueprints, rho)
        self._ahead = deal(run, after, present)
        return Outcome(stats, traffic(run, dealt.blueprints, dealt.blueprints, 0), after)

    def _trained(self, work: Assignments, worker: int) -> Result:
        """A worker's result, rounded on both ways as `run.wire` would."""
        run, dealt, kind = self.run, work.deal, self.run.cfg.run.wire
        assert run.central is not None
        if kind == "fp32":  # cut into the trainer itself, without a copy between
            part = dispatcher.subnet_buffer(dealt, worker, run.segments, run.central.buffer)
            return train_here(run, work, worker, part)
        own = dispatcher.cut(run.central, dealt.blueprints[worker])
        shape = (own.shape[0], own.shape[1])
        sent = wire.read_down(kind, wire.down(kind, own), shape, own.dtype)
        part = dispatcher.subnet_buffer(dealt, worker, run.segments, sent)
        result = train_here(run, work, worker, part)
        update = wire.up(kind, result.buffer, sent[0])
        return replace(result, buffer=wire.read_up(kind, update, shape, own[0]))

    def collect_(self) -> None:
        pass

    @property
    def stops(self) -> bool:
        return self.run.stop.requested

    def close(self, crashed: bool) -> None:
        pass
