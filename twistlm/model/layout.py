"""The layout of one contiguous buffer: all parameters of a model or subnet, end to end.

Shared parameters come first, and matrices before vectors: the shared part of a subnet is one slice
of the central buffer, its blocks are one gather, and what weight decay touches is two slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from ..config import BlocksConfig
from ..system.device import to_device
from . import families, huggingface, kernels
from .blocks import BlockMap, Blueprint, Shapes, State, Widths
from .huggingface import Model

MOST_GRAIN = 1024  # elements in a run


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in the buffer."""

    shapes: dict[str, tuple[int, ...]]  # in buffer order
    n_shared: int  # elements before the first partitioned parameter
    decayed: tuple[tuple[int, int], ...]  # [start, end) ranges that hold matrices
    plain: tuple[tuple[int, int], ...]  # and those that hold vectors (biases, norms)

    @cached_property
    def offsets(self) -> dict[str, int]:
        ends = accumulate(math.prod(shape) for shape in self.shapes.values())
        return dict(zip(self.shapes, [0, *ends], strict=False))

    @property
    def n_params(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def narrowed(self, block_map: BlockMap, widths: Widths) -> Layout:
        """The layout of a subnet with these widths, cut from a model with this one."""
        return layout(block_map, block_map.narrowed(self.shapes, widths))

    def views(self, buffer: Tensor) -> State:
        """Each parameter as a view of `buffer`."""
        pieces = buffer.view(-1).split([math.prod(shape) for shape in self.shapes.values()])
        named = zip(self.shapes.items(), pieces, strict=True)
        return {name: piece.view(shape) for (name, shape), piece in named}


def layout(block_map: BlockMap, shapes: Shapes) -> Layout:
    partitioned = block_map.partitioned()

    def section(name: str) -> tuple[bool, bool]:
        return name in partitioned, len(shapes[name]) < 2

    ordered = {name: tuple(shapes[name]) for name in sorted(shapes, key=section)}  # a stable sort
    spans: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # of matrices, of vectors
    n_shared = end = 0
    for (blocks, vector), names in groupby(ordered, section):
        start, end = end, end + sum(math.prod(shapes[name]) for name in names)
        spans[vector].append((start, end))
        n_shared = n_shared if blocks else end
    return Layout(ordered, n_shared, tuple(spans[False]), tuple(spans[True]))


@dataclass(frozen=True)
class Segments:
    """A full buffer as segments of `grain` elements (64 in GPT-2), none of which a cut breaks."""

    full: Layout
    block_map: BlockMap
    grain: int  # a power of two
    # parameter -> its group's name, and its segments [outer, sections, n_blocks, of a stretch]
    ids: dict[str, tuple[str, np.ndarray]]
    block_of: Tensor  # int32 [n_segments]: 0 in the shared part, else 1 + the block's number

    def layout_of(self, blueprint: Blueprint) -> Layout:
        return self.full.narrowed(self.block_map, self.block_map.widths(blueprint))

    def index(self, blueprint: Blueprint) -> Tensor:
        """Segments of a subnet's blocks in its order, counted from the first partitioned one."""
        return self._whole if blueprint == self.block_map.full() else self._index(blueprint)

    @cached_property
    def _whole(self) -> Tensor:  # workers that hold the whole model ask in every round
        return self._index(self.block_map.full())

    def _index(self, blueprint: Blueprint) -> Tensor:
        pieces = [ids[:, :, list(blueprint[group])].reshape(-1) for group, ids in self.ids.values()]
        found = np.concatenate(pieces or [np.empty(0, np.int32)])
        return to_device(torch.from_numpy(found), self.block_of.device)


def cut_segments(full: Layout, block_map: BlockMap, device: torch.device) -> Segments:
    """The segments of a full buffer: grain, and which block each belongs to."""
    partitioned = block_map.partitioned()
    stretch = full.n_shared
    for name, (_, part) in partitioned.items():
        stretch = math.gcd(stretch, part.chunk * math.prod(full.shapes[name][part.dim + 1 :]))
    grain = min(MOST_GRAIN, stretch & -stretch) if stretch else MOST_GRAIN
    ids, numbers = {}, block_map.numbers()
    block_of = np.zeros(full.n_params // grain, dtype=np.int32)
    for name in (name for name in full.shapes if name in partitioned):
        group, part = partitioned[name]
        shape, first = full.shapes[name], (full.offsets[name] - full.n_shared) // grain
        mine = np.arange(first, first + math.prod(shape) // grain, dtype=np.int32).reshape(
            math.prod(shape[: part.dim]), part.sections, group.n_blocks, -1
        )
        ids[name] = (group.name, mine)
        block_of[full.n_shared // grain + mine] = 1 + np.array(numbers[group.name])[:, None]
    return Segments(full, block_map, grain, ids, to_device(torch.from_numpy(block_of), device))


def holders(segments: Segments, blueprints: Sequence[Blueprint]) -> Tensor:
    """int32 [n_blocks, 3]: the first worker that holds a block, the last, and how many do."""
    numbers = segments.block_map.numbers()
    held = np.zeros((len(blueprints), 1 + sum(map(len, numbers.values()))), dtype=bool)
    held[:, 0] = True  # the shared part
    for worker, blueprint in enumerate(blueprints):
        for name, kept in blueprint.items():
            held[worker, [1 + numbers[name][block] for block in kept]] = True
    count, last = held.sum(0), len(held) - 1 - held[::-1].argmax(0)
    table = np.stack([held.argmax(0), last, count], 1)
    table[count == 0, :2] = -1  # nobody
    return to_device(torch.from_numpy(table.astype(np.int32)), segments.block_of.device)


def gather_(
    out: Tensor, full: Tensor, segments: Segments, index: Tensor, low: Tensor | None = None
) -> Tensor:
    """Cut subnet buffers [rows, n] out of full ones [rows, N]; `low` [n] gets row 0, rounded."""
    n_shared = segments.full.n_shared
    if _fast(full):
        kernels.take_(out, full, n_shared, index, segments.grain, low)
        return out
    out[:, :n_shared].copy_(full[:, :n_shared])
    for to, from_ in zip(_blocks(out, segments), _blocks(full, segments), strict=True):
        torch.index_select(from_, 0, index, out=to)
    if low is not None:
        low.copy_(out[0])
    return out


def scatter_(full: Tensor, part: Tensor, segments: Segments, index: Tensor) -> Tensor:
    """Write subnet buffers back into full ones; everything else stays as it is."""
    n_shared = segments.full.n_shared
    full[:, :n_shared].copy_(part[:, :n_shared])
    for to, from_ in zip(_blocks(full, segments), _blocks(part, segments), strict=True):
        to.index_copy_(0, index.long(), from_)
    return full


def mean_(
    central: Tensor,
    total: Tensor,
    part: Tensor,
    segments: Segments,
    index: Tensor,
    holders: Tensor,
    worker: int,
) -> None:
    """Take one worker's result into the mean over holders; workers come in order.

    On a GPU the first holder of a block sets its sum in `total`, others add to it, and the last one
    writes sum / count to `central`. A block that nobody holds is never touched.
    """
    n_shared = segments.full.n_shared
    if _fast(central):
        where = (n_shared, segments.grain, index, segments.block_of, holders, worker)
        return kernels.mean_(central, total, part, *where)
    # on a CPU a plain sum and one pass at the end: picking first and last holders out of short
    # segments costs more
    if worker == 0:
        total.zero_()
    total[:, :n_shared] += part[:, :n_shared]
    targets = index.long()[:, None].expand(-1, segments.grain)
    for sums, result in zip(_blocks(total, segments), _blocks(part, segments), strict=True):
        sums.scatter_add_(0, targets, result)  # index_add_ sets up an addition for every run
    if worker == int(holders[:, 1].max()):
        count = holders[segments.block_of.long(), 2:]  # [n_segments, 1]
        for row, sums in enumerate(total.unflatten(1, (-1, segments.grain))):
            own = central[row].view(-1, segments.grain)
            sums /= count.clamp(min=1).to(sums.dtype)
            torch.where(count > 0, sums, own, out=own)


def _blocks(buffer: Tensor, segments: Segments) -> Tensor:
    """[rows, segments of blocks, grain] of a full or a subnet's buffer."""
    return buffer[:, segments.full.n_shared :].unflatten(1, (-1, segments.grain))


def _fast(buffer: Tensor) -> bool:
    return buffer.dtype == torch.float32 and kernels.usable(buffer)


@dataclass(frozen=True)
class CutModel:
    """A Hugging Face model, its blocks, and where their parameters lie in one flat buffer."""

    template: Model
    block_map: BlockMap
    segments: Segments
    dtype: torch.dtype  # of weights and moments

    @property
    def full(self) -> Layout:
        return self.segments.full

    @property
    def device(self) -> torch.device:
        return self.segments.block_of.device


def cut_model(
    template: Model, blocks: BlocksConfig, device: torch.device, dtype: torch.dtype
) -> CutModel:
    block_map = families.partition(template, blocks)
    where = layout(block_map, huggingface.shapes(template))
    return CutModel(template, block_map, cut_segments(where, block_map, device), dtype)
