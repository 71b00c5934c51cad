"""(3), (5) An owner of a range of the central model, as a Ray actor.

It keeps weights, moments and outer momentum of its range after the last committed round, and of its
predecessor's. A round is *prepared* beside them; `settle` makes it the committed one, or throws it
away. So a range outlives its owner, and a round is in all ranges or in none.
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
from ...transport.protocol import Norms, Piece, RejectedResult, RunDescription, packed, unpacked
from ...transport.ray_cluster import ray
from ..aggregator import Result, aggregate_
from ..checkpoint import write_tensors
from ..run import Progress, dtype_of, n_rows
from .actor import Actor, settings

# where the model's parameters and blocks lie: an owner has no model, nor the seconds of its imports
Whole = tuple[Layout, BlockMap]


@dataclass(frozen=True)
class Standing:
    """What an owner has: nothing yet, or a committed round, and ranges after that or others."""

    pid: int
    machine: str  # Ray's name of it
    progress: Progress | None
    kept: set[tuple[int, int]]  # (round, range)


@dataclass(frozen=True)
class Attempt:
    """One try of a round: a piece that comes after it has ended does no harm."""

    name: str
    blueprints: list[Blueprint]
    splits: list[Split]  # [worker]
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
            self.progress: Progress | None = None
            self.kept: dict[tuple[int, int], Tensor] = {}  # (round, range) -> its state
            self.attempt = Attempt("", [], [])
            # memory of the last round, for the next
            self.sums: Tensor | None = None
            self.spare: Tensor | None = None
            self.of = of
        machine = ray.get_runtime_context().get_node_id()
        return Standing(os.getpid(), machine, self.progress, set(self.kept))

    def keep(self, round: int, i: int, state: Piece, first: int = 0) -> None:
        """Its own or its predecessor's range after a round, or its values from the `first` on.

        It counts once it is whole: a driver may die in between.
        """
        if first == 0:  # weights, moments, and with an outer optimizer its momentum
            n_rows = self.rows + (self.outer is not None)
            self.coming = torch.empty(n_rows, self.ranges.whole.size(i), dtype=self.dtype)
        values, rest = unpacked(state).view(-1), self.coming.view(-1)[first:]
        rest[: len(values)] = values
        if len(values) == len(rest):
            self.kept[round, i] = self.coming

    def give(self, i: int, n_rows: int | None = None) -> Piece:
        """A committed range that it keeps, or its first rows."""
        assert self.progress
        return packed(self.kept[self.progress.round, i][:n_rows])

    @property
    def state(self) -> Tensor:
        """Its own range after the committed round."""
        if not self.progress:  # a new owner, whose neighbours were lost before they could help it
            raise OSError(f"owner {self.i} has no range yet")
        return self.kept[self.progress.round, self.i]

    def _central(self, state: Tensor) -> Central:
        return Central(self.small, state, self.outer is not None, self.sums)

    def cut(self, attempt: str, blueprints: list[Blueprint]) -> tuple[bool | Piece, ...]:
        """(3) A round begins: its part of every worker's subnet, after a word that it is done."""
        indices = map(self.ranges.segments.index, blueprints)
        self.attempt = Attempt(attempt, blueprints, list(map(self.ranges.split, indices)))
        central = self._central(self.state)
        parts = (gathered(central, split.inside(self.i)) for split in self.attempt.splits)
        return True, *(packed(wire.down(self.cfg.run.wire, part)) for part in parts)

    @ray.method(concurrency_group="pieces")  # one that does not arrive holds up no other
    def check(self, name: str, worker: int, piece: Piece) -> Norms | str:
        """Keep a worker's piece of this attempt and measure it, or say what is wrong with it."""
        attempt = self.attempt
        if attempt.name != name:
            return "late"
        sent = gathered(self._central(self.state), attempt.splits[worker].inside(self.i), 1)[0]
        try:
            result = protocol.read_result(self.cfg.run.wire, piece, (self.rows, sent.numel()), sent)
        except RejectedResult as error:
            return str(error)
        attempt.results[worker] = result
        return protocol.norms_of(result, sent)

    def prepare(self, there: list[int], round: int) -> tuple[bool, Piece | None]:
        """(5) The mean over these workers beside the committed range, and a copy to be kept."""
        state = torch.empty_like(self.state) if self.spare is None else self.spare
        central, attempt = self._central(state.copy_(self.state)), self.attempt
        results = [Result(attempt.results[i], attempt.splits[i].inside(self.i)) for i in there]
        held = holders(self.small, [attempt.blueprints[i] for i in there])
        share = len(there) / self.cfg.train.n_workers
        aggregate_(central, results, held, self.outer, share)
        attempt.results.clear()
        self.kept[round, self.i], self.sums, self.spare = state, central.sums, None
        return True, packed(state) if self.ranges.n > 1 else None

    def settle(self, progress: Progress) -> None:
        """What it has of this round is committed; what it has of another is thrown away."""
        self.progress = progress
        self.attempt.results.clear()
        for round, i in [at for at in self.kept if at[0] != progress.round]:
            old = self.kept.pop((round, i))
            self.spare = old if i == self.i else self.spare

    def lend(self, i: int) -> Piece:
        """What owner i needs of the committed range to write whole tensors."""
        place, _ = overlap(self.ranges.whole.slices(self.i), self.ranges.tensors[i])
        return packed(take(self.state, place))

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
