"""What carries the rounds of a run. An engine is one file that the loop does not know."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...model.central import SubnetBuffer
from ...transport.events import Events
from ..aggregator import Result, Stats
from ..assignments import Assignments, Outcome, Present, assign, measured_rho
from ..checkpoint import snapshot
from ..run import Progress, Run

NOWHERE = Progress()  # of an engine that is asked for rounds, not for a run


class Engine:
    """Carries one round after the other; lives as long as the run."""

    is_whole = True  # the central tensors are those of the last round without `collect_`
    events: Events | None = None  # workers that come and go, for the live view

    def __init__(self, run: Run, start: Progress = NOWHERE):
        self.run, self.start = run, start  # the run may be one that has let go of its model
        self._agreed = False  # on stopping, in the last exchange of all ranks

    def round(self, progress: Progress) -> Outcome:
        """One round: the central tensors change, or `Ended` is raised and they do not."""
        raise NotImplementedError

    def collect_(self) -> None:
        """Bring the central tensors up to date; called on all ranks, before they are read."""

    def snapshot(self) -> Callable[[Path], object]:
        """What writes the central model of now into a folder; the one before has been written."""
        assert self.run.central is not None
        return snapshot(self.run.central)

    def evaluate(self, progress: Progress, advance: Callable[[], None]) -> tuple[dict, str]:
        """Perplexities of the central model and its subnets; `advance` is told of each."""
        assert self.run.evaluator is not None
        ready = replace(self.run.evaluator, rho=progress.rho)
        return ready.scores(self.run.cfg.run, progress.order, advance)

    @property
    def stops(self) -> bool:
        """Whether a signal asks the run to end after this round; all ranks say the same."""
        return self._agreed if self.run.cluster.world_size > 1 else self.run.stop.requested

    def close(self, crashed: bool) -> None:
        """Let go of what was opened; a crashed run may leave what `--resume` finds again."""

    def assign(self, progress: Progress) -> Assignments:
        """The round's work for all S workers, each with the round's usual K."""
        everyone: Present = [(number, {}) for number in range(self.run.cfg.train.n_workers)]
        return assign(self.run, progress, everyone, measured_rho(self.run, progress))

    def train(self, work: Assignments, worker: int, source: Tensor) -> Result:
        """A worker's local steps in this process; `source` is what its subnet is cut from."""
        run = self.run
        part = SubnetBuffer(run.cut.segments, work.blueprints[worker], source)
        trainer = run.trainers.get(part.layout, run.cluster.kinds[worker])
        gates, tokens, topk = work.gates(worker), work.tokens(worker), work.teacher_topk(worker)
        at = run.schedule_round(work.progress)
        return trainer.train(part, gates, tokens, topk, at, run.total_steps)

    def share(self, stats: Stats) -> Stats:
        """The sum over ranks, in worker order, on every rank; and any rank's signal with it."""
        cluster, stop = self.run.cluster, self.run.stop
        mine = [stats.loss_sum, stats.n_steps, stats.n_tokens, stop.signal]
        rows = torch.zeros(cluster.world_size, 4, dtype=torch.float64, device=cluster.device)
        rows[cluster.rank] = rows.new_tensor(mine)  # beside zeros, so no sum rounds
        total, signal = Stats(), 0
        for loss_sum, n_steps, n_tokens, number in cluster.sum_(rows).tolist():
            total += Stats(loss_sum, int(n_steps), int(n_tokens))
            signal = signal or int(number)
        stop.signal, self._agreed = stop.signal or signal, signal != 0
        return total
