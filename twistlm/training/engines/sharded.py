"""Torchrun's ranks: owners of the central model send subnets to workers, and take their results.

With `sharded` every rank owns an equal part of the central model, in small ranges
(`model/ranges.py`). One exchange brings each worker its part of every owner's next range (down) or
each owner all results for it (up), so bytes per link do not grow with S. With `masked`, `true` and
`hybrid` rank 0 owns the whole model as one range.

A rank that dies takes what it owns with it: the others stop, and the run resumes from its
checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ...config import Wire
from ...model.blocks import Blueprint
from ...model.central import Central, gathered
from ...model.layout import Segments, holders
from ...model.ranges import Ranges, Split
from ...transport import wire
from ...transport.ranks import Cluster
from ..aggregator import Result, Stats, aggregate_
from ..assignments import Outcome
from ..run import Progress, Run
from .engine import Engine

AHEAD = 6  # exchanges under way: a link that has little to carry in one goes on with the next
PIECE = 1 << 20  # bytes to one peer at a time (docs/log.md)


class Sharded(Engine):
    """Every rank deals for itself, so that only weights travel. A death ends the run."""

    def __init__(self, run: Run, start: Progress):
        super().__init__(run, start)
        cfg, cluster = run.cfg, run.cluster
        n_owners = cluster.world_size if cfg.run.variant == "sharded" else 1
        what = (run.rows, cfg.train.nesterov() is not None, run.cut.dtype, cfg.run.wire)
        self.shard = Shard(run.central, run.cut.segments, cluster, *what, n_owners)
        self.is_whole = n_owners == 1  # else the central rank has a copy that `collect_` fills

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
        trained = results[0].buffer if results else sent
        self.shard.send_up_(sent, trained, run.cfg.train.nesterov())
        return work.outcome(stats, cluster.n_sent + cluster.n_received - before)

    def collect_(self) -> None:
        self.shard.collect_(self.run.central)


class Shard:
    """This rank's ranges of what the central rank created or restored; lives as long as the run.

    Range i belongs to rank i % n of n owners: neighbours have different owners, so a worker's
    blocks, wherever they lie, come from all of them.
    """

    def __init__(
        self,
        central: Central | None,
        segments: Segments,
        cluster: Cluster,
        rows: int,
        outer: bool,
        dtype: torch.dtype,
        kind: Wire,
        n_owners: int,
    ):
        self.cluster, self.rows, self.n_owners = cluster, rows, n_owners
        self.dtype, self.wire, self.state_rows = dtype, kind, rows + outer
        n_pieces = -(-segments.full.n_params * rows * dtype.itemsize // (PIECE * n_owners))
        self.ranges = Ranges(segments, n_owners * max(1, n_pieces) if n_owners > 1 else 1)
        self.centrals: dict[int, Central] = {}  # its own ranges, each a small central model
        self.splits: dict[int, Split] = {}  # rank -> the subnet of its worker in this round
        if n_owners == 1:
            self.centrals |= {} if central is None else {0: central}
            return

        def pack(i: int, _: int) -> Tensor:
            assert central is not None
            return wire.encode("fp32", self.ranges.whole.get(central.state, i))

        def unpack(i: int, came: list[Tensor]) -> None:
            state = self._state(i, came[0]).clone()
            self.centrals[i] = Central(self.ranges.small(i), state, outer)

        self._exchange([0], "up", self._state_bytes, pack, unpack)

    def send_down(self, blueprints: list[Blueprint]) -> Tensor:
        """What this rank's worker trains, [rows, n_subnet], range by range from all owners."""
        segments = self.ranges.segments
        splits = map(self.ranges.split, map(segments.index, blueprints))
        self.holders = holders(segments, blueprints)
        self.splits = dict(zip(self.cluster.ranks, splits, strict=True))
        mine = self.splits.get(self.cluster.rank)
        n = sum(mine.size(i) for i in range(self.ranges.n)) if mine else 0
        buffer = torch.empty(self.rows, n, dtype=self.dtype, device=self.cluster.device)

        def n_bytes(i: int, rank: int) -> int:
            return wire.down_bytes(self.wire, self._shape(i, rank), self.dtype)

        def pack(i: int, rank: int) -> Tensor:
            return wire.down(self.wire, gathered(self.centrals[i], self.splits[rank].inside(i)))

        def unpack(i: int, came: list[Tensor]) -> None:
            assert mine is not None
            shape = (self.rows, mine.size(i))
            mine.set_(buffer, i, wire.read_down(self.wire, came[0], shape, self.dtype))

        self._exchange([*self.splits], "down", n_bytes, pack, unpack)
        return buffer

    def send_up_(self, sent: Tensor, trained: Tensor, outer: tuple[float, float] | None) -> None:
        """This rank's result to all owners, all results into its own ranges, in worker order."""
        exact = self.wire == "fp32"  # values come up, not changes: what went down is not needed

        def n_bytes(i: int, rank: int) -> int:
            return wire.up_bytes(self.wire, self._shape(i, rank), self.dtype)

        def pack(i: int, rank: int) -> Tensor:
            mine = self.splits[rank]
            came = sent[0] if exact else mine.get(sent[:1], i)[0]
            return wire.up(self.wire, mine.get(trained, i), came)

        def unpack(i: int, came: list[Tensor]) -> None:
            central, results = self.centrals[i], []
            for worker, (rank, payload) in enumerate(zip(self.splits, came, strict=True)):
                index = self.splits[rank].inside(i)
                went = central.weights if exact else gathered(central, index, 1)[0]
                buffer = wire.read_up(self.wire, payload, self._shape(i, rank), went)
                results.append(Result(worker, buffer, index))
            aggregate_(central, results, self.holders, outer)

        self._exchange([*self.splits], "up", n_bytes, pack, unpack)

    def collect_(self, central: Central | None) -> None:
        """Bring all shards to the central rank's copy of the model: to evaluate and to save it."""

        def unpack(i: int, came: list[Tensor]) -> None:
            assert central is not None
            self.ranges.whole.set_(central.state, i, self._state(i, came[0]))

        def pack(i: int, _: int) -> Tensor:
            return wire.encode("fp32", self.centrals[i].state)

        if self.n_owners > 1:
            self._exchange([0], "down", self._state_bytes, pack, unpack)

    def _exchange(
        self,
        peers: list[int],  # ranks that every owner sends to (down), or that send to it (up)
        way: Literal["down", "up"],
        n_bytes: Callable[[int, int], int],  # of range i, between its owner and a peer
        pack: Callable[[int, int], Tensor],
        unpack: Callable[[int, list[Tensor]], None],  # what came for range i, in the peers' order
    ) -> None:
        """A range of every owner at a time, some on their way while others are packed and taken."""
        cluster, n = self.cluster, self.n_owners

        def begin(chunk: range) -> Callable[[], list[Tensor]]:
            parts, sizes = [cluster.nothing] * cluster.world_size, [0] * cluster.world_size
            for i in chunk:
                for peer in peers:
                    source, target = (i % n, peer) if way == "down" else (peer, i % n)
                    if source == cluster.rank:
                        parts[target] = pack(i, peer)
                    if target == cluster.rank:
                        sizes[source] = n_bytes(i, peer)
            return cluster.exchange(parts, sizes)

        chunks = [range(i, i + n) for i in range(0, self.ranges.n, n)]
        under_way: deque[Callable[[], list[Tensor]]] = deque()
        for c, chunk in enumerate(chunks):
            under_way.extend(map(begin, chunks[c + len(under_way) : c + AHEAD]))
            came = under_way.popleft()()
            for i in chunk:
                if way == "down" and cluster.rank in peers:
                    unpack(i, [came[i % n]])
                elif way == "up" and cluster.rank == i % n:
                    unpack(i, [came[peer] for peer in peers])

    def _shape(self, i: int, rank: int) -> tuple[int, int]:
        """Of the part of a worker's subnet that is in range i."""
        return self.rows, self.splits[rank].size(i)

    def _state_bytes(self, i: int, _: int) -> int:
        """Of a whole range: weights, moments, outer momentum."""
        return wire.n_bytes("fp32", self.state_rows * self.ranges.whole.size(i), self.dtype)

    def _state(self, i: int, payload: Tensor) -> Tensor:
        shape = (self.state_rows, self.ranges.whole.size(i))
        return wire.decode("fp32", payload, shape, self.dtype)
