"""(3), (5) An owner of a range of the central model, as a Ray actor.

It keeps weights, moments and outer momentum of its range, and of its predecessor's. A new round's
lie beside the last one's until the round after it begins. A round is there once each of its ranges
is kept by somebody: it outlives an owner, and is in all ranges or in none.
"""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...model.blocks import BlockMap, Blueprint
from ...model.central import Central, gathered
from ...model.layout import Layout, cut_segments, holders
from ...model.ranges import Ranges, Split, overlap, put_, take
from ...transport import protocol, wire
from ...transport.protocol import Moved, Piece, RejectedResult, RunDescription, packed, unpacked
from ...transport.ray_cluster import ray
from ..aggregator import Mean, Result
from ..checkpoint import write_tensors
from ..run import Progress, dtype_of, n_rows
from .actor import Actor, settings

# where the model's parameters and blocks lie: an owner has no model, nor the seconds of its imports
Whole = tuple[Layout, BlockMap]


@dataclass(frozen=True)
class Standing:
    """What an owner has, nothing if it is new, and where the run stood after these rounds."""

    pid: int
    machine: str  # Ray's name of it
    kept: set[tuple[int, int]]  # (round, range)
    progress: dict[int, Progress]  # by round


@dataclass(frozen=True)
class Attempt:
    """One try of a round: a piece that comes after it has ended does no harm."""

    name: str
    blueprints: list[Blueprint]  # [worker]
    splits: list[Split]  # [worker]
    state: Tensor  # its range before the round
    results: dict[int, Tensor] = field(default_factory=dict)  # worker -> its checked piece


class Owner(Actor):
    """Cuts, checks, adds up and keeps range `i` of `n`."""

    of: tuple = ()  # the run, i and n

    def enter(self, run: RunDescription, whole: Whole, i: int, n: int) -> Standing:
        """Where it stands; an owner in another run, or of another range, forgets that."""
        # not the model's config: what a checkpoint says of it has other words for the same shapes
        of = run.config, run.version, i, n
        if self.of != of:
            self.cfg, segments = settings(run), cut_segments(*whole, torch.device("cpu"))
            self.ranges, self.i, self.small = Ranges(segments, n), i, Ranges(segments, n).small(i)
            self.dtype, self.rows = dtype_of(self.cfg), n_rows(self.cfg)
            self.outer = self.cfg.train.nesterov()
            self.kept: dict[tuple[int, int], Tensor] = {}  # (round, range) -> its state
            self.progress: dict[int, Progress] = {}  # after these rounds
            self.attempt: Attempt | None = None
            # memory of the last round, for the next
            self.sums: Tensor | None = None
            self.spare: Tensor | None = None
            self.of = of
        machine = ray.get_runtime_context().get_node_id()
        return Standing(os.getpid(), machine, set(self.kept), self.progress)

    def load(self, progress: Progress, piece: Piece, first: int) -> None:
        """Its range at the start, in parts: the values from the `first` on. It counts once whole,
        for a driver may die in between."""
        if first == 0:  # weights, moments, and with an outer optimizer its momentum
            n_rows = self.rows + (self.outer is not None)
            self.coming = torch.empty(n_rows, self.ranges.whole.size(self.i), dtype=self.dtype)
            self.kept, self.progress = {}, {progress.round: progress}
        values, rest = unpacked(piece).view(-1), self.coming.view(-1)[first:]
        rest[: len(values)] = values
        if len(values) == len(rest):
            self.kept[progress.round, self.i] = self.coming

    def keep(self, progress: Progress, i: int, piece: Piece) -> None:
        """A range after a round: its predecessor's, or its own that it had lost."""
        self.kept[progress.round, i] = unpacked(piece).clone()
        self.progress[progress.round] = progress

    @ray.method(num_returns=2)
    def give(self, round: int, i: int, n_rows: int | None = None) -> tuple[bool, Piece]:
        """A range that it keeps, or its first rows, after a word that they are there."""
        return True, packed(self.kept[round, i][:n_rows])

    def _own(self, round: int) -> Tensor:
        if (round, self.i) not in self.kept:  # its neighbours were lost before they could help it
            raise OSError(f"owner {self.i} has no range yet")
        return self.kept[round, self.i]

    def _central(self, state: Tensor) -> Central:
        return Central(self.small, state, self.outer is not None, self.sums)

    def cut(
        self, attempt: str, after: int, blueprints: list[Blueprint]
    ) -> tuple[bool | Piece, ...]:
        """(3) A try of the round `after` so many: its part of every worker's subnet, after a word
        that it is done. Other rounds are forgotten: nobody prepares one before all have cut."""
        state, split = self._own(after), self.ranges.split
        for round, i in [at for at in self.kept if at[0] != after]:
            old = self.kept.pop((round, i))
            self.spare = old if i == self.i else self.spare
        self.progress = {after: self.progress[after]}
        splits = [split(self.ranges.segments.index(blueprint)) for blueprint in blueprints]
        self.attempt = Attempt(attempt, blueprints, splits, state)
        central = self._central(state)
        parts = (gathered(central, split.inside(self.i)) for split in splits)
        return True, *(packed(wire.down(self.cfg.run.wire, part)) for part in parts)

    @ray.method(concurrency_group="pieces")  # one that does not arrive holds up no other
    def check(self, name: str, worker: int, piece: Piece) -> Moved | str:
        """Keep a worker's piece of this attempt and measure it, or say what is wrong with it."""
        attempt = self.attempt
        if attempt is None or attempt.name != name:
            return "late"
        index = attempt.splits[worker].inside(self.i)
        sent = gathered(self._central(attempt.state), index, 1)[0]
        try:
            result = protocol.read_result(self.cfg.run.wire, piece, (self.rows, sent.numel()), sent)
            moved = protocol.measured(result, sent)
        except RejectedResult as error:
            return str(error)
        attempt.results[worker] = result
        return moved

    @ray.method(num_returns=2)
    def prepare(self, there: list[int], progress: Progress) -> tuple[bool, Piece | None]:
        """(5) Its range after the round: the mean over these workers; and a copy to be kept."""
        assert self.attempt is not None
        attempt, self.attempt = self.attempt, None
        state = torch.empty_like(attempt.state) if self.spare is None else self.spare
        central = self._central(state.copy_(attempt.state))
        results = [Result(attempt.results[i], attempt.splits[i].inside(self.i)) for i in there]
        held = holders(self.small, [attempt.blueprints[i] for i in there])
        share = len(there) / self.cfg.train.n_workers
        Mean(central, held, self.outer, share).add(*results).commit_()
        self.kept[progress.round, self.i], self.progress[progress.round] = state, progress
        self.sums, self.spare = central.sums, None
        return True, packed(state) if self.ranges.n > 1 else None

    def lend(self, round: int) -> tuple[bool | Piece, ...]:
        """What every owner needs of its range to write whole tensors, after a word."""
        own, state = self.ranges.whole.slices(self.i), self._own(round)
        places = (overlap(own, span)[0] for span in self.ranges.tensors)
        return True, *(packed(take(state, place)) for place in places)

    @ray.method(concurrency_group="disk")  # while rounds go on
    def write(self, draft: Path, *lent: Piece) -> dict[str, Any]:
        """Its part of a checkpoint; name -> bytes where the folder cannot be seen from here."""
        span, full = self.ranges.tensors[self.i], self.ranges.segments.full
        begin = full.offsets.items()
        names = [n for n, at in begin if any(part.start <= at < part.stop for part in span)]
        mine = Layout({name: full.shapes[name] for name in names}, 0, (), ())
        parts = [unpacked(piece) for piece in lent]
        state = torch.empty(len(parts[0]), mine.n_params, dtype=self.dtype)
        for i, part in enumerate(parts):
            put_(state, overlap(self.ranges.whole.slices(i), span)[1], part)
        name = f"-{self.i + 1:05d}-of-{self.ranges.n:05d}" if self.ranges.n > 1 else ""
        with tempfile.TemporaryDirectory() as own:
            folder = draft if draft.is_dir() else Path(own)
            if names:
                write_tensors(mine, state, self.outer is not None, folder, name)
            return {path.name: np.fromfile(path, np.uint8) for path in Path(own).iterdir()}


OWNER = Owner
