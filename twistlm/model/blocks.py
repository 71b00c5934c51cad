"""The block algebra: which slices of which parameters belong to which block.

One view carries everything: the partitioned dimension of a parameter is laid out as
`(sections, n_blocks, chunk)`, and a subnet keeps `[:, kept, :]` of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from torch import Tensor

from ..config import BlocksConfig, Kind, Setting

KINDS: tuple[Kind, ...] = ("attn", "ffn")
SETTINGS: dict[Setting, tuple[Kind, ...]] = {"attn": ("attn",), "ffn": ("ffn",), "both": KINDS}

State = dict[str, Tensor]  # trainable parameters by Hugging Face name; a tied one appears once
Shapes = Mapping[str, tuple[int, ...]]  # the same, shapes only
Blueprint = dict[str, tuple[int, ...]]  # group name -> kept block ids, sorted: one subnet
Widths = dict[str, int]  # group name -> number of kept blocks (0: no such layer): a subnet's shape


@dataclass(frozen=True)
class Partition:
    """One parameter whose dimension `dim` is `(sections, n_blocks, chunk)`."""

    param: str
    dim: int
    chunk: int
    sections: int = 1


@dataclass(frozen=True)
class BlockGroup:
    """The blocks of one attention or FFN layer: cut together or not at all."""

    name: str
    kind: Kind
    layer: int
    n_blocks: int
    parts: tuple[Partition, ...]
    out: tuple[str, ...]  # output projection: its weight, and its bias where it has one
    common: tuple[int, ...] = ()  # C: blocks that every subnet keeps, sorted

    @property
    def least(self) -> int:
        """The fewest blocks that a subnet can have here."""
        return max(1, len(self.common))

    @property
    def out_part(self) -> Partition:
        """The output projection's own partition: its blocks are rows of the layer's sum."""
        return next(part for part in self.parts if part.param == self.out[0])


@dataclass(frozen=True)
class BlockMap:
    """All partitioned layers of a model; a parameter that is not in the map is shared."""

    groups: tuple[BlockGroup, ...]

    def __getitem__(self, name: str) -> BlockGroup:
        return next(group for group in self.groups if group.name == name)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are cut, in order."""
        return tuple(sorted({group.layer for group in self.groups}))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in KINDS if self.n_blocks(kind))

    def with_common(self, blocks: BlocksConfig) -> BlockMap:
        """The map with blocks that every subnet keeps (the paper's C)."""
        groups = []
        for group in self.groups:
            common, n = blocks.common(group.kind), group.n_blocks
            if len(set(common)) != len(common) or any(not 0 <= c < n for c in common):
                what = f"blocks.common_{group.kind} = {list(common)}"
                raise ValueError(f"{what}: needs distinct block ids in 0..{n - 1}")
            groups.append(replace(group, common=tuple(sorted(common))))
        return BlockMap(tuple(groups))

    def n_blocks(self, kind: Kind) -> int:
        """N of one kind: the same in every layer of a model, 0 where the kind is shared."""
        return next((group.n_blocks for group in self.groups if group.kind == kind), 0)

    def partitioned(self) -> dict[str, tuple[BlockGroup, Partition]]:
        """Parameter name -> its group and partition."""
        return {part.param: (group, part) for group in self.groups for part in group.parts}

    def check(self, shapes: Shapes) -> None:
        """Every partition must fill its dimension exactly; a wrong map would cut wrong weights."""
        for name, (group, part) in self.partitioned().items():
            made = f"{part.sections} sections x {group.n_blocks} blocks x {part.chunk}"
            shape = shapes.get(name, ())
            if not shape or shape[part.dim] != part.sections * group.n_blocks * part.chunk:
                raise ValueError(f"{name}: dimension {part.dim} of {shape} is not {made}")

    def check_blueprint(self, blueprint: Blueprint) -> None:
        """A blueprint names every group once, with sorted, distinct, existing blocks."""
        if odd := set(blueprint) ^ {group.name for group in self.groups}:
            raise ValueError(f"the blueprint does not fit this model: {', '.join(sorted(odd))}")
        self.check_widths(self.widths(blueprint))
        for group in self.groups:
            kept, n = blueprint[group.name], group.n_blocks
            said = f"blueprint[{group.name!r}] = {kept}"
            if list(kept) != sorted(set(kept)) or not set(kept) <= set(range(n)):
                raise ValueError(f"{said}: needs at most {n} sorted, distinct ids in 0..{n - 1}")
            if not set(group.common) <= set(kept):
                raise ValueError(f"{said} lacks common blocks {group.common}")

    def widths(self, blueprint: Blueprint) -> Widths:
        return {group.name: len(blueprint[group.name]) for group in self.groups}

    def dropped(self, widths: Widths) -> tuple[int, ...]:
        """Layers that keep no blocks: a subnet does without them."""
        return tuple(sorted({group.layer for group in self.groups if not widths[group.name]}))

    def check_widths(self, widths: Widths) -> None:
        """A layer is dropped as a whole: it keeps blocks of both kinds or of none."""
        empty = {(group.layer, group.kind) for group in self.groups if not widths[group.name]}
        for layer in self.dropped(widths):
            if any((layer, kind) not in empty for kind in KINDS):
                said = f"layer {layer} keeps no blocks of one kind"
                raise ValueError(f"{said}: it goes as a whole, where both are cut (blocks.setting)")

    def numbers(self) -> dict[str, range]:
        """Group name -> the numbers of its blocks among all blocks of the map."""
        ends = accumulate(group.n_blocks for group in self.groups)
        each = zip(self.groups, ends, strict=True)
        return {group.name: range(end - group.n_blocks, end) for group, end in each}

    def full_widths(self) -> Widths:
        return {group.name: group.n_blocks for group in self.groups}

    def full(self) -> Blueprint:
        return {group.name: tuple(range(group.n_blocks)) for group in self.groups}

    def narrowed(self, shapes: Shapes, widths: Widths) -> dict[str, tuple[int, ...]]:
        """Shapes of a subnet's parameters; a layer without blocks has none."""
        self.check_widths(widths)
        dropped = self.dropped(widths)
        out = tuple(g.name.removesuffix(g.kind) for g in self.groups if g.layer in dropped)
        result = {name: tuple(s) for name, s in shapes.items() if not name.startswith(out)}
        for name, (group, part) in self.partitioned().items():
            if group.layer not in dropped:
                shape = list(result[name])
                shape[part.dim] = part.sections * widths[group.name] * part.chunk
                result[name] = tuple(shape)
        return result


def count(block_map: BlockMap, shapes: Shapes, widths: Widths) -> int:
    return sum(math.prod(shape) for shape in block_map.narrowed(shapes, widths).values())


def parse_ratio(text: str, n_blocks: int, kind: Kind, n_common: int = 0) -> int:
    """K for a ratio such as `6/12`, `0.5` or `1`: whole blocks, with room for common ones."""
    try:
        k = Fraction(text.strip()) * n_blocks
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"ratio {text!r} is not a fraction such as 6/12 or 0.5") from None
    legal = ", ".join(f"{i}/{n_blocks}" for i in range(max(1, n_common), n_blocks + 1))
    if k.denominator != 1 or not 0 <= k <= n_blocks:
        raise ValueError(f"ratio {text!r} is no whole number of {kind} blocks; legal: {legal}")
    if k < n_common:
        common = f"the {n_common} common {kind} blocks (blocks.common_{kind})"
        raise ValueError(f"ratio {text!r} has no room for {common}; legal: {legal}")
    return int(k)


def shares_of_ratio(block_map: BlockMap, ratio: str) -> dict[str, str]:
    """Each group's ratio in `6/12`, `attn=2/3,ffn=6/12` or `..., ffn.0=1` (one layer)."""
    pairs = [pair.partition("=") for pair in ratio.split(",")] if "=" in ratio else []
    shares = {key.strip(): text for key, _, text in pairs} or dict.fromkeys(KINDS, ratio)
    layers = {f"{group.kind}.{group.layer}": group for group in block_map.groups}
    if odd := [key for key in shares if key not in (*KINDS, *layers)]:
        legal = f"attn, ffn, or a layer that is cut, as in ffn.{block_map.groups[0].layer}=1"
        raise ValueError(f"ratio {ratio!r}: {odd[0]!r} names nothing; legal: {legal}")
    if missing := [key for key, group in layers.items() if not {key, group.kind} & set(shares)]:
        kind, _, layer = missing[0].partition(".")
        raise ValueError(f"ratio {ratio!r} says nothing about {kind} of layer {layer}")
    return {g.name: shares.get(key, shares.get(g.kind, "")) for key, g in layers.items()}


def widths_of_ratio(block_map: BlockMap, ratio: str) -> Widths:
    """Widths for a ratio as in `shares_of_ratio`; a layer that is named with 0 is left out."""
    said = shares_of_ratio(block_map, ratio)
    widths = {
        g.name: parse_ratio(said[g.name], g.n_blocks, g.kind, len(g.common))
        for g in block_map.groups
    }
    if not any(widths.values()):
        raise ValueError(f"ratio {ratio!r} keeps no blocks at all")
    block_map.check_widths(widths)
    return widths
