"""The local engine: one process plays all workers, one after the other."""

from __future__ import annotations

from dataclasses import replace

from ...model.central import cut_subnet
from ...transport import wire
from ..aggregator import Mean
from ..run import Progress
from .engine import Engine, Outcome


class Local(Engine):
    """Rounds in one process: the reference that all other engines equal bit for bit."""

    def round(self, progress: Progress) -> Outcome:
        """One round of the paper: generate, dispatch, train, aggregate."""
        run, kind = self.run, self.run.cfg.run.wire
        assert run.central is not None
        work = self.assign(progress)
        mean = Mean(run.central, work.deal.holders, run.cfg.train.nesterov())
        for worker, blueprint in enumerate(work.deal.blueprints):
            if kind == "fp32":  # cut into the trainer itself, without a copy between
                result = self.train(work, worker, run.central.buffer)
            else:  # rounded on both ways as a wire of this kind would
                own = cut_subnet(run.central, blueprint)
                sent = wire.received(kind, own)
                result = self.train(work, worker, sent)
                back = wire.returned(kind, result.buffer, sent[0], own[0])
                result = replace(result, buffer=back)
            mean.add(result)
        stats = mean.commit_()
        after = work.committed()
        self.deal_ahead(after)
        return Outcome(stats, work.traffic(), after)
