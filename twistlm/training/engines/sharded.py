"""Torchrun's ranks: owners of the central model send subnets to workers, and take their results.

With `sharded` every rank owns an equal part of the central model, in small ranges
(`model/ranges.py`). One exchange brings each worker its part of every owner's next range (down) or
each owner all results for it (up), so bytes per link do not grow with S. With `masked`, `true` and
`hybrid` rank 0 owns the whole model as one range.

A rank that dies takes what it owns with it: the others stop, and the run resumes from its
checkpoint.
"""

from collections import deque
from collections.abc import Callable, Iterator
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
from ..aggregator import Mean, Result, Stats
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
        before = cluster.n_bytes
        sent = self.shard.send_down(work.blueprints)
        # none on a rank that only has the central model
        results = [self.train(work, worker, sent) for worker in cluster.workers]
        stats = self.share(sum((result.stats for result in results), Stats()))
        self.shard.send_up_(sent, results[0].buffer if results else sent)
        return work.outcome(stats, cluster.n_bytes - before)

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
        self.state_rows = self.rows + (self.outer is not None)
        self.n_owners = n = cluster.world_size if cfg.run.variant == "sharded" else 1
        n_pieces = -(-segments.full.n_params * self.rows * self.dtype.itemsize // (PIECE * n))
        self.ranges = Ranges(segments, n * max(1, n_pieces) if n > 1 else 1)
        # its own ranges, each a small central model
        self.centrals = {} if central is None or n > 1 else {0: central}
        self.splits: dict[int, Split] = {}  # rank -> the subnet of its worker in this round
        if n > 1:
            state = cluster.nothing if central is None else central.state
            for i, came in self._exchange_whole("up", lambda i: self.ranges.whole.get(state, i)):
                own = came.clone(), self.outer is not None
                self.centrals[i] = Central(self.ranges.small(i), *own)

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

        for i, (came,) in self._exchange("down", self.splits, self.wire, self.rows, pack):
            assert mine is not None
            shape = (self.rows, mine.size(i))
            mine.set_(buffer, i, wire.read_down(self.wire, came, shape, self.dtype))
        return buffer

    def send_up_(self, sent: Tensor, trained: Tensor) -> None:
        """This rank's result to all owners, all results into its own ranges, in worker order."""
        exact = self.wire == "fp32"  # values come up, not changes: what went down is not needed

        def pack(i: int, mine: Split) -> Tensor:
            went = sent[0] if exact else mine.get(sent[:1], i)[0]
            return wire.up(self.wire, mine.get(trained, i), went)

        for i, came in self._exchange("up", self.splits, self.wire, self.rows, pack):
            central, results = self.centrals[i], []
            for split, payload in zip(self.splits.values(), came, strict=True):
                index, shape = split.inside(i), (self.rows, split.size(i))
                went = central.weights if exact else gathered(central, index, 1)[0]
                results.append(Result(wire.read_up(self.wire, payload, shape, went), index))
            Mean(central, self.holders, self.outer).add(*results).commit_()

    def collect_(self, central: Central | None) -> None:
        """Bring all shards to the central rank's copy of the model: to evaluate and to save it."""
        if self.n_owners > 1:
            for i, came in self._exchange_whole("down", lambda i: self.centrals[i].state):
                assert central is not None
                self.ranges.whole.set_(central.state, i, came)

    def _exchange_whole(
        self, way: Literal["down", "up"], state: Callable[[int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """All ranges with moments and momentum, between their owners and the central rank."""
        whole, rows = self.ranges.whole, self.state_rows

        def pack(i: int, _: Split) -> Tensor:
            return wire.encode("fp32", state(i))

        for i, (came,) in self._exchange(way, {0: whole}, "fp32", rows, pack):
            yield i, wire.decode("fp32", came, (rows, whole.size(i)), self.dtype)

    def _exchange(
        self,
        way: Literal["down", "up"],
        splits: dict[int, Split],  # of ranks that every owner sends to, or that send to it
        kind: Wire,
        rows: int,
        pack: Callable[[int, Split], Tensor],  # range i of a rank's buffer
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """A range of every owner at a time, some on their way while others are packed and taken.

        Yields what came here for range i, in the ranks' order; to be taken to its end everywhere.
        """
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
                    yield i, [came[i % n]]
                elif way == "up" and cluster.rank == i % n:
                    yield i, [came[peer] for peer in splits]
