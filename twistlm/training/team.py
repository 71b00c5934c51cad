"""The workers of a round: who they are, what each of them gets, and what they bring back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..data import leases
from ..data.leases import Slot
from ..model import generator
from ..system.signals import stopped
from ..transport.members import Member
from . import dispatcher
from .aggregator import Result, Stats
from .dispatcher import Deal
from .startup import Run

Team = list[tuple[int, Member | None]]  # place and, in another process, its worker; by place


def gather(run: Run, r: int, since: float) -> Team:
    """The workers of a round: those that this process plays, and those who are in at the hub."""
    mine: Team = [(place, None) for place in run.cluster.workers]
    if run.hub is None:
        return mine
    members = run.hub.gather(r, len(mine), since)
    if run.stop.wished:
        raise stopped(run.stop, r)
    return mine + [(member.place, member) for member in members]


def deal_for(run: Run, r: int, team: Team) -> Deal:
    if run.ahead is not None and run.ahead.round == r and run.hub is None:
        return run.ahead
    present = [(place, member.widths if member else {}) for place, member in team]
    blueprints = generator.for_training(
        run.block_map, run.cluster.seating.n_workers, run.cfg.blocks,
        seed=run.cfg.run.seed, round=r, held=run.held, present=present,
    )  # fmt: skip
    return dispatcher.prepare(run.runs, r, blueprints)


def tokens(run: Run, slots: tuple[Slot, ...], i: int, n: int) -> Tensor:
    """Worker i's batches: int64 [interval, batch, T]."""
    return torch.stack([run.batches.slot(slot) for slot in leases.of_worker(slots, i, n)])


def post(
    run: Run, deal: Deal, team: Team, slots: tuple[Slot, ...], factors: list[dict[str, float]]
) -> None:
    """Send all other processes their parcels. All have been cut before a local worker begins: a
    central seat trains the central weights in place."""
    for i, (place, member) in enumerate(team):
        if member is not None and run.hub is not None and run.central is not None:
            words = {
                "blueprint": deal.blueprints[i],
                "seat": run.cluster.seating.kinds[place],
                "scales": factors[i],
            }
            sent = dispatcher.cut(run.central, deal.blueprints[i], rooms=member.rooms)
            run.hub.post(member, deal.round, sent, tokens(run, slots, i, len(team)), words)


def local_results(
    run: Run, deal: Deal, team: Team, slots: tuple[Slot, ...], factors: list[dict[str, float]]
) -> Iterator[Result]:
    """Train the workers that this process plays, one by one: they may share a seat."""
    assert run.central is not None
    for i, (place, member) in enumerate(team):
        if member is None:
            parcel = dispatcher.parcel(deal, i, run.runs, run.central.buffer)
            yield run.seats.train(
                run.cluster.seating.kinds[place], parcel, factors[i],
                tokens(run, slots, i, len(team)), deal.round, run.total_steps,
            )  # fmt: skip


def remote_results(run: Run, deal: Deal, team: Team, r: int, began: float) -> Iterator[Result]:
    """The results of other processes that came in time and are believed, in worker order."""
    assert run.hub is not None
    t, answers = run.cfg.train, run.hub.collect(r, began)
    n_tokens = t.interval * t.batch * run.batches.seq_len
    for i, (place, _) in enumerate(team):
        if place in answers:
            stats = Stats(answers[place].loss_sum, t.interval, n_tokens)
            buffer = answers[place].buffer.to(run.cluster.device, non_blocking=True)
            yield Result(i, buffer, deal.indices[i], stats)
