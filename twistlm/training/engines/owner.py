"""(3), (5) An owner of a range of the central model, as a Ray actor.

It keeps its range's weights, moments and outer momentum after the last committed round, and a copy
of its predecessor's. A round is *prepared* beside them; `settle` makes it the committed one, or
throws it away. So a range outlives its owner, and a round is in all ranges or in none.
"""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...config import Config
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
    """What an owner has: nothing yet, or a committed round, one that is prepared, and copies."""

    pid: int
    machine: str  # Ray's name of it
    progress: Progress | None = None
    prepared: int | None = None
    copies: tuple[int, ...] = ()  # rounds of its predecessor's range

    def has(self, round: int) -> bool:
        """Whether it has the state after a round, committed or prepared."""
        return round in (self.progress.round if self.progress else None, self.prepared)


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
        of = getattr(run, "config", run), getattr(run, "version", ""), i, n
        if self.of != of:
            self.cfg, segments = self.settings(run), cut_segments(*whole, torch.device("cpu"))
            self.ranges, self.i, self.small = Ranges(segments, n), i, Ranges(segments, n).small(i)
            self.dtype, self.rows = dtype_of(self.cfg), n_rows(self.cfg)
            self.outer = self.cfg.train.nesterov()
            self.progress: Progress | None = None
            self.prepared: tuple[Progress, Tensor] | None = None
            self.copies: dict[int, Tensor] = {}  # round -> the predecessor's range
            self.attempt = Attempt("", [], [])
            # memory of the last round, for the next
            self.sums: Tensor | None = None
            self.spare: Tensor | None = None
            self.of = of
        prepared = self.prepared[0].round if self.prepared else None
        machine = ray.get_runtime_context().get_node_id()
        return Standing(os.getpid(), machine, self.progress, prepared, tuple(self.copies))

    def settings(self, run: RunDescription) -> Config:
        return settings(run)

    def load(self, progress: Progress, state: Piece, first: int = 0) -> None:
        """Take over a range as it was after a round, or its values from the `first` on.

        It counts once it is whole: a driver may die in between.
        """
        if first == 0:
            self.state = torch.empty(self._shape(self.i), dtype=self.dtype)
            self.progress, self.prepared, self.copies = None, None, {}
        rest = self.state.view(-1)[first:]
        n = min(rest.numel(), state.payload.size // self.dtype.itemsize)
        rest[:n] = wire.decode("fp32", unpacked(state), (n,), self.dtype)
        if n == rest.numel():
            self.progress = progress

    def _shape(self, i: int) -> tuple[int, int]:
        """[rows, n] of a whole range, and with an outer optimizer its momentum as the last row."""
        return self.rows + (self.outer is not None), self.ranges.whole.size(i)

    def _central(self, state: Tensor) -> Central:
        return Central(self.small, state, self.outer is not None, self.sums)

    def cut(self, attempt: str, blueprints: list[Blueprint]) -> tuple[bool | Piece, ...]:
        """(3) A round begins: its part of every worker's subnet, after a word that it is done."""
        indices = map(self.ranges.segments.index, blueprints)
        self.attempt = Attempt(attempt, blueprints, list(map(self.ranges.split, indices)))
        central = self._central(self.state)
        parts = (gathered(central, split.inside(self.i)) for split in self.attempt.splits)
        return True, *(packed(wire.down(self.cfg.run.wire, part)) for part in parts)

    def give(self, what: Literal["weights", "range", "copy"]) -> Piece:
        """Its part of the central weights, its whole range, or its predecessor's; all committed."""
        if what == "copy":
            (state,) = self.copies.values()
        else:
            state = self.state[:1] if what == "weights" else self.state
        return packed(wire.encode("fp32", state))

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

    def prepare(self, there: list[int], progress: Progress) -> tuple[bool, Piece | None]:
        """(5) The mean over these workers beside the committed range, and a copy to be kept."""
        state = torch.empty_like(self.state) if self.spare is None else self.spare
        central, attempt = self._central(state.copy_(self.state)), self.attempt
        results = [Result(attempt.results[i], attempt.splits[i].inside(self.i)) for i in there]
        held = holders(self.small, [attempt.blueprints[i] for i in there])
        share = len(there) / self.cfg.train.n_workers
        aggregate_(central, results, held, self.outer, share)
        attempt.results.clear()
        self.prepared, self.sums, self.spare = (progress, state), central.sums, None
        return True, packed(wire.encode("fp32", state)) if self.ranges.n > 1 else None

    def keep(self, round: int, state: Piece) -> None:
        """A copy of the predecessor's range after a round."""
        shape = self._shape((self.i - 1) % self.ranges.n)
        self.copies[round] = wire.decode("fp32", unpacked(state), shape, self.dtype).clone()

    def settle(self, round: int) -> None:
        """What it has of this round is committed; what it has of another is thrown away."""
        if self.prepared and self.prepared[0].round == round:
            self.spare, (self.progress, self.state) = self.state, self.prepared
        self.prepared = None
        self.attempt.results.clear()
        self.copies = {at: state for at, state in self.copies.items() if at == round}

    def lend(self, i: int) -> Piece:
        """What owner i needs of the committed range to write whole tensors."""
        place, _ = overlap(self.ranges.whole.slices(self.i), self.ranges.tensors[i])
        return packed(wire.encode("fp32", take(self.state, place)))

    @ray.method(concurrency_group="disk")  # while rounds go on
    def write(self, draft: Path, *lent: Piece) -> dict[str, Any]:
        """Its part of a checkpoint; name -> bytes where the folder cannot be seen from here."""
        span, full = self.ranges.tensors[self.i], self.ranges.segments.full
        begin = full.offsets.items()
        names = [n for n, at in begin if any(part.start <= at < part.stop for part in span)]
        mine = Layout({name: full.shapes[name] for name in names}, 0, (), ())
        rows, _ = self._shape(self.i)
        state = torch.empty(rows, mine.n_params, dtype=self.dtype)
        for i, piece in enumerate(lent):
            _, place = overlap(self.ranges.whole.slices(i), span)
            n = sum(part.stop - part.start for part in place)
            put_(state, place, wire.decode("fp32", unpacked(piece), (rows, n), self.dtype))
        name = f"-{self.i + 1:05d}-of-{self.ranges.n:05d}" if self.ranges.n > 1 else ""
        with tempfile.TemporaryDirectory() as own:
            folder = draft if draft.is_dir() else Path(own)
            if names:
                write_tensors(mine, state, self.outer is not None, folder, name)
            return {path.name: np.fromfile(path, np.uint8) for path in Path(own).iterdir()}


OWNER = Owner
