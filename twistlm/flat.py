"""The layout of one contiguous buffer: all parameters of a model or subnet, end to end.

The order is shared parameters first, then partitioned ones, and matrices before vectors in each.
So the shared part of a subnet is one slice of the central buffer, the blocks are one gather, and
what weight decay touches is two slices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .blocks import BlockMap, Blueprint, Shapes, State, Widths, positions


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in the buffer."""

    shapes: dict[str, tuple[int, ...]]  # in buffer order
    n_shared: int  # elements before the first partitioned parameter
    decayed: tuple[tuple[int, int], ...]  # [start, end) ranges that hold matrices
    plain: tuple[tuple[int, int], ...]  # and those that hold vectors (biases, norms)

    @cached_property
    def offsets(self) -> dict[str, int]:
        offsets, position = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = position
            position += math.prod(shape)
        return offsets

    @property
    def n_params(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def narrowed(self, block_map: BlockMap, widths: Widths) -> Layout:
        """The layout of a subnet with these widths, cut from a model with this one."""
        return layout(block_map, block_map.narrowed(self.shapes, widths))

    def views(self, buffer: Tensor) -> State:
        """Each parameter as a view of `buffer`."""
        assert buffer.numel() == self.n_params
        assert buffer.is_contiguous()
        flat = buffer.view(-1)
        return {
            name: flat[self.offsets[name] : self.offsets[name] + math.prod(shape)].view(shape)
            for name, shape in self.shapes.items()
        }


def layout(block_map: BlockMap, shapes: Shapes) -> Layout:
    """The layout of a model with these parameter shapes."""
    partitioned = block_map.partitioned()

    def section(name: str) -> tuple[bool, bool]:
        return name in partitioned, len(shapes[name]) < 2

    ordered = {name: tuple(shapes[name]) for name in sorted(shapes, key=section)}  # a stable sort
    ranges: dict[tuple[bool, bool], tuple[int, int]] = {}
    position = 0
    for name, shape in ordered.items():
        start, _ = ranges.get(section(name), (position, position))
        position += math.prod(shape)
        ranges[section(name)] = (start, position)
    n_shared = max((end for (blocks, _), (_, end) in ranges.items() if not blocks), default=0)
    return Layout(
        shapes=ordered,
        n_shared=n_shared,
        decayed=tuple(span for (_, vector), span in ranges.items() if not vector),
        plain=tuple(span for (_, vector), span in ranges.items() if vector),
    )


def block_index(
    full: Layout, block_map: BlockMap, blueprint: Blueprint, device: torch.device
) -> Tensor:
    """Central positions of a subnet's block elements, in the subnet's buffer order.

    `central[n_shared:][index]` is what follows the shared part in the subnet's buffer. int64, one
    entry per block element.
    """
    pieces = []
    partitioned = block_map.partitioned()
    for name, shape in full.shapes.items():
        if name not in partitioned:
            continue
        group, part = partitioned[name]
        start = full.offsets[name] - full.n_shared
        ids = torch.arange(start, start + math.prod(shape), device=device).view(shape)
        kept = positions(group, part, blueprint[group.name]).to(device)
        pieces.append(ids.index_select(part.dim, kept).reshape(-1))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def gather_(out: Tensor, full: Tensor, n_shared: int, index: Tensor) -> Tensor:
    """Cut a subnet's buffer out of a full one: `out = [full[:n_shared] | full[n_shared:][index]]`."""
    out[:n_shared].copy_(full[:n_shared])
    torch.index_select(full[n_shared:], 0, index, out=out[n_shared:])
    return out


def scatter_(full: Tensor, part: Tensor, n_shared: int, index: Tensor) -> Tensor:
    """Write a subnet's buffer back to its places; everything else stays as it is."""
    full[:n_shared].copy_(part[:n_shared])
    full[n_shared:].index_copy_(0, index, part[n_shared:])
    return full


def scatter_add_(full: Tensor, part: Tensor, n_shared: int, index: Tensor) -> Tensor:
    """Add a subnet's buffer at its places. A subnet holds no position twice, so order is exact."""
    full[:n_shared].add_(part[:n_shared])
    full[n_shared:].index_add_(0, index, part[n_shared:])
    return full
