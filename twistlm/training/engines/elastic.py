"""The elastic engine: workers in other processes that come and go, found through a hub."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ... import config
from ...data import stream
from ...model import generator
from ...model.layout import holders
from ...system.signals import stopped
from ...transport.address import address_of
from ...transport.events import Events
from ...transport.hub import Hub
from ...transport.listener import Listener
from ...transport.members import Member
from ...transport.protocol import RunDescription, Task
from .. import aggregator, dispatcher
from ..aggregator import Result, Stats
from ..assignments import Assignments, assign, committed, deal, measured_rho, traffic, train_here
from ..progress import Progress
from ..run import Run
from .protocol import Outcome

Opened = tuple[socket.socket, bytes]  # where workers connect, and the secret that lets them in
Team = list[tuple[int, Member | None]]  # place and, in another process, its worker; by place


class Elastic:
    """Rounds with whoever is in. Some workers may be played by this process itself.

    Who has no result in time costs its own update: blocks that it alone held stay as they are, and its
    sequences are the first to go out again. Weights, counts and leases change together, or not at all.
    """

    is_whole = True

    def __init__(self, run: Run, start: int, opened: Opened, quiet: bool):
        self.run, cfg = run, run.cfg
        self.events = Events(Path(cfg.run.out), quiet)
        listener = Listener(
            *opened,
            RunDescription(
                config=config.to_dict(cfg),
                model=run.template.config.to_dict(),
                total_steps=run.total_steps,
                rows=run.rows,
            ),
            lambda own: generator.check_own(run.block_map, cfg.blocks, own),
            self.events,
            cfg.hub.patience,
        )
        self.events.write("started", round=start, address=address_of(opened[0]))
        n_local = len(run.cluster.workers)
        self.hub = Hub(listener, cfg, self.events, n_local, lambda: run.stop.wished)

    def round(self, progress: Progress) -> Outcome:
        """One round with those who are in; tried again until `hub.min_workers` results are there."""
        run, r = self.run, progress.round
        assert run.central is not None
        rho = measured_rho(run, progress)
        before, first = sum(self.hub.traffic()), time.monotonic()
        while True:
            team = self._gather(r, first)
            present = [(place, member.widths if member else {}) for place, member in team]
            dealt = deal(run, progress, present)
            work = assign(run, progress, dealt, present, rho)
            began = time.monotonic()
            self._post(work, team)
            results = [*self._trained_here(work, team), *self._answers(work, began)]
            there = [result.worker for result in results]
            if run.stop.wished and len(there) < len(team):
                raise stopped(run.stop, r)
            if len(there) >= run.cfg.hub.min_workers:
                break
            self.hub.abandoned(r, len(there), first)
        back, held_by, after = [dealt.blueprints[i] for i in there], dealt.holders, work.leases
        if len(there) < len(team):
            held_by = holders(run.segments, back)
            for i in set(range(len(team))) - set(there):
                after = stream.give_back(after, stream.of_worker(work.slots, i, len(team)))
        stats = aggregator.aggregate_(run.central, results, held_by, run.cfg.train.nesterov())
        lost = [place for i, place in enumerate(work.places) if i not in there]
        self.hub.committed(r, time.monotonic() - began, places=list(work.places), lost=lost)
        wired = sum(self.hub.traffic()) - before
        now = committed(progress, after, back, rho)
        return Outcome(stats, traffic(run, dealt.blueprints, back, wired), now)

    def collect_(self) -> None:
        pass

    @property
    def stops(self) -> bool:
        return self.run.stop.wished

    def close(self) -> None:
        self.hub.close()

    def _gather(self, r: int, since: float) -> Team:
        """The workers of a round: those that this process plays, and those who are in at the hub."""
        mine: Team = [(place, None) for place in self.run.cluster.workers]
        members = self.hub.gather(r, len(mine), since)
        if self.run.stop.wished:
            raise stopped(self.run.stop, r)
        return mine + [(member.place, member) for member in members]

    def _post(self, work: Assignments, team: Team) -> None:
        """Send all other processes their subnets. All have been cut before a local worker begins: a
        central seat trains the central weights in place."""
        run, dealt = self.run, work.deal
        assert run.central is not None
        for i, (place, member) in enumerate(team):
            if member is not None:
                blueprint, seat = dealt.blueprints[i], run.cluster.seating.kinds[place]
                sent = dispatcher.cut(run.central, blueprint, buffers=member.buffers)
                task = Task(blueprint, seat, work.factors(run, i))
                self.hub.post(member, dealt.round, sent, work.tokens(run, i), task)

    def _trained_here(self, work: Assignments, team: Team) -> Iterator[Result]:
        """Train the workers that this process plays, one by one: they may share a seat."""
        run = self.run
        assert run.central is not None
        for i, (_, member) in enumerate(team):
            if member is None:
                parcel = dispatcher.parcel(work.deal, i, run.segments, run.central.buffer)
                yield train_here(run, work, i, parcel)

    def _answers(self, work: Assignments, began: float) -> Iterator[Result]:
        """The results of other processes that came in time and are believed, in worker order."""
        run, t = self.run, self.run.cfg.train
        answers = self.hub.collect(work.deal.round, began)
        n_tokens = t.interval * t.batch * run.batches.seq_len
        for i, place in enumerate(work.places):
            if place in answers:
                stats = Stats(answers[place].loss_sum, t.interval, n_tokens)
                buffer = answers[place].buffer.to(run.cluster.device, non_blocking=True)
                yield Result(i, buffer, work.deal.indices[i], stats)
