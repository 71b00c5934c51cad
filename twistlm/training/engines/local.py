"""The local engine: one process plays all workers, one after the other."""

from dataclasses import replace

from ...model.central import cut_subnet
from ...model.layout import holders
from ...transport import wire
from ..aggregator import Mean
from ..assignments import Outcome
from ..run import Progress
from .engine import Engine


class Local(Engine):
    """Rounds in one process: the reference of all other engines."""

    def round(self, progress: Progress) -> Outcome:
        """One round of the paper: generate, dispatch, train, aggregate."""
        run, kind, work = self.run, self.run.cfg.run.wire, self.assign(progress)
        central = run.central
        assert central is not None
        central.before_change()
        place, exact = central.buffer.device, kind == "fp32"
        mean = Mean(central, holders(central.segments, work.blueprints), run.cfg.train.nesterov())
        for worker, blueprint in enumerate(work.blueprints):
            # cut into the trainer itself where it can be, without a copy between
            own = sent = central.buffer if exact else cut_subnet(central, blueprint)
            if not exact:  # rounded on both ways as a wire of this kind would
                sent = wire.read_down(kind, wire.down(kind, own), own.shape, own.dtype)
            result = self.train(work, worker, sent)
            if not exact:
                back = wire.up(kind, result.buffer.to(place), sent[0])
                result = replace(result, buffer=wire.read_up(kind, back, own.shape, own[0]))
            mean.add(result)
        return work.outcome(mean.commit_())
