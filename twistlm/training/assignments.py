"""(2), (3) What each worker of a round gets: blocks, their weights, batches, masks and scales."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..config import Kind
from ..data import stream
from ..data.stream import Leases, Slot
from ..model import generator, masks
from ..model.blocks import Blueprint
from ..model.masks import WorkerRound
from ..model.subnet import Rho, gate_values, measure_rho, scale_of, scales
from ..system.device import to_device
from ..system.terminal import console
from ..transport import wire
from .aggregator import Stats
from .run import Progress, Run, n_rows

RHO_DECAY = 0.9  # of the running rho per layer

# the workers of a round: each one's number among the S of the run, and K of its own if it has one
Present = Sequence[tuple[int, Mapping[Kind, int]]]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round."""

    down: int  # subnets to all workers
    up: int  # and from them
    wire: int  # what crossed a process boundary, seen from the central rank
    teacher: int = 0  # from a teacher's cache, beside the tokens


def traffic(
    run: Run, dealt: Sequence[Blueprint], back: Sequence[Blueprint], wired: int = 0
) -> Traffic:
    """What these subnets cost both ways, and what of it went over a network."""
    kind, cut, t, cache = run.cfg.run.wire, run.cut, run.cfg.train, run.batches.teacher_cache

    def shape(blueprint: Blueprint) -> tuple[int, int]:
        return n_rows(run.cfg), cut.segments.layout_of(blueprint).n_params

    down = sum(wire.down_bytes(kind, shape(blueprint), cut.dtype) for blueprint in dealt)
    up = sum(wire.up_bytes(kind, shape(blueprint), cut.dtype) for blueprint in back)
    n_sequences = len(dealt) * t.interval * t.batch
    return Traffic(down, up, wired, cache.meta.sequence_bytes * n_sequences if cache else 0)


@dataclass(frozen=True)
class Outcome:
    """A committed round: its losses, its bytes, and where the run stands now."""

    stats: Stats
    traffic: Traffic
    progress: Progress


@dataclass(frozen=True)
class Assignments:
    """A round's work, worker by worker; a worker is counted among those of the round."""

    run: Run
    progress: Progress  # before the round
    blueprints: list[Blueprint]  # [worker]: the blocks that it holds
    numbers: tuple[int, ...]  # [worker]: its number among the S of the run
    slots: tuple[Slot, ...]  # batches of all workers and steps
    ids: np.ndarray  # [slots, batch, T], the token file's own dtype
    leases: Leases  # once all of them are trained
    rho: Rho  # for the measured scale

    def slots_of(self, worker: int) -> tuple[Slot, ...]:
        return self.slots[worker :: len(self.numbers)]

    def n_params(self, worker: int) -> int:
        return self.run.cut.segments.layout_of(self.blueprints[worker]).n_params

    def tokens(self, worker: int) -> Tensor:
        """Its batches: int64 [interval, batch, T]."""
        return torch.from_numpy(self.ids[worker :: len(self.numbers)].astype(np.int64))

    def teacher_topk(self, worker: int) -> Tensor | None:
        """What a teacher's cache holds for them: uint8 [interval, batch, T - 1, bytes]."""
        slots = self.slots_of(worker)
        found = self.run.batches.teacher_topk(tuple(place for slot in slots for place in slot))
        return None if found is None else found.unflatten(0, (len(slots), -1))

    def gates(self, worker: int) -> Tensor:
        """Masks times scales: [steps, rows, held blocks], or one for all, [1, 1, held]."""
        run, held = self.run, self.blueprints[worker]
        if run.cfg.blocks.masks == "round":
            block_map = run.cut.block_map
            factors = scales(block_map, block_map.widths(held), run.cfg.train.scale, self.rho)
            return gate_values(block_map, held, factors)
        return drawn_gates(run, self.progress, held, self.numbers[worker], self.rho)

    def outcome(
        self,
        stats: Stats,
        wired: int = 0,
        leases: Leases | None = None,
        back: Sequence[Blueprint] | None = None,
    ) -> Outcome:
        """The round once the results, of the blueprints `back`, are in the central model."""
        dealt, progress = self.blueprints, self.progress
        back = dealt if back is None else back
        now = replace(
            progress,
            round=progress.round + 1,
            leases=self.leases if leases is None else leases,
            rho={**progress.rho, **self.rho},
        )
        return Outcome(stats, traffic(self.run, dealt, back, wired), now)


def assign(run: Run, progress: Progress, present: Present, rho: Rho) -> Assignments:
    """(2) Deal the next round's blocks, by its number and the order, with sequences."""
    cfg = run.cfg
    blueprints = generator.for_training(
        run.cut.block_map, cfg.train.n_workers, cfg.blocks, seed=cfg.run.seed, present=present,
        round=progress.round, order=progress.order,
    )  # fmt: skip
    numbers = tuple(number for number, _ in present)
    taken = take(run, progress, cfg.train.interval * len(present))
    return Assignments(run, progress, blueprints, numbers, *taken, rho)


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
    return masks.draw(run.cut.block_map, held, blocks, steps, order, t.method, scale)


def measured_rho(
    run: Run, progress: Progress, measure: Callable[[Tensor], Rho] | None = None
) -> Rho:
    """The running rho, with a measurement on the central model and the round's first sequence.

    `measure` does so where the central model is elsewhere.
    """
    if run.cfg.train.scale != "measured":
        return progress.rho
    rho = dict(progress.rho)
    names = [group.name for group in run.cut.block_map.groups]
    if run.cluster.is_central:
        ids = stream.take_legal(run.batches, progress.leases, 1)[1][0, :1]
        first = torch.from_numpy(ids.astype(np.int64))
        if measure is None:
            assert run.evaluator is not None
            fresh = measure_rho(run.evaluator.full, to_device(first, run.cluster.device))
        else:
            fresh = measure(first)
        for name in names:
            rho[name] = RHO_DECAY * rho.get(name, fresh[name]) + (1 - RHO_DECAY) * fresh[name]
    values = run.cluster.broadcast([rho.get(name, 1.0) for name in names])
    return dict(zip(names, values, strict=True))
