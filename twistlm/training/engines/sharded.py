"""The sharded engine: every rank owns 1/S of the central model and trains a worker too.

The central buffer is cut into small ranges (`model/ranges.py`), and every rank owns as many. One
exchange brings each worker its part of every owner's next range (down) or each owner all results
for it (up). Bytes per link do not grow with S.

A rank that dies takes its shard with it: the others stop, and the run resumes from its checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ...config import Wire
from ...model.central import Central, gathered
from ...model.layout import Segments
from ...model.ranges import Ranges, Split, state_of
from ...transport import wire
from ...transport.ranks import Cluster
from ..aggregator import Result, aggregate_
from ..assignments import Deal, Outcome
from ..run import Progress, Run
from .engine import Engine

AHEAD = 6  # exchanges under way: a link that has little to carry in one goes on with the next
PIECE = 1 << 20  # bytes to one peer at a time (docs/log.md)


class Sharded(Engine):
    """Rounds without a centre: every rank deals for itself, and all agree.

    The central tensors of the central rank are a copy that `collect_` fills. A death ends the run.
    """

    is_whole = False

    def __init__(self, run: Run, start: Progress):
        super().__init__(run, start)
        outer = run.cfg.train.nesterov() is not None
        where = (run.central, run.cut.segments, run.cluster, run.rows)
        self.shard = Shard(*where, outer, run.cut.dtype, run.cfg.run.wire)

    def round(self, progress: Progress) -> Outcome:
        """The paper's round, with subnets from all owners and results to all owners."""
        run, cluster = self.run, self.run.cluster
        if run.cfg.train.scale == "measured":
            self.collect_()
        work = self.assign(progress)
        before = cluster.n_sent + cluster.n_received
        sent = self.shard.send_down(work.deal)
        result = self.train(work, cluster.rank, sent)
        stats = self.share(result.stats)
        self.shard.send_up_(work.deal, sent, result.buffer, run.cfg.train.nesterov())
        return work.outcome(stats, cluster.n_sent + cluster.n_received - before)

    def collect_(self) -> None:
        self.shard.collect_(self.run.central)


class Shard:
    """This rank's ranges of what the central rank created or restored; lives as long as the run.

    Range i belongs to rank i % n: neighbours have different owners, so a worker's blocks, wherever
    they lie, come from all ranks.
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
    ):
        self.cluster, self.segments, self.rows, self.outer = cluster, segments, rows, outer
        self.dtype, self.wire, n = dtype, kind, cluster.world_size
        n_pieces = -(-segments.full.n_params * rows * dtype.itemsize // (PIECE * n))
        self.ranges = Ranges(segments, n * max(1, n_pieces))
        self.centrals: dict[int, Central] = {}  # its own ranges, each a small central model
        self.splits: list[Split] = []  # [worker]: its subnet of this round
        whole = self.ranges.whole

        def send(chunk: range) -> list[Tensor]:
            if central is None:
                return [cluster.nothing] * n
            parts = [torch.cat([whole.get(row, i) for row in state_of(central)]) for i in chunk]
            return [wire.encode("fp32", part) for part in parts]

        def come(chunk: range) -> list[int]:
            return [self._state_bytes(chunk[cluster.rank])] + [0] * (n - 1)

        def take(chunk: range, payloads: list[Tensor]) -> None:
            i = chunk[cluster.rank]
            state = self._state(i, payloads[0]).clone()
            velocity = state[rows] if outer else None
            self.centrals[i] = Central(self.ranges.small(i), state[:rows], velocity)

        self._exchange(send, come, take)

    def send_down(self, deal: Deal) -> Tensor:
        """What this rank's worker trains, [rows, n_subnet], range by range from all owners."""
        rank = self.cluster.rank
        self.splits = [self.ranges.split(index) for index in deal.indices]
        mine, n = self.splits[rank], self.segments.layout_of(deal.blueprints[rank]).n_params
        buffer = torch.empty(self.rows, n, dtype=self.dtype, device=self.cluster.device)

        def send(chunk: range) -> list[Tensor]:
            i = chunk[rank]
            indices = [split.inside(i) for split in self.splits]
            return [wire.down(self.wire, gathered(self.centrals[i], index)) for index in indices]

        def come(chunk: range) -> list[int]:
            return [wire.down_bytes(self.wire, self._shape(mine, i), self.dtype) for i in chunk]

        def take(chunk: range, payloads: list[Tensor]) -> None:
            for i, payload in zip(chunk, payloads, strict=True):
                part = wire.read_down(self.wire, payload, self._shape(mine, i), self.dtype)
                mine.set_(buffer, i, part)

        self._exchange(send, come, take)
        return buffer

    def send_up_(
        self, deal: Deal, sent: Tensor, trained: Tensor, outer: tuple[float, float] | None
    ) -> None:
        """This rank's result to all owners, all results into its own ranges, in worker order."""
        rank, mine = self.cluster.rank, self.splits[self.cluster.rank]
        exact = self.wire == "fp32"  # values come up, not changes: what went down is not needed

        def send(chunk: range) -> list[Tensor]:
            came = [sent[0] if exact else mine.get(sent[:1], i)[0] for i in chunk]
            parts = [mine.get(trained, i) for i in chunk]
            return [wire.up(self.wire, *pair) for pair in zip(parts, came, strict=True)]

        def come(chunk: range) -> list[int]:
            shapes = [self._shape(split, chunk[rank]) for split in self.splits]
            return [wire.up_bytes(self.wire, shape, self.dtype) for shape in shapes]

        def take(chunk: range, payloads: list[Tensor]) -> None:
            i, central, results = chunk[rank], self.centrals[chunk[rank]], []
            for worker, (payload, split) in enumerate(zip(payloads, self.splits, strict=True)):
                index = split.inside(i)
                went = central.weights if exact else gathered(central, index, 1)[0]
                buffer = wire.read_up(self.wire, payload, self._shape(split, i), went)
                results.append(Result(worker, buffer, index))
            aggregate_(central, results, deal.holders, outer)

        self._exchange(send, come, take)

    def collect_(self, central: Central | None) -> None:
        """Bring all shards to the central rank's copy of the model: to evaluate and to save it."""
        rank, n, whole = self.cluster.rank, self.cluster.world_size, self.ranges.whole

        def send(chunk: range) -> list[Tensor]:
            state = torch.cat(state_of(self.centrals[chunk[rank]]))
            return [wire.encode("fp32", state)] + [self.cluster.nothing] * (n - 1)

        def come(chunk: range) -> list[int]:
            return [0] * n if central is None else [self._state_bytes(i) for i in chunk]

        def take(chunk: range, payloads: list[Tensor]) -> None:
            if central is not None:
                for i, payload in zip(chunk, payloads, strict=True):
                    parts = self._state(i, payload).split(self.rows)
                    for row, part in zip(state_of(central), parts, strict=True):
                        whole.set_(row, i, part)

        self._exchange(send, come, take)

    def _exchange(
        self,
        send: Callable[[range], list[Tensor]],  # to every rank
        come: Callable[[range], list[int]],  # bytes from every rank
        take: Callable[[range, list[Tensor]], None],
    ) -> None:
        """A range of every owner at a time, some on their way while others are packed and taken."""
        n = self.cluster.world_size
        chunks = [range(i, i + n) for i in range(0, self.ranges.n, n)]
        under_way: deque[Callable[[], list[Tensor]]] = deque()
        for c, chunk in enumerate(chunks):
            for later in chunks[c + len(under_way) : c + AHEAD]:
                under_way.append(self.cluster.exchange(send(later), come(later)))
            take(chunk, under_way.popleft()())

    def _shape(self, split: Split, i: int) -> tuple[int, int]:
        return self.rows, split.size(i)

    def _state_bytes(self, i: int) -> int:
        """Of a whole range: weights, moments, outer momentum."""
        n = (self.rows + self.outer) * self.ranges.whole.size(i)
        return wire.n_bytes("fp32", n, self.dtype)

    def _state(self, i: int, payload: Tensor) -> Tensor:
        shape = (self.rows + self.outer, self.ranges.whole.size(i))
        return wire.decode("fp32", payload, shape, self.dtype)
