"""The sharded engine: every rank owns 1/S of the central model and trains a worker too.

The central buffer is cut into tiles, a stretch of the shared segments and one of the blocks'
segments each, and every rank owns as many. A subnet's segments are sorted, so a tile is also two
slices of every subnet's buffer. One all-to-all a tile brings each worker its part of it (down) or
its owner all results for it (up); the owner then does what the central rank does elsewhere, in
worker order, so the bits are the same. Bytes per link do not grow with S.

A rank that dies takes its shard with it: the others stop, and the run resumes from its checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...config import Wire
from ...model.central import Central
from ...model.layout import Layout, Segments, gather_
from ...transport import wire
from ...transport.ranks import Cluster
from ..aggregator import Result, Stats, aggregate_
from ..assignments import Deal
from ..run import Progress, Run
from .engine import Engine, Outcome

AHEAD = 6  # exchanges under way: a link that has little to carry in one goes on with the next
PIECE = 1 << 20  # bytes to one peer at a time (docs/log.md)


class Sharded(Engine):
    """Rounds without a centre: every rank deals for itself, and all agree.

    The central tensors of the central rank are a copy that `collect_` fills. A death ends the run.
    """

    is_whole = False

    def __init__(self, run: Run):
        super().__init__(run)
        outer = run.cfg.train.nesterov() is not None
        kind, dtype = run.cfg.run.wire, run.cut.dtype
        self.shard = spread(run.central, run.segments, run.cluster, run.rows, outer, dtype, kind)

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
        after = work.committed()
        self.deal_ahead(after)
        wired = cluster.n_sent + cluster.n_received - before
        return Outcome(stats, work.traffic(wired), after)

    def collect_(self) -> None:
        self.shard.collect_(self.run.central)


@dataclass(frozen=True)
class Tile:
    """What one owner handles at a time: [start, end) of shared and of block segments."""

    shared: tuple[int, int]
    blocks: tuple[int, int]  # counted from the first partitioned run

    def spans(self, segments: Segments) -> tuple[slice, slice]:
        """Its two slices of a full buffer."""
        first, grain = segments.full.n_shared, segments.grain
        shared, blocks = (tuple(grain * run for run in ends) for ends in (self.shared, self.blocks))
        return slice(*shared), slice(first + blocks[0], first + blocks[1])

    def size(self, segments: Segments) -> int:
        """Its elements."""
        return sum(span.stop - span.start for span in self.spans(segments))


@dataclass(frozen=True)
class Cut:
    """Where one worker's segments lie in the tiles."""

    index: Tensor  # its blocks' segments, sorted
    ends: np.ndarray  # [chunk, owner, 2]: of each tile's part in `index`

    def pieces(self, segments: Segments, tile: Tile, place: tuple[int, int]) -> tuple[slice, slice]:
        """A tile's two slices of the subnet's buffer."""
        first, grain = segments.full.n_shared, segments.grain
        start, end = self.ends[place]
        shared = slice(grain * tile.shared[0], grain * tile.shared[1])
        return shared, slice(first + grain * int(start), first + grain * int(end))

    def inside(self, tile: Tile, place: tuple[int, int]) -> Tensor:
        """Its segments of a tile's blocks, counted from the tile's first one."""
        start, end = self.ends[place]
        return self.index[int(start) : int(end)] - tile.blocks[0]

    def size(self, segments: Segments, tile: Tile, place: tuple[int, int]) -> int:
        """Elements of its part of a tile."""
        start, end = self.ends[place]
        return segments.grain * (tile.shared[1] - tile.shared[0] + int(end) - int(start))


def cut_tiles(segments: Segments, n_ranks: int, row_bytes: int) -> list[list[Tile]]:
    """[chunk][owner]; a tile has at most `PIECE` bytes, at `row_bytes` for a parameter."""
    n_chunks = max(1, -(-segments.full.n_params * row_bytes // (PIECE * n_ranks)))
    n_shared = segments.full.n_shared // segments.grain
    n_blocks = segments.full.n_params // segments.grain - n_shared

    def ends(n_segments: int, i: int) -> tuple[int, int]:
        return n_segments * i // (n_ranks * n_chunks), n_segments * (i + 1) // (n_ranks * n_chunks)

    def tile(i: int) -> Tile:
        return Tile(ends(n_shared, i), ends(n_blocks, i))

    # neighbours have different owners: so a worker's blocks, wherever they lie, come from all of
    # them
    return [[tile(c * n_ranks + owner) for owner in range(n_ranks)] for c in range(n_chunks)]


def spread(
    central: Central | None,
    segments: Segments,
    cluster: Cluster,
    rows: int,
    outer: bool,
    dtype: torch.dtype,
    kind: Wire,
) -> Shard:
    """Give every rank its shard of what the central rank created or restored."""
    tiles = cut_tiles(segments, cluster.world_size, rows * dtype.itemsize)
    centrals: list[Central] = []
    nothing = torch.empty(0, dtype=torch.uint8, device=cluster.device)

    def send(c: int) -> tuple[list[Tensor], list[int]]:
        size = (rows + outer) * tiles[c][cluster.rank].size(segments)
        sizes = [wire.n_bytes("fp32", size, dtype)] + [0] * (cluster.world_size - 1)
        if central is None:
            return [nothing] * cluster.world_size, sizes
        parts = (
            torch.cat([_get(rows, tile.spans(segments)) for rows in _rows(central)])
            for tile in tiles[c]
        )
        return [wire.encode("fp32", part) for part in parts], sizes

    def take(c: int, payloads: list[Tensor]) -> None:
        small = _small(segments, tiles[c][cluster.rank])
        whole = wire.decode("fp32", payloads[0], (rows + outer, small.full.n_params), dtype)
        velocity = whole[rows].clone() if outer else None
        centrals.append(Central(small, whole[:rows].clone(), velocity))

    _exchange(cluster, len(tiles), send, take)
    return Shard(cluster, segments, tiles, centrals, kind)


@dataclass
class Shard:
    """This rank's part of the central model; lives as long as the run."""

    cluster: Cluster
    segments: Segments
    tiles: list[list[Tile]]  # [chunk][owner]
    centrals: list[Central]  # [chunk]: its own tiles, each a small central model
    wire: Wire
    _of: tuple[Deal, list[Cut]] | None = None  # the round under way

    @property
    def rows(self) -> int:
        return self.centrals[0].buffer.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.centrals[0].buffer.dtype

    def send_down(self, deal: Deal) -> Tensor:
        """What this rank's worker trains, [rows, n_subnet], tile by tile from all owners."""
        segments, rank, cuts = self.segments, self.cluster.rank, self._cuts(deal)
        widths = segments.block_map.widths(deal.blueprints[rank])
        n = segments.full.narrowed(segments.block_map, widths).n_params
        buffer = torch.empty(self.rows, n, dtype=self.dtype, device=self.cluster.device)

        def shapes(c: int) -> list[tuple[int, int]]:
            """Of this worker's part of each owner's tile."""
            places = [(c, owner) for owner in range(len(self.tiles[c]))]
            return [
                (self.rows, cuts[rank].size(segments, tile, place))
                for tile, place in zip(self.tiles[c], places, strict=True)
            ]

        def send(c: int) -> tuple[list[Tensor], list[int]]:
            tile, central = self.tiles[c][rank], self.centrals[c]
            parts = [_gather(central, cut.inside(tile, (c, rank))) for cut in cuts]
            sizes = [wire.down_bytes(self.wire, shape, self.dtype) for shape in shapes(c)]
            return [wire.down(self.wire, part) for part in parts], sizes

        def take(c: int, payloads: list[Tensor]) -> None:
            for owner, shape in enumerate(shapes(c)):
                part = wire.read_down(self.wire, payloads[owner], shape, self.dtype)
                pieces = cuts[rank].pieces(segments, self.tiles[c][owner], (c, owner))
                _set(buffer, pieces, part)

        _exchange(self.cluster, len(self.tiles), send, take)
        return buffer

    def send_up_(
        self, deal: Deal, sent: Tensor, trained: Tensor, outer: tuple[float, float] | None
    ) -> None:
        """This rank's result to all owners, and all results into its own tiles, in worker order."""
        segments, rank, cuts = self.segments, self.cluster.rank, self._cuts(deal)
        exact = self.wire == "fp32"  # values come up, not changes: what went down is not needed

        def shapes(c: int) -> list[tuple[int, int]]:
            """Of each worker's part of this owner's tile."""
            mine = self.tiles[c][rank]
            return [(self.rows, cut.size(segments, mine, (c, rank))) for cut in cuts]

        def send(c: int) -> tuple[list[Tensor], list[int]]:
            parts = []
            for owner, tile in enumerate(self.tiles[c]):
                pieces = cuts[rank].pieces(segments, tile, (c, owner))
                came = sent[0] if exact else _get(sent[:1], pieces)[0]
                parts.append(wire.up(self.wire, _get(trained, pieces), came))
            return parts, [wire.up_bytes(self.wire, shape, self.dtype) for shape in shapes(c)]

        def take(c: int, payloads: list[Tensor]) -> None:
            central, tile, results = self.centrals[c], self.tiles[c][rank], []
            for worker, shape in enumerate(shapes(c)):
                index = cuts[worker].inside(tile, (c, rank))
                went = central.weights if exact else _gather(central, index, 1)[0]
                buffer = wire.read_up(self.wire, payloads[worker], shape, went)
                results.append(Result(worker, buffer, index, Stats(0.0, 0, 0)))
            aggregate_(central, results, deal.holders, outer)

        _exchange(self.cluster, len(self.tiles), send, take)

    def collect_(self, central: Central | None) -> None:
        """Bring all shards to the central rank's copy of the model: to evaluate and to save it."""
        segments, n_ranks = self.segments, self.cluster.world_size
        nothing = torch.empty(0, dtype=torch.uint8, device=self.cluster.device)
        rows = self.rows + (self.centrals[0].velocity is not None)

        def send(c: int) -> tuple[list[Tensor], list[int]]:
            whole = torch.cat(_rows(self.centrals[c]))
            parts = [wire.encode("fp32", whole)] + [nothing] * (n_ranks - 1)
            counts = [rows * tile.size(segments) for tile in self.tiles[c]]
            sizes = [wire.n_bytes("fp32", n, self.dtype) for n in counts]
            return parts, sizes if central is not None else [0] * n_ranks

        def take(c: int, payloads: list[Tensor]) -> None:
            if central is not None:
                for tile, payload in zip(self.tiles[c], payloads, strict=True):
                    shape = (rows, tile.size(segments))
                    whole = wire.decode("fp32", payload, shape, self.dtype)
                    spans = tile.spans(segments)
                    _set(central.buffer, spans, whole[: self.rows])
                    if central.velocity is not None:
                        _set(central.velocity[None], spans, whole[self.rows :])

        _exchange(self.cluster, len(self.tiles), send, take)

    def _cuts(self, deal: Deal) -> list[Cut]:
        """Where each worker's segments lie in the tiles."""
        if self._of is None or self._of[0] is not deal:
            bounds = np.array([[tile.blocks for tile in chunk] for chunk in self.tiles])
            found = [np.searchsorted(index.cpu().numpy(), bounds) for index in deal.indices]
            self._of = deal, [Cut(*pair) for pair in zip(deal.indices, found, strict=True)]
        return self._of[1]


def _exchange(
    cluster: Cluster,
    n_chunks: int,
    send: Callable[[int], tuple[list[Tensor], list[int]]],
    take: Callable[[int, list[Tensor]], None],
) -> None:
    """All chunks in order, some on their way while others are packed and taken."""
    under_way: deque[Callable[[], list[Tensor]]] = deque()
    n_sent = 0
    for c in range(n_chunks):
        while n_sent < min(n_chunks, c + AHEAD):
            under_way.append(cluster.exchange(*send(n_sent)))
            n_sent += 1
        take(c, under_way.popleft()())


def _small(segments: Segments, tile: Tile) -> Segments:
    """The segments of a tile, as those of a small central model."""
    shared, blocks = tile.spans(segments)
    first = segments.full.n_shared // segments.grain
    block_of = torch.cat(
        [
            segments.block_of[tile.shared[0] : tile.shared[1]],
            segments.block_of[first + tile.blocks[0] : first + tile.blocks[1]],
        ]
    )
    n_shared, n_blocks = shared.stop - shared.start, blocks.stop - blocks.start
    layout = Layout({"shared": (n_shared,), "blocks": (n_blocks,)}, n_shared, (), ())
    return Segments(layout, segments.block_map, segments.grain, segments.numbers, {}, block_of)


def _gather(central: Central, index: Tensor, rows: int | None = None) -> Tensor:
    """A worker's part of a tile."""
    source, segments = central.buffer[:rows], central.segments
    n = segments.full.n_shared + index.numel() * segments.grain
    out = torch.empty(len(source), n, dtype=source.dtype, device=source.device)
    return gather_(out, source, segments, index)


def _get(buffer: Tensor, pieces: tuple[slice, slice]) -> Tensor:
    return torch.cat([buffer[:, piece] for piece in pieces], dim=1)


def _set(buffer: Tensor, pieces: tuple[slice, slice], part: Tensor) -> None:
    n_shared = pieces[0].stop - pieces[0].start
    buffer[:, pieces[0]] = part[:, :n_shared]
    buffer[:, pieces[1]] = part[:, n_shared:]


def _rows(central: Central) -> list[Tensor]:
    """Weights and moments, and the outer momentum as the last row."""
    velocity = central.velocity
    return [central.buffer] if velocity is None else [central.buffer, velocity[None]]
