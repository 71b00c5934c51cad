"""What the workers of a round get: blueprints, activation scales and sequences, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import Kind
from ..data import stream
from ..data.stream import Leases, Slot
from ..model import generator, masks
from ..model.blocks import Blueprint
from ..model.masks import Order, WorkerRound
from ..model.subnet import Rho, gate_values, measure_rho, scale_of, scales
from ..system.device import to_device
from ..system.terminal import console
from ..transport.traffic import Bytes, Traffic, other_counts, subnet_bytes
from . import dispatcher
from .aggregator import Result
from .dispatcher import Deal, SubnetBuffer
from .progress import Progress
from .run import Run

RHO_DECAY = 0.9  # of the running rho per layer

Present = Sequence[
    tuple[int, Mapping[Kind, int]]
]  # a worker's place, and K of its own if it has one


def everyone(run: Run) -> Present:
    """All S workers, each with the round's usual K."""
    return [(place, {}) for place in range(run.cluster.placement.n_workers)]


def deal(run: Run, progress: Progress, present: Present) -> Deal:
    """(2) Who holds what in the next round: a function of its number and the counts so far."""
    blueprints = generator.for_training(
        run.block_map,
        run.cluster.placement.n_workers,
        run.cfg.blocks,
        seed=run.cfg.run.seed,
        round=progress.round,
        held=progress.held,
        present=present,
    )
    return dispatcher.prepare(run.segments, progress.round, blueprints)


@dataclass(frozen=True)
class Assignments:
    """A deal, and the sequences and scales that go with it."""

    deal: Deal
    places: tuple[int, ...]  # [worker]: its place among the S of the run
    slots: tuple[Slot, ...]  # of all workers and steps
    leases: Leases  # once all of them are trained
    rho: Rho  # for the measured scale
    order: Order  # of blocks, for nested masks

    def tokens(self, run: Run, worker: int) -> Tensor:
        """A worker's batches: int64 [interval, batch, T]."""
        slots = stream.of_worker(self.slots, worker, len(self.places))
        return torch.stack([run.batches.slot(slot) for slot in slots])

    def teacher_topk(self, run: Run, worker: int) -> Tensor | None:
        """What a teacher's cache holds for them: uint8 [interval, batch, T - 1, bytes]."""
        slots = stream.of_worker(self.slots, worker, len(self.places))
        teacher_topk = run.batches.teacher_topk(tuple(place for slot in slots for place in slot))
        return None if teacher_topk is None else teacher_topk.unflatten(0, (len(slots), -1))

    def factors(self, run: Run, worker: int) -> dict[str, float]:
        """The activation scale of each layer of all that a worker holds."""
        widths = run.block_map.widths(self.deal.blueprints[worker])
        return scales(run.block_map, widths, run.cfg.train.scale, self.rho)

    def gates(self, run: Run, worker: int) -> Tensor:
        """Masks times activation scales: [steps, rows, held blocks], or [1, 1, held blocks] for all steps."""
        t, blocks, held = run.cfg.train, run.cfg.blocks, self.deal.blueprints[worker]
        if blocks.masks == "round":
            return gate_values(run.block_map, held, self.factors(run, worker))[None]
        rows = masks.n_rows(blocks, t.batch)
        place = self.places[worker]
        turn = WorkerRound(run.cfg.run.seed, self.deal.round, place, t.interval, rows)
        factor = scale_of(t.scale, self.rho)
        return masks.draw(run.block_map, held, blocks, turn, self.order, t.method, factor)


def take(run: Run, progress: Progress, n: int) -> tuple[tuple[Slot, ...], Leases]:
    """The next n slots of legal sequences; those that are set aside on the way are named."""
    slots, after = stream.take_legal(run.batches, progress.leases, n)
    if run.cluster.is_central:
        for place in after.skipped[len(progress.leases.skipped) :]:
            console.print(f"set aside: {run.batches.describe(place)}", style="yellow")
    return slots, after


def assign(run: Run, progress: Progress, dealt: Deal, present: Present, rho: Rho) -> Assignments:
    """Sequences from the stream and activation scales for everyone in a deal."""
    t = run.cfg.train
    slots, after = take(run, progress, t.interval * len(present))
    places = tuple(place for place, _ in present)
    return Assignments(dealt, places, slots, after, rho, progress.order)


def train_here(run: Run, work: Assignments, worker: int, part: SubnetBuffer) -> Result:
    """(4) A worker's local steps in one of this process's trainers."""
    return run.trainers.train(
        run.cluster.placement.kinds[work.places[worker]],
        part,
        work.gates(run, worker),
        work.tokens(run, worker),
        work.deal.round,
        run.total_steps,
        work.teacher_topk(run, worker),
    )


def committed(progress: Progress, after: Leases, back: Sequence[Blueprint], rho: Rho) -> Progress:
    """The progress after a round whose results, of these blueprints, are in the central model."""
    return replace(
        progress,
        round=progress.round + 1,
        leases=after,
        held=generator.counted(progress.held, back),
        rho={**progress.rho, **rho},
    )


def measured_rho(run: Run, progress: Progress) -> Rho:
    """The running rho, with a measurement on the central model and the round's first sequence."""
    if run.cfg.train.scale != "measured":
        return progress.rho
    rho = dict(progress.rho)
    names = [group.name for group in run.block_map.groups]
    if run.central is not None:
        assert run.evaluator is not None
        ids = run.batches.slot(stream.take_legal(run.batches, progress.leases, 1)[0][0][:1])
        fresh = measure_rho(run.evaluator.full, to_device(ids, run.cluster.device))
        for name in names:
            rho[name] = RHO_DECAY * rho.get(name, fresh[name]) + (1 - RHO_DECAY) * fresh[name]
    values = run.cluster.broadcast([rho.get(name, 1.0) for name in names])
    return dict(zip(names, values, strict=True))


def teacher_cache_bytes(run: Run, n_workers: int) -> int:
    """What a teacher's cache sends to so many workers in a round, beside their tokens."""
    cache, t = run.batches.teacher_cache, run.cfg.train
    n_sequences = n_workers * t.interval * t.batch
    return 0 if cache is None else n_sequences * cache.meta.sequence_bytes


def traffic(run: Run, dealt: list[Blueprint], back: list[Blueprint], wired: int) -> Traffic:
    """What a round's subnets cost both ways, and what of it went over a network."""
    kind = run.cfg.run.wire

    def size(blueprint: Blueprint) -> int:
        return run.full.narrowed(run.block_map, run.block_map.widths(blueprint)).n_params

    def cost(blueprints: list[Blueprint], way: int) -> Bytes:
        n_shared, dtype = run.full.n_shared, run.cut.dtype
        parts = (subnet_bytes(n_shared, size(b), run.rows, kind, dtype) for b in blueprints)
        return sum((part[way] for part in parts), Bytes())

    other = other_counts(run.full.n_params, [size(b) for b in dealt], run.cfg.train.interval)
    if teacher_topk := teacher_cache_bytes(run, len(dealt)):
        other["teacher"] = teacher_topk
    return Traffic(cost(dealt, 0), cost(back, 1), wired, other)
