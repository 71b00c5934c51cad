"""What carries the rounds of a run. An engine is one file that the loop does not know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...transport import wire
from ...transport.events import Events
from ..aggregator import Result, Stats
from ..assignments import Assignments, Deal, Traffic, assign, deal, everyone, measured_rho
from ..run import Progress, Run


@dataclass(frozen=True)
class Outcome:
    """A committed round: its losses, its bytes, and where the run stands now."""

    stats: Stats
    traffic: Traffic
    progress: Progress


class Engine:
    """Carries one round after the other; lives as long as the run."""

    is_whole = True  # the central tensors are those of the last round without `collect_`
    events: Events | None = None  # workers that come and go, for the live view

    def __init__(self, run: Run):
        self.run = run
        self._ahead: Deal | None = None
        self._agreed = False  # on stopping, in the last exchange of all ranks

    def round(self, progress: Progress) -> Outcome:
        """One round: the central tensors change, or `Ended` is raised and they do not."""
        raise NotImplementedError

    def collect_(self) -> None:
        """Bring the central tensors up to date; called on all ranks, before they are read."""

    @property
    def stops(self) -> bool:
        """Whether a signal asks the run to end after this round; all ranks say the same."""
        return self._agreed if self.run.cluster.world_size > 1 else self.run.stop.requested

    def close(self, crashed: bool) -> None:
        """Let go of what was opened; a crashed run may leave what `--resume` finds again."""

    def assign(self, progress: Progress) -> Assignments:
        """The round's work for all S workers."""
        run, present = self.run, everyone(self.run)
        rho = measured_rho(run, progress)
        dealt = self._ahead
        if dealt is None or dealt.round != progress.round:
            dealt = deal(run, progress, present)
        return assign(run, progress, dealt, present, rho)

    def deal_ahead(self, progress: Progress) -> None:
        """Deal the next round while a GPU still works on this one."""
        self._ahead = deal(self.run, progress, everyone(self.run))

    def train(self, work: Assignments, worker: int, source: Tensor) -> Result:
        """A worker's local steps in this process; `source` is what its subnet is cut from."""
        run, part = self.run, work.subnet(worker, source)
        trainer = run.trainers.get(part.layout, work.kind(worker))
        gates, tokens, topk = work.gates(worker), work.tokens(worker), work.teacher_topk(worker)
        return trainer.train(part, gates, tokens, topk, work.deal.round, run.total_steps)

    def share(self, stats: Stats) -> Stats:
        """The sum over ranks, in worker order, on every rank; and any rank's signal with it."""
        cluster, stop = self.run.cluster, self.run.stop
        mine = [stats.loss_sum, stats.n_steps, stats.n_tokens, stop.signal]
        values = torch.tensor(mine, dtype=torch.float64, device=cluster.device)
        payload, n = wire.encode("fp32", values), cluster.world_size
        total, signal = Stats(0.0, 0, 0), 0
        for received in cluster.exchange([payload] * n, [payload.numel()] * n)():
            row = wire.decode("fp32", received, (4,), torch.float64).tolist()
            total += Stats(row[0], int(row[1]), int(row[2]))
            signal = signal or int(row[3])
        stop.signal, self._agreed = stop.signal or signal, signal != 0
        return total
