"""The central buffer in ranges, each kept by an owner: a rank of torchrun, or an actor on Ray.

A range is a stretch of the shared segments and one of the blocks' segments. A subnet's segments are
sorted, so a range is also two slices of every subnet's buffer: here, those with the range's number.

                        shared          blocks
    central buffer      [ 0 | 1 | 2 ]   [    0    |    1    |    2    ]
    a subnet's buffer   [ 0 | 1 | 2 ]   [  0  |   1   | 2 ]

An owner does with its range what one process does with the whole buffer, in the same order, so the
bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .layout import Layout, Segments

Slices = tuple[slice, slice]  # of shared parameters and of blocks


@dataclass(frozen=True)
class Ranges:
    """Range i has segments [shared[i], shared[i + 1]), and of blocks [blocks[i], blocks[i + 1])."""

    segments: Segments
    n: int

    @cached_property
    def shared(self) -> list[int]:
        return self._ends(self.segments.full.n_shared)

    @cached_property
    def blocks(self) -> list[int]:
        return self._ends(self.segments.full.n_params - self.segments.full.n_shared)

    def _ends(self, size: int) -> list[int]:
        return (size // self.segments.grain * np.arange(self.n + 1) // self.n).tolist()

    @property
    def whole(self) -> Split:
        return Split(self, None, self.blocks)

    def split(self, index: Tensor) -> Split:
        """A subnet's buffer in ranges, by its `Segments.index`."""
        return Split(self, index, np.searchsorted(index.cpu(), self.blocks).tolist())

    @cached_property
    def tensors(self) -> list[Slices]:
        """The ranges moved to where tensors begin: what each owner writes to a checkpoint."""
        full, spans = self.segments.full, []
        for kind, (first, end) in enumerate(((0, full.n_shared), (full.n_shared, full.n_params))):
            begin = np.array([n for n in full.offsets.values() if first <= n < end] + [end])
            mine = [self.whole.slices(i)[kind].start for i in range(self.n)]
            cuts = [*begin[np.searchsorted(begin, mine)].tolist(), end]
            spans.append([slice(*cuts[i : i + 2]) for i in range(self.n)])
        return list(zip(*spans, strict=True))

    def small(self, i: int) -> Segments:
        """The segments of range i, as those of a small central model."""
        all_, first = self.segments, self.segments.full.n_shared // self.segments.grain
        shared, blocks = self.shared[i : i + 2], self.blocks[i : i + 2]
        parts = [slice(*shared), slice(first + blocks[0], first + blocks[1])]
        block_of = torch.cat([all_.block_of[part] for part in parts])
        n_shared, n_blocks = (all_.grain * (end - start) for start, end in (shared, blocks))
        layout = Layout({"shared": (n_shared,), "blocks": (n_blocks,)}, n_shared, (), ())
        return Segments(layout, all_.block_map, all_.grain, {}, block_of)


@dataclass(frozen=True)
class Split:
    """A buffer [rows, n] in ranges: the full one or a subnet's."""

    ranges: Ranges
    index: Tensor | None
    starts: list[int]  # where the blocks of ranges begin in it

    def slices(self, i: int) -> Slices:
        segments, shared = self.ranges.segments, self.ranges.shared
        first, grain = segments.full.n_shared, segments.grain
        return (
            slice(grain * shared[i], grain * shared[i + 1]),
            slice(first + grain * self.starts[i], first + grain * self.starts[i + 1]),
        )

    def size(self, i: int) -> int:
        return sum(each.stop - each.start for each in self.slices(i))

    def inside(self, i: int) -> Tensor:
        """A subnet's segments of range i's blocks, counted from the range's first one."""
        assert self.index is not None
        return self.index[self.starts[i] : self.starts[i + 1]] - self.ranges.blocks[i]

    def get(self, buffer: Tensor, i: int) -> Tensor:
        """Range i of a buffer; a copy, unless it is all of it."""
        return buffer if self.ranges.n == 1 else take(buffer, self.slices(i))

    def set_(self, buffer: Tensor, i: int, part: Tensor) -> None:
        put_(buffer, self.slices(i), part)


def take(buffer: Tensor, slices: Slices) -> Tensor:
    """A copy of two slices of a buffer, end to end."""
    return torch.cat([buffer[:, each] for each in slices], dim=1)


def put_(buffer: Tensor, slices: Slices, part: Tensor) -> None:
    """Write what `take` gave back."""
    n_shared = slices[0].stop - slices[0].start
    buffer[:, slices[0]], buffer[:, slices[1]] = part[:, :n_shared], part[:, n_shared:]


def overlap(a: Slices, b: Slices) -> tuple[Slices, Slices]:
    """What two pairs of slices of one buffer have in common, as slices of a copy of each."""
    pairs = [(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)]
    ends = [(start, max(start, stop)) for start, stop in pairs]

    def inside(own: Slices) -> Slices:
        first = own[0].start, own[1].start - (own[0].stop - own[0].start)  # they lie end to end
        one, two = (slice(s - x, e - x) for (s, e), x in zip(ends, first, strict=True))
        return one, two

    return inside(a), inside(b)
