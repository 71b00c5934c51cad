"""(2), (3) What each worker of a round gets: blocks, their weights, batches, masks and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..config import Kind
from ..data import stream
from ..data.stream import Leases, Slot
from ..model import generator, masks
from ..model.blocks import Blueprint
from ..model.central import SubnetBuffer, subnet_buffer
from ..model.layout import Segments, holders
from ..model.masks import WorkerRound
from ..model.subnet import Rho, gate_values, measure_rho, scale_of, scales
from ..system.device import to_device
from ..system.terminal import console
from ..transport import wire
from ..transport.ranks import TrainerKind
from .run import Progress, Run

RHO_DECAY = 0.9  # of the running rho per layer

# the workers of a round: each one's number among the S of the run, and K of its own if it has one
Present = Sequence[tuple[int, Mapping[Kind, int]]]


@dataclass(frozen=True)
class Deal:
    """Which blocks each worker of a round holds; it follows from the round's number alone."""

    round: int
    blueprints: list[Blueprint]
    indices: list[Tensor]  # each worker's `Segments.index`
    holders: Tensor


def deal_of(segments: Segments, round: int, blueprints: list[Blueprint]) -> Deal:
    """These blueprints, and where their blocks lie in the central buffer."""
    indices = [segments.index(blueprint) for blueprint in blueprints]
    return Deal(round, blueprints, indices, holders(segments, blueprints))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round."""

    down: int  # subnets to all workers
    up: int  # and from them
    wire: int  # what crossed a process boundary, seen from the central rank
    teacher: int = 0  # from a teacher's cache, beside the tokens


@dataclass(frozen=True)
class Assignments:
    """A round's work, worker by worker; a worker is counted among those of the round."""

    run: Run
    progress: Progress  # before the round
    deal: Deal
    numbers: tuple[int, ...]  # [worker]: its number among the S of the run
    slots: tuple[Slot, ...]  # batches of all workers and steps
    ids: np.ndarray  # [slots, batch, T], the token file's own dtype
    leases: Leases  # once all of them are trained
    rho: Rho  # for the measured scale

    def kind(self, worker: int) -> TrainerKind:
        return self.run.cluster.placement.kinds[self.numbers[worker]]

    def subnet(self, worker: int, source: Tensor) -> SubnetBuffer:
        """Its weights and moments, out of the central buffer or of what came over a wire."""
        blueprint, index = self.deal.blueprints[worker], self.deal.indices[worker]
        return subnet_buffer(self.run.segments, worker, blueprint, source, index)

    def slots_of(self, worker: int) -> tuple[Slot, ...]:
        return self.slots[worker :: len(self.numbers)]

    def tokens(self, worker: int) -> Tensor:
        """Its batches: int64 [interval, batch, T]."""
        return torch.from_numpy(self.ids[worker :: len(self.numbers)].astype(np.int64))

    def teacher_topk(self, worker: int) -> Tensor | None:
        """What a teacher's cache holds for them: uint8 [interval, batch, T - 1, bytes]."""
        slots = self.slots_of(worker)
        found = self.run.batches.teacher_topk(tuple(place for slot in slots for place in slot))
        return None if found is None else found.unflatten(0, (len(slots), -1))

    def gates(self, worker: int) -> Tensor:
        """Masks times scales: [steps, rows, held blocks], or [1, 1, held blocks] for all steps."""
        run, held = self.run, self.deal.blueprints[worker]
        if run.cfg.blocks.masks == "round":
            widths = run.block_map.widths(held)
            factors = scales(run.block_map, widths, run.cfg.train.scale, self.rho)
            return gate_values(run.block_map, held, factors)[None]
        return drawn_gates(run, self.progress, held, self.numbers[worker], self.rho)

    def committed(
        self, leases: Leases | None = None, back: Sequence[Blueprint] | None = None
    ) -> Progress:
        """The progress once the results, of the blueprints `back`, are in the central model."""
        progress, back = self.progress, self.deal.blueprints if back is None else back
        return replace(
            progress,
            round=progress.round + 1,
            leases=self.leases if leases is None else leases,
            held=generator.counted(progress.held, back),
            rho={**progress.rho, **self.rho},
        )

    def traffic(self, wired: int = 0, back: Sequence[Blueprint] | None = None) -> Traffic:
        """What the subnets cost both ways, and what of it went over a network."""
        run, dealt = self.run, self.deal.blueprints
        back = dealt if back is None else back

        def shape(blueprint: Blueprint) -> tuple[int, int]:
            widths = run.block_map.widths(blueprint)
            return run.rows, run.full.narrowed(run.block_map, widths).n_params

        kind, dtype = run.cfg.run.wire, run.cut.dtype
        down = sum(wire.down_bytes(kind, shape(blueprint), dtype) for blueprint in dealt)
        up = sum(wire.up_bytes(kind, shape(blueprint), dtype) for blueprint in back)
        return Traffic(down, up, wired, teacher_cache_bytes(run, len(dealt)))


def everyone(run: Run) -> Present:
    """All S workers, each with the round's usual K."""
    return [(number, {}) for number in range(run.cluster.placement.n_workers)]


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
        order=progress.order,
    )
    return deal_of(run.segments, progress.round, blueprints)


def assign(run: Run, progress: Progress, dealt: Deal, present: Present, rho: Rho) -> Assignments:
    """The blocks of a deal, with sequences and scales for everyone in it."""
    slots, ids, after = take(run, progress, run.cfg.train.interval * len(present))
    numbers = tuple(number for number, _ in present)
    return Assignments(run, progress, dealt, numbers, slots, ids, after, rho)


def take(run: Run, progress: Progress, n: int) -> tuple[tuple[Slot, ...], np.ndarray, Leases]:
    """The next n slots of legal sequences, with their ids; those that are skipped are named."""
    slots, ids, after = stream.take_legal(run.batches, progress.leases, n)
    if run.cluster.is_central:
        for place in after.skipped[len(progress.leases.skipped) :]:
            console.print(f"set aside: {run.batches.describe(place)}", style="yellow")
    return slots, ids, after


def drawn_gates(run: Run, progress: Progress, held: Blueprint, number: int, rho: Rho) -> Tensor:
    """Fresh masks for a worker's local steps of a round: [steps, rows, held blocks]."""
    t, blocks = run.cfg.train, run.cfg.blocks
    rows = t.batch if blocks.masks == "sequence" else 1
    steps = WorkerRound(run.cfg.run.seed, progress.round, number, t.interval, rows)
    scale, order = scale_of(t.scale, rho), progress.order
    return masks.draw(run.block_map, held, blocks, steps, order, t.method, scale)


def measured_rho(run: Run, progress: Progress) -> Rho:
    """The running rho, with a measurement on the central model and the round's first sequence."""
    if run.cfg.train.scale != "measured":
        return progress.rho
    rho = dict(progress.rho)
    names = [group.name for group in run.block_map.groups]
    if run.central is not None:
        assert run.evaluator is not None
        ids = stream.take_legal(run.batches, progress.leases, 1)[1][0, :1]
        first = torch.from_numpy(ids.astype(np.int64))
        fresh = measure_rho(run.evaluator.full, to_device(first, run.cluster.device))
        for name in names:
            rho[name] = RHO_DECAY * rho.get(name, fresh[name]) + (1 - RHO_DECAY) * fresh[name]
    values = run.cluster.broadcast([rho.get(name, 1.0) for name in names])
    return dict(zip(names, values, strict=True))


def teacher_cache_bytes(run: Run, n_workers: int) -> int:
    """What a teacher's cache sends to so many workers in a round, beside their tokens."""
    cache, t = run.batches.teacher_cache, run.cfg.train
    n_sequences = n_workers * t.interval * t.batch
    return 0 if cache is None else n_sequences * cache.meta.sequence_bytes
