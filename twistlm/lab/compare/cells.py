"""What a comparison measures, as data: parents x settings x sizes x methods, and CPU speeds.

Sizes are as they are typed: `6/12`, or a share for each kind of layer as `attn=2/3,ffn=6/12`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from ...baselines import STRUCTURED
from ...baselines.methods import METHODS
from ...compute.perplexity import Text
from ...config import Setting
from ...model.blocks import KINDS, SETTINGS
from .parents import ComparedParent

BY_KIND = "one ratio by kinds of layer is attn=2/3,ffn=6/12, others follow in their own --ratios"
# What a cell measures: one of these, or a method of `baselines.NAMES`
WHOLE, RANDOM = "whole", "random"
NESTED = "nested"  # the first blocks of a parent's own order
SCORED_BY = "mask-fisher"  # the best score for whole blocks so far
HEALED, NESTED_HEALED = f"{STRUCTURED}{SCORED_BY} + heal", f"{NESTED} + heal"
SCRATCH = "from scratch"  # the shape of HEALED, trained from random weights
DECODE, ZEROS = "decode", "zeros"  # CPU speed of a ticket's shapes, and of a model with zeros


@dataclass(frozen=True)
class Healing:
    """How each size is trained for itself."""

    teacher: ComparedParent  # its training settings count, too
    tokens: int  # shared by all sizes of a setting
    data: str  # stem of the training tokens
    folder: Path  # for unfinished trainings


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is compared, with its text and its calibration sequences read."""

    settings: tuple[Setting, ...]
    ratios: tuple[str, ...]
    methods: tuple[str, ...]  # of `baselines.NAMES`
    on: tuple[str, ...]  # kinds of parent that they prune
    n: int  # random tickets of each parent and size; 0: none
    seed: int
    text: Text
    choice: Text | None  # what activation scales are chosen on: never `text`
    ids: Tensor | None  # calibration [n, seq_len]; None where nothing needs it
    repairs: tuple[str, ...] = ()  # of `baselines.REPAIRS`
    healing: Healing | None = None

    def ratios_in(self, setting: Setting) -> tuple[str, ...]:
        """Sizes in one setting, each once: two may differ in a kind that it does not cut."""
        found: dict[str, str] = {}
        for ratio in (in_setting(ratio, setting) for ratio in self.ratios):
            found.setdefault(exact(ratio), ratio)
        return tuple(found.values())

    @property
    def has_tickets(self) -> bool:
        """Whether a size must be a whole number of blocks."""
        return self.n > 0 or self.healing is not None or not set(self.methods) <= set(METHODS)


@dataclass(frozen=True)
class Cell:
    """One number of a comparison: what is measured of which parent, at which size."""

    parent: ComparedParent
    what: str
    setting: Setting | None = None
    ratio: str = ""
    repair: str | None = None

    def __str__(self) -> str:
        parts = [self.parent.label, self.setting, self.ratio, self.what, self.repair]
        return " ".join(part for part in parts if part)

    @property
    def is_pruned(self) -> bool:
        """A row of the table, rather than a whole parent or a speed."""
        return self.what not in (WHOLE, DECODE, ZEROS)


def list_cells(parents: Sequence[ComparedParent], sweep: Sweep) -> list[Cell]:
    """All cells in the order of measurement: parent, setting, ratio; speeds last."""
    found: list[Cell] = []
    for parent in parents:
        found.append(Cell(parent, WHOLE))
        for setting in sweep.settings:
            rows = list(_rows(parent, setting, sweep))
            for ratio in sweep.ratios_in(setting):
                found += [Cell(parent, what, setting, ratio, repair) for what, repair in rows]
    # a ticket's speed depends on its shapes alone; zeros are tried once, where there are most
    for setting in sweep.settings if sweep.has_tickets else ():
        found += [Cell(parents[0], DECODE, setting, r) for r in sweep.ratios_in(setting)]
    if set(sweep.methods) & set(METHODS):
        setting = sweep.settings[-1]
        least = min(sweep.ratios_in(setting), key=mean_share)
        found.append(Cell(parents[0], ZEROS, setting, least))
    return found


def _rows(
    parent: ComparedParent, setting: Setting, sweep: Sweep
) -> Iterator[tuple[str, str | None]]:
    """What is measured of a parent at every size of a setting, and how it is repaired."""
    learnt, has_order = setting in parent.settings, bool(parent.parent.progress.order)
    repairs = (None, *sweep.repairs)
    for repair in repairs if sweep.n and learnt else ():
        yield RANDOM, repair
        if has_order:
            yield NESTED, repair
    for method in sweep.methods if parent.method in sweep.on else ():
        for repair in repairs if method not in METHODS else (None,):
            yield method, repair
    if sweep.healing is not None:
        if parent.method == "dense":
            yield HEALED, None
            yield SCRATCH, None
        elif has_order and learnt:
            yield NESTED_HEALED, None


# ---------------------------------------------------------------- sizes


def named_shares(ratio: str) -> dict[str, str]:
    """What stays of each kind or single layer that a ratio names; nothing for a plain fraction."""
    pairs = (pair.split("=", 1) for pair in ratio.split(",")) if "=" in ratio else ()
    return dict(pairs)


def in_setting(ratio: str, setting: Setting) -> str:
    """What a ratio says of the kinds that a setting cuts: of `attn=2/3,ffn=6/12` in ffn, `6/12`."""
    kinds = SETTINGS[setting]
    mine = {
        key: text for key, text in named_shares(ratio).items() if key.partition(".")[0] in kinds
    }
    if not mine:
        return ratio
    alone = len(kinds) == 1 and set(mine) == set(kinds)
    return mine[kinds[0]] if alone else ",".join(f"{key}={text}" for key, text in mine.items())


def exact(ratio: str) -> str:
    """The same for all ways to write a ratio: `1/2` for 6/12 and for attn=2/4,ffn=0.5."""
    shares = {key: Fraction(text) for key, text in named_shares(ratio).items()}
    if len(set(shares.values())) < 2:
        return str(next(iter(shares.values()), None) or Fraction(ratio))
    own = {
        key: share
        for key, share in shares.items()
        if share != shares.get(key.partition(".")[0]) or key in KINDS
    }
    return ",".join(f"{key}={own[key]}" for key in sorted(own))


def mean_share(ratio: str) -> Fraction:
    """How large a ratio is, among others: its share, or the mean of those of its kinds of layer."""
    found = [Fraction(text) for key, text in named_shares(ratio).items() if key in KINDS]
    return sum(found, Fraction(0)) / len(found) if found else Fraction(ratio)


def parse_ratios(options: Sequence[str], settings: Sequence[Setting]) -> tuple[str, ...]:
    """Each size once, as it was typed first in one of several --ratios."""
    found: dict[str, str] = {}
    for typed in options:
        pieces = [piece.strip() for piece in typed.split(",") if piece.strip()]
        for ratio in [_by_kind(typed, pieces, settings)] if "=" in typed else pieces:
            for text in named_shares(ratio).values() or [ratio]:
                _check_share(text)
            found.setdefault(exact(ratio), ratio)
    if not found:
        raise ValueError("--ratios names no ratio: give some as 8/12,6/12")
    return tuple(found.values())


def _by_kind(typed: str, pieces: list[str], settings: Sequence[Setting]) -> str:
    """`attn=2/3,ffn=6/12` without spaces; it must name every kind that is cut, each once."""
    found: dict[str, str] = {}
    for piece in pieces:
        key, equals, text = (part.strip() for part in piece.partition("="))
        kind, dot, layer = key.partition(".")
        if not equals or kind not in KINDS or (dot and not layer.isdecimal()) or key in found:
            raise ValueError(f"--ratios {typed!r}: {piece!r} is out of place; {BY_KIND}")
        found[key] = text
    for setting in settings:
        if missing := [kind for kind in SETTINGS[setting] if kind not in found]:
            raise ValueError(
                f"--ratios {typed!r} says nothing about {missing[0]}, which --settings {setting} "
                f"cuts; {BY_KIND}"
            )
    return ",".join(f"{key}={text}" for key, text in found.items())


def _check_share(text: str) -> None:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--ratios {text!r} is not a fraction such as 6/12 or 0.5") from None
    if not 0 < share <= 1:
        raise ValueError(f"--ratios {text!r}: it must lie in (0, 1]")
