"""Torchrun's ranks: owners of the central model send subnets to workers, and take their results.

With `sharded` every rank owns an equal part of the central model, in small ranges
(`model/ranges.py`). One exchange brings each worker its part of every owner's next range (down) or
each owner all results for it (up), so bytes per link do not grow with S. With `masked`, `true` and
`hybrid` rank 0 owns the whole model as one range.

A rank that dies takes what it owns with it: the others stop, and the run resumes from its
checkpoint.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ...config import Config, Wire
from ...model.blocks import Blueprint
from ...model.central import Central, gathered
from ...model.layout import Segments, holders
from ...model.ranges import Ranges, Split
from ...transport import wire
from ...transport.ranks import Cluster
from ..aggregator import Result, Stats, aggregate_
from ..assignments import Outcome
from ..run import Progress, Run, dtype_of, n_rows
from .engine import Engine

AHEAD = 6  # exchanges under way: a link that has little to carry in one goes on with the next
PIECE = 1 << 20  # bytes to one peer at a time (docs/log.md)


class Sharded(Engine):
    """Every rank deals for itself, so that only weights travel. A death ends the run."""

    def __init__(self, run: Run, start: Progress):
        super().__init__(run, start)
        self.shard = Shard(run.central, run.cut.segments, run.cluster, run.cfg)
        # else the central rank has a copy that `collect_` fills
        self.is_whole = self.shard.n_owners == 1

    def round(self, progress: Progress) -> Outcome:
        """The paper's round, with subnets from all owners and results to all owners."""
        run, cluster = self.run, self.run.cluster
        if run.cfg.train.scale == "measured":
            self.collect_()
        work = self.assign(progress)
        before = cluster.n_sent + cluster.n_received
        sent = self.shard.send_down(work.blueprints)
        # none on a rank that only has the central model
        results = [self.train(work, worker, sent) for worker in cluster.workers]
        stats = self.share(sum((result.stats for result in results), Stats()))
        self.shard.send_up_(sent, results[0].buffer if results else sent)
        return work.outcome(stats, cluster.n_sent + cluster.n_received - before)

    def collect_(self) -> None:
        self.shard.collect_(self.run.central)


class Shard:
    """This rank's ranges of what the central rank created or restored; lives as long as the run.

    Range i belongs to rank i % n of n owners: neighbours have different owners, so a worker's
    blocks, wherever they lie, come from all of them.
    """

    def __init__(self, central: Central | None, segments: Segments, cluster: Cluster, cfg: Config):
        self.cluster, self.wire, self.outer = cluster, cfg.run.wire, cfg.train.nesterov()
        self.rows, self.dtype = n_rows(cfg), dtype_of(cfg)
        self.n_owners = n = cluster.world_size if cfg.run.variant == "sharded" else 1
        n_pieces = -(-segments.full.n_params * self.rows * self.dtype.itemsize // (PIECE * n))
        self.ranges = Ranges(segments, n * max(1, n_pieces) if n > 1 else 1)
        self.centrals: dict[int, Central] = {}  # its own ranges, each a small central model
        self.splits: dict[int, Split] = {}  # rank -> the subnet of its worker in this round
        if n == 1:
            self.centrals |= {} if central is None else {0: central}
            return

        def pack(i: int, whole: Split) -> Tensor:
            assert central is not None
            return wire.encode("fp32", whole.get(central.state, i))

        def unpack(i: int, came: list[Tensor]) -> None:
            state = self._state(i, came[0]).clone()
            self.centrals[i] = Central(self.ranges.small(i), state, self.outer is not None)

        self._exchange("up", {0: self.ranges.whole}, "fp32", self._state_rows, pack, unpack)

    @property
    def _state_rows(self) -> int:
        """Weights, moments, outer momentum."""
        return self.rows + (self.outer is not None)

    def send_down(self, blueprints: list[Blueprint]) -> Tensor:
        """What this rank's worker trains, [rows, n_subnet], range by range from all owners."""
        segments = self.ranges.segments
        splits = map(self.ranges.split, map(segments.index, blueprints))
        self.holders = holders(segments, blueprints)
        self.splits = dict(zip(self.cluster.ranks, splits, strict=True))
        mine = self.splits.get(self.cluster.rank)
        n = sum(mine.size(i) for i in range(self.ranges.n)) if mine else 0
        buffer = torch.empty(self.rows, n, dtype=self.dtype, device=self.cluster.device)

        def pack(i: int, split: Split) -> Tensor:
            return wire.down(self.wire, gathered(self.centrals[i], split.inside(i)))

        def unpack(i: int, came: list[Tensor]) -> None:
            assert mine is not None
            shape = (self.rows, mine.size(i))
            mine.set_(buffer, i, wire.read_down(self.wire, came[0], shape, self.dtype))

        self._exchange("down", self.splits, self.wire, self.rows, pack, unpack)
        return buffer

    def send_up_(self, sent: Tensor, trained: Tensor) -> None:
        """This rank's result to all owners, all results into its own ranges, in worker order."""
        exact = self.wire == "fp32"  # values come up, not changes: what went down is not needed

        def pack(i: int, mine: Split) -> Tensor:
            came = sent[0] if exact else mine.get(sent[:1], i)[0]
            return wire.up(self.wire, mine.get(trained, i), came)

        def unpack(i: int, came: list[Tensor]) -> None:
            central, results = self.centrals[i], []
            for split, payload in zip(self.splits.values(), came, strict=True):
                index, shape = split.inside(i), (self.rows, split.size(i))
                went = central.weights if exact else gathered(central, index, 1)[0]
                buffer = wire.read_up(self.wire, payload, shape, went)
                results.append(Result(buffer, index))
            aggregate_(central, results, self.holders, self.outer)

        self._exchange("up", self.splits, self.wire, self.rows, pack, unpack)

    def collect_(self, central: Central | None) -> None:
        """Bring all shards to the central rank's copy of the model: to evaluate and to save it."""

        def pack(i: int, _: Split) -> Tensor:
            return wire.encode("fp32", self.centrals[i].state)

        def unpack(i: int, came: list[Tensor]) -> None:
            assert central is not None
            self.ranges.whole.set_(central.state, i, self._state(i, came[0]))

        if self.n_owners > 1:
            self._exchange("down", {0: self.ranges.whole}, "fp32", self._state_rows, pack, unpack)

    def _exchange(
        self,
        way: Literal["down", "up"],
        splits: dict[int, Split],  # of ranks that every owner sends to, or that send to it
        kind: Wire,
        rows: int,
        pack: Callable[[int, Split], Tensor],  # range i of a rank's buffer
        unpack: Callable[[int, list[Tensor]], None],  # what came for range i, in the ranks' order
    ) -> None:
        """A range of every owner at a time, some on their way while others are packed and taken."""
        cluster, n = self.cluster, self.n_owners
        n_bytes = wire.down_bytes if way == "down" else wire.up_bytes

        def begin(chunk: range) -> Callable[[], list[Tensor]]:
            parts, sizes = [cluster.nothing] * cluster.world_size, [0] * cluster.world_size
            for i in chunk:
                for peer, split in splits.items():
                    source, target = (i % n, peer) if way == "down" else (peer, i % n)
                    if source == cluster.rank:
                        parts[target] = pack(i, split)
                    if target == cluster.rank:
                        sizes[source] = n_bytes(kind, (rows, split.size(i)), self.dtype)
            return cluster.exchange(parts, sizes)

        chunks = [range(i, i + n) for i in range(0, self.ranges.n, n)]
        under_way: deque[Callable[[], list[Tensor]]] = deque()
        for c, chunk in enumerate(chunks):
            under_way.extend(map(begin, chunks[c + len(under_way) : c + AHEAD]))
            came = under_way.popleft()()
            for i in chunk:
                if way == "down" and cluster.rank in splits:
                    unpack(i, [came[i % n]])
                elif way == "up" and cluster.rank == i % n:
                    unpack(i, [came[peer] for peer in splits])

    def _state(self, i: int, payload: Tensor) -> Tensor:
        shape = (self._state_rows, self.ranges.whole.size(i))
        return wire.decode("fp32", payload, shape, self.dtype)
